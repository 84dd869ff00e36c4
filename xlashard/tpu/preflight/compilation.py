"""Compile a program for a topology and collect the compiler's dumps.

libtpu returns no executable for a program that exceeds the HBM. Its dump folder has the same
contents either way: the scheduled module, buffer assignment and live ranges.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from xlashard.errors import ProgramTooLargeError
from xlashard.pjit import Compiled, Lowered
from xlashard.pjit.report.facts import compiled_facts, facts_from_hlo
from xlashard.pjit.report.program_values import ExplainedProgram
from xlashard.program.hlo.collectives import Collective, HloModule, read_hlo
from xlashard.sharding import Mesh
from xlashard.tpu.preflight.cost.network_model import multislice_collectives
from xlashard.tpu.preflight.dump_folder import temporary_dump_folder


@dataclass(frozen=True)
class Dump:
    """Compiler dumps of one program.

    Attributes:
        hlo: Optimised and scheduled HLO module.
        buffers: Text of XLA's buffer assignment; empty if not written.
        live_ranges: Live range of each buffer; empty if not written.
        before_partitioning: The module before SPMD partitioning, with a sharding for each argument
            and result; empty if the partitioner chose none of them.
    """

    hlo: str
    buffers: str
    live_ranges: str
    before_partitioning: str = ""


@dataclass(frozen=True)
class Compilation:
    """A program compiled for a topology, or rejected for its memory.

    Attributes:
        lowered: The lowered program.
        compiled: The executable; None if the program exceeds the device memory.
        dump: Compiler dumps.
        seconds: Compile time.
        options: Compiler options of the caller.
    """

    lowered: Lowered
    compiled: Compiled | None
    dump: Dump
    seconds: float
    options: tuple[tuple[str, Any], ...] = ()
    _collectives: dict[Mesh, tuple[Collective, ...]] = field(default_factory=dict, compare=False)

    @cached_property
    def module(self) -> HloModule:
        """Parsed optimised module.

        Prefers the text of the executable, which includes the compiler's cycle estimates; dumps are
        written earlier.
        """
        return self.dumped if self.compiled is None else read_hlo(self.compiled.as_text())[0]

    @cached_property
    def dumped(self) -> HloModule:
        """Parsed module of the dump, whose values the buffer assignment names."""
        return read_hlo(self.dump.hlo)[0]

    def collectives(self, mesh: Mesh) -> tuple[Collective, ...]:
        """Return the collectives of the program, in all slices of a mesh and between them."""
        if mesh not in self._collectives:
            self._collectives[mesh] = tuple(multislice_collectives(self.module, mesh))
        return self._collectives[mesh]

    @cached_property
    def program(self) -> ExplainedProgram:
        """Facts for reports, with or without an executable."""
        lowered, call = self.lowered, self.lowered._traced._call
        if self.compiled is not None:
            return ExplainedProgram.of_call(call, compiled_facts(self.compiled._compiled))
        facts = facts_from_hlo(
            lowered._program,
            lowered._signature,
            lowered._request.placement,
            self.dump.hlo,
            self.dump.before_partitioning,
        )
        return ExplainedProgram.of_call(call, facts)


def compile_for_report(lowered: Lowered, options: Mapping[str, Any] | None = None) -> Compilation:
    """Compile a program and collect the compiler's dumps.

    Args:
        lowered: Program lowered for the devices of a topology.
        options: Compiler options.

    Raises:
        CompileError: If compilation fails for a reason other than memory.
        ProgramTooLargeError: If the program exceeds a memory other than HBM.
    """
    caller_options = dict(options or {})
    with temporary_dump_folder() as folder:
        started = time.perf_counter()
        try:
            compiled = lowered.compile({**caller_options, **_dump_options(lowered, folder)})
        except ProgramTooLargeError as error:
            if not _ran_out_of_hbm(folder):
                # no-catalogue: an error of libtpu
                raise _with_advice(error, lowered.fun_name, folder) from None
            compiled = None
        seconds = time.perf_counter() - started
        dump = _read(folder)
    return Compilation(lowered, compiled, dump, seconds, tuple(caller_options.items()))


def _dump_options(lowered: Lowered, folder: Path) -> dict[str, Any]:
    plan = lowered._program.plan
    if not any(value.is_free for value in (*plan.args, *plan.results)):
        return {"xla_dump_to": str(folder)}
    # Without an executable, only this dump has the partitioner's shardings.
    return {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": ".*spmd-partitioning.*"}


def _ran_out_of_hbm(folder: Path) -> bool:
    """Return whether the program exceeded HBM, rather than another memory such as VMEM."""
    return any(folder.glob("*.oom_intermediate_module.txt"))


def _with_advice(error: ProgramTooLargeError, name: str, folder: Path) -> ProgramTooLargeError:
    """Return the error with advice, if buffers were assigned in HBM."""
    if not any(folder.glob("*.after_optimizations-buffer-assignment.txt")):
        return error
    return ProgramTooLargeError(
        f"{name} fits in HBM, but one of its operations exceeds an on-chip memory, such as VMEM: "
        f"use smaller blocks in the kernel, or raise the compiler option "
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
