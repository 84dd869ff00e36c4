"""Compile a program for a topology and collect the compiler's dumps.

libtpu returns no executable for a program that exceeds the HBM, and an estimate stops before code
generation, which takes 95 % of the compile time. The dump folder has the same contents in all
cases: the scheduled module, buffer assignment and live ranges.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xlashard._jax.runtime import executables
from xlashard.costs.network_model import multislice_collectives
from xlashard.errors import ProgramTooLargeError
from xlashard.hlo.collectives import Collective
from xlashard.hlo.hlo_program import HloProgram, read, read_executable
from xlashard.hlo.proto_reader import buffers_of
from xlashard.pjit import Compiled, Lowered
from xlashard.pjit.report.facts import compiled_facts, facts_from_hlo
from xlashard.pjit.report.jax_stages import explained_executable
from xlashard.pjit.report.program_values import ExplainedProgram
from xlashard.preflights.dump_folder import temporary_dump_folder
from xlashard.sharding import Mesh


@dataclass(frozen=True)
class Compilation:
    """A program compiled for a topology, with or without its code, or rejected for its memory.

    Attributes:
        program: Facts for reports, with or without an executable.
        compiled: The executable; None for an estimate, and if the program exceeds the HBM.
        module: The compiled module with its buffer assignment.
        seconds: Compile time.
        options: Compiler options of the caller.
        too_large: Whether the compiler rejected the program for its memory.
        is_estimate: Whether the compiler was stopped before code generation.
    """

    program: ExplainedProgram
    compiled: Any
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


def compile_for_report(
    lowered: Lowered,
    options: Mapping[str, Any] | None = None,
    *,
    estimate: bool = False,
    forgotten: str = "",
) -> Compilation:
    """Compile a program and read the compiler's dump.

    Args:
        lowered: Program lowered for the devices of a topology.
        options: Compiler options.
        estimate: Stop before code generation. Module, buffer assignment and collectives are those
            of the whole compilation; code size and cycle estimates are missing.
        forgotten: Facts that the stage of the program did not keep, as one clause. Its call is no
            call of the user then.

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
    program = _program(lowered, compiled, module, forgotten)
    return Compilation(program, compiled, module, seconds, given, too_large, estimate)


def _program(
    lowered: Lowered, compiled: Compiled | None, module: HloProgram, forgotten: str
) -> ExplainedProgram:
    call = lowered._traced._call
    if compiled is not None:
        facts = compiled_facts(compiled._compiled)
    else:
        placement = lowered._request.placement
        facts = facts_from_hlo(lowered._program, lowered._signature, placement, module)
    if not forgotten:
        return ExplainedProgram.of_call(call, facts)
    source = call.traced.jaxpr.debug_info.func_src_info
    return ExplainedProgram(lowered._info, facts, source=source, forgotten=forgotten)


def read_compiled(stage: Any, forgotten: str) -> Compilation:
    """Return a stage that was compiled for a topology as a compilation.

    Its executable has the compiled module, but no buffer assignment.

    Args:
        stage: An `xlashard.Compiled` or a `jax.stages.Compiled`.
        forgotten: Facts that the report lacks, as one clause.
    """
    program = replace(explained_executable(stage), forgotten=forgotten)
    executable = program.facts.executable
    module = read_executable(executable, executables.buffer_assignment(executable))[0]
    return Compilation(program, stage, module, 0.0)


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
    # The name of the CPU compiler's dump is `cpu_after_optimizations`.
    dump = min(folder.glob("*after_optimizations.hlo.pb"))
    if compiled is None:
        return read(dump)
    return read_executable(compiled.runtime_executable(), buffers_of(dump.read_bytes()))[0]
