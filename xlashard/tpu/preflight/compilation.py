"""Compiling for a topology, with all that the compiler tells on the way.

libtpu refuses a program that is too large for the chip's memory and gives nothing back. What it
writes into its dump folder is the same in both cases: the scheduled module, where each of its
values lies in memory, and how long.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xlashard.errors import ProgramTooLargeError
from xlashard.pjit import Compiled, Lowered
from xlashard.pjit.face import Face
from xlashard.pjit.report.facts import ProgramText, facts_of, facts_of_text
from xlashard.pjit.report.values import Program
from xlashard.program.hlo import HloText, read_hlo
from xlashard.tpu.preflight.dump_folder import temporary_dump_folder


@dataclass(frozen=True)
class Dump:
    """What the compiler wrote of one program.

    Attributes:
        hlo: The optimised, scheduled module.
        buffers: Where its values lie: the text of XLA's buffer assignment; empty if not written.
        live_ranges: When they are alive, and which are at the peak; empty if not written.
        before_partitioning: The module before SPMD partitioning, with a sharding for each
            argument and result; empty if the partitioner chose none of them.
    """

    hlo: str
    buffers: str
    live_ranges: str
    before_partitioning: str = ""


@dataclass(frozen=True)
class Compilation:
    """A program compiled for a topology, or refused for its memory.

    Attributes:
        lowered: What was compiled.
        compiled: The program; None where it needs more memory than a device has.
        dump: What the compiler wrote.
        seconds: How long it took.
        options: Options of the compiler that the caller gave.
    """

    lowered: Lowered
    compiled: Compiled | None
    dump: Dump
    seconds: float
    options: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def module(self) -> HloText:
        """The optimised module, read.

        That of the compiled program where there is one: it has the compiler's own estimates,
        which the dump is written too early for.
        """
        text = self.dump.hlo if self.compiled is None else self.compiled.as_text()
        return read_hlo(text)[0]

    @cached_property
    def program(self) -> Program:
        """The facts that reports of programs are made from, with or without an executable."""
        lowered, call = self.lowered, self.lowered._traced._call
        if self.compiled is not None:
            return Program(Face.of(call), facts_of(self.compiled._prepared), call)
        text = ProgramText(self.dump.hlo, self.dump.before_partitioning)
        placement = lowered._order.placement
        facts = facts_of_text(lowered._program, lowered._interface, placement, text)
        return Program(Face.of(call), facts, call)


def compile_for_report(lowered: Lowered, options: Mapping[str, Any] | None = None) -> Compilation:
    """Compiles and keeps what the compiler tells.

    Args:
        lowered: On the devices of a topology.
        options: Options of the compiler.

    Raises:
        CompileError: If the compiler refuses the program for another reason than the chip's memory.
        ProgramTooLargeError: If it is another memory of the chip than its HBM that is too small.
    """
    given = dict(options or {})
    with temporary_dump_folder() as folder:
        started = time.perf_counter()
        try:
            compiled = lowered.compile({**given, **_dump_options(lowered, folder)})
        except ProgramTooLargeError as error:
            if not _ran_out_of_hbm(folder):
                # no-catalogue: an error of libtpu
                raise _told(error, lowered.fun_name, folder) from None
            compiled = None
        seconds = time.perf_counter() - started
        dump = _read(folder)
    return Compilation(lowered, compiled, dump, seconds, tuple(given.items()))


def _dump_options(lowered: Lowered, folder: Path) -> dict[str, Any]:
    plan = lowered._program.plan
    if not any(value.is_free for value in (*plan.args, *plan.results)):
        return {"xla_dump_to": str(folder)}
    # Only an executable says what the partitioner chose, and there may be none.
    return {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": ".*spmd-partitioning.*"}


def _ran_out_of_hbm(folder: Path) -> bool:
    """Whether it was the chip's memory: there are others, that of a kernel's blocks for example."""
    return any(folder.glob("*.oom_intermediate_module.txt"))


def _told(error: ProgramTooLargeError, name: str, folder: Path) -> ProgramTooLargeError:
    """The same with what can be done, where the values have found their places in HBM."""
    if not any(folder.glob("*.after_optimizations-buffer-assignment.txt")):
        return error
    return ProgramTooLargeError(
        f"{name} finds its place in HBM, and one of its operations not in the memory within the "
        "chip, such as VMEM: make the blocks of a kernel smaller, or raise the compiler's option "
        f"xla_tpu_scoped_vmem_limit_kib. {error}"
    )


def _read(folder: Path) -> Dump:
    def text(ending: str) -> str:
        found = sorted(folder.glob(f"*.{ending}.txt"))
        return found[0].read_text() if found else ""

    return Dump(
        hlo=text("after_optimizations"),
        buffers=text("after_optimizations-buffer-assignment"),
        live_ranges=text("after_optimizations-live-range"),
        before_partitioning=text("before_*spmd-partitioning"),
    )
