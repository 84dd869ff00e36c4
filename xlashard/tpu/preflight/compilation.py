"""Compile a program for a topology and collect the compiler's dumps.

libtpu returns no executable for a program that exceeds the HBM, and an estimate stops before code
generation, which takes 95 % of the compile time. The dump folder has the same contents in all
cases: the scheduled module, buffer assignment and live ranges.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from xlashard.errors import ProgramTooLargeError
from xlashard.hlo.collectives import Collective
from xlashard.hlo.hlo_program import HloProgram, read, read_executable
from xlashard.hlo.proto_reader import buffers_of
from xlashard.pjit import Compiled, Lowered
from xlashard.pjit.report.facts import compiled_facts, facts_from_hlo
from xlashard.pjit.report.program_values import ExplainedProgram
from xlashard.sharding import Mesh
from xlashard.tpu.cost.network_model import multislice_collectives
from xlashard.tpu.preflight.dump_folder import temporary_dump_folder


@dataclass(frozen=True)
class Compilation:
    """A program compiled for a topology, with or without its code, or rejected for its memory.

    Attributes:
        lowered: The lowered program.
        compiled: The executable; None for an estimate, and if the program exceeds the HBM.
        module: The compiled module with its buffer assignment.
        seconds: Compile time.
        options: Compiler options of the caller.
        too_large: Whether the compiler rejected the program for its memory.
        is_estimate: Whether the compiler was stopped before code generation.
    """

    lowered: Lowered
    compiled: Compiled | None
    module: HloProgram
    seconds: float
    options: tuple[tuple[str, Any], ...] = ()
    too_large: bool = False
    is_estimate: bool = False
    _collectives: dict[Mesh, tuple[Collective, ...]] = field(default_factory=dict, compare=False)

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
            self.module,
        )
        return ExplainedProgram.of_call(call, facts)


def compile_for_report(
    lowered: Lowered, options: Mapping[str, Any] | None = None, *, estimate: bool = False
) -> Compilation:
    """Compile a program and read the compiler's dump.

    Args:
        lowered: Program lowered for the devices of a topology.
        options: Compiler options.
        estimate: Stop before code generation. Module, buffer assignment and collectives are those
            of the whole compilation; code size and cycle estimates are missing.

    Raises:
        CompileError: If compilation fails for a reason other than memory.
        ProgramTooLargeError: If the program exceeds a memory other than HBM.
        TopologyError: If the installed libtpu can't stop before code generation.
    """
    caller_options = dict(options or {})
    with temporary_dump_folder() as folder:
        started = time.perf_counter()
        all_options = {**caller_options, **_DUMPS, "xla_dump_to": str(folder)}
        compiled, too_large = None, False
        try:
            if estimate:
                lowered._run_hlo_passes(all_options)
            else:
                compiled = lowered.compile(all_options)
        except ProgramTooLargeError as error:
            if not _ran_out_of_hbm(folder):
                # no-catalogue: an error of libtpu
                raise _with_advice(error, lowered.fun_name, folder) from None
            too_large = True
        seconds = time.perf_counter() - started
        module = _read(folder, compiled)
    given = tuple(caller_options.items())
    return Compilation(lowered, compiled, module, seconds, given, too_large, estimate)


_DUMPS = {"xla_dump_hlo_as_proto": True}


def _ran_out_of_hbm(folder: Path) -> bool:
    """Return whether the program exceeded HBM, rather than another memory such as VMEM."""
    return any(folder.glob("*.oom_intermediate_module.hlo.pb"))


def _with_advice(error: ProgramTooLargeError, name: str, folder: Path) -> ProgramTooLargeError:
    """Return the error with advice, if buffers were assigned in HBM."""
    if not any(folder.glob("*.after_optimizations.hlo.pb")):
        return error
    return ProgramTooLargeError(
        f"{name} fits in HBM, but one of its operations exceeds an on-chip memory, such as VMEM: "
        f"use smaller blocks in the kernel, or raise the compiler option "
        f"xla_tpu_scoped_vmem_limit_kib. {error}"
    )


def _read(folder: Path, compiled: Compiled | None) -> HloProgram:
    """Read the dump, or the executable's module with the buffer assignment of the dump.

    The executable's module has the compiler's cycle estimates; dumps are written earlier.
    """
    dump = min(folder.glob("*.after_optimizations.hlo.pb"))
    if compiled is None:
        return read(dump)
    return read_executable(compiled.runtime_executable(), buffers_of(dump.read_bytes()))[0]
