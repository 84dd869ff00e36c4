"""`explain`: describe the program that a call would run, without running it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import jax

from xlashard._jax.runtime import compiler, executables
from xlashard._version import __version__
from xlashard.analysis.explain.descriptions import (
    describe_collectives,
    describe_constants,
    describe_donations,
    describe_inputs,
    describe_moves,
    describe_outputs,
)
from xlashard.analysis.explain.inner_values import describe_inner_values
from xlashard.analysis.explain.model import CostReport, MemoryReport, PlaceReport
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.analysis.explain.repeated import describe_repeated
from xlashard.analysis.explain.sections import read_causes
from xlashard.analysis.explain.unmet_requests import describe_unmet
from xlashard.analysis.programs.program import Compilation, Program
from xlashard.analysis.programs.program_reader import compile_program, read
from xlashard.analysis.programs.propagation import watch_values
from xlashard.analysis.programs.source_lines import distinguish_lines
from xlashard.core.sharding.named import grid_of
from xlashard.geometry import MeshGrid
from xlashard.support.collector import collector_paused
from xlashard.support.tracebacks import short_tracebacks


def explain(fun: Any, *args: Any, values: Any = None, **kwargs: Any) -> ProgramReport:
    """Report the inputs, outputs, collectives and memory of the program of a call.

    The program is compiled as by the call itself, and cached: a later call with equal arguments
    reuses it. Nothing runs, and nothing is donated.

    Lines are those of this function, even if it shares the executable of an earlier, equal one. A
    program from JAX's persistent cache has the lines of the function that was compiled: the key of
    that cache ignores lines, unless `jax_compilation_cache_include_metadata_in_key` is set.

    Args:
        fun: A function of `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit`, or a plain
            function, as `jax.jit` would run it; or one of their stages, or a program made by
            `compile_stablehlo`, which need no arguments.
        *args: Arguments of a call; a `jax.ShapeDtypeStruct` stands in for an array.
        values: Regular expression of names: the report has the sharding of each value inside whose
            `checkpoint_name`, name scopes, operation, function or line it matches. The program is
            compiled once more for it. What is no text is an argument of the call.
        **kwargs: Keyword arguments of the call.

    Returns:
        The report. `print(report)` shows the largest rows of each table, `report.print(all=True)`
        all rows.

    Raises:
        ArgumentError: If `fun` is of another type, or the arguments do not match its signature.
        ResourceError: As the call itself; likewise its other errors.

    Example:
        >>> import numpy as np
        >>> from xlashard import pjit
        >>> report = explain(pjit(lambda x: x @ x.T), np.ones((4, 8), np.float32))
        >>> [(value.path, value.type, value.device_bytes) for value in report.inputs]
        [('x', 'float32[4,8]', 128)]
        >>> report.collectives
        ()
    """
    if values is not None and not isinstance(values, str):
        values, kwargs = "", {**kwargs, "values": values}
    with short_tracebacks:
        return explain_call(fun, args, kwargs, values or "")


def explain_call(
    fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: str
) -> ProgramReport:
    """Report the program of a call; see `explain`.

    Args:
        fun: The function, or a stage or program without arguments.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        values: Pattern of the values inside to show; empty for none.
    """
    program = read(fun, tuple(args), dict(kwargs), "explain")
    lowered = program.lower() if isinstance(program, Program) else program
    compiled = compile_program(lowered)
    return _report(watch_values(lowered, compiled, values) if values else compiled)


@collector_paused()
def _report(program: Compilation) -> ProgramReport:
    mesh = program.mesh
    grid: MeshGrid | None = None if mesh is None else grid_of(mesh)
    inputs = describe_inputs(program)
    not_understood = Counter[str]()
    for module in program.modules:
        not_understood.update(module.not_understood)
        not_understood["loop of unknown trip count"] += len(module.unknown_loops)
    collectives = describe_collectives(
        program.collectives, grid, program.argument_names, program.sources
    )
    report = ProgramReport(
        name=program.name,
        place=_place(program),
        cost=_cost(program),
        memory=_memory(program),
        inputs=inputs,
        outputs=describe_outputs(program),
        collectives=collectives,
        not_understood=tuple((+not_understood).items()),
        donations=describe_donations(program),
        forgotten=program.program.unknown,
        excerpts=read_causes(collectives),
        **find_all(program, ProgramReport),
    )
    return distinguish_lines(report)


FINDERS: Mapping[str, Callable[[Compilation], Sequence[Any]]] = {
    "unmet": describe_unmet,
    "repeated": describe_repeated,
    "constants": describe_constants,
    "moves": describe_moves,
    "values": describe_inner_values,
}
"""Functions that return the findings of a program, by the field of reports that holds them."""


def find_all(program: Compilation, report: type) -> dict[str, Any]:
    """Return the findings of a program, by the fields of a class of reports that hold them."""
    names = {field.name for field in fields(report)}
    return {field: find(program) for field, find in FINDERS.items() if field in names}


def _place(program: Compilation) -> PlaceReport:
    plan = program.plan
    first = plan.devices[0]
    axes = program.mesh.shape.items() if program.mesh is not None else ()
    return PlaceReport(
        platform=first.platform,
        device_kind=first.device_kind,
        num_devices=len(plan.devices),
        num_processes=len({device.process_index for device in plan.devices}),
        mesh=tuple((str(name), int(size)) for name, size in axes),
        partitioner=plan.partitioner.value,
        xlashard=__version__,
        jax=jax.__version__,
        jaxlib=executables.jaxlib_version(),
        runtime=compiler.client_of(first).platform_version,
    )


def _queried(query: Callable[[Any], Any], program: Compilation) -> Any:
    try:
        return query(program.executable)
    except jax.errors.JaxRuntimeError:  # unsupported by some PJRT plugins
        return None


def _cost(program: Compilation) -> CostReport | None:
    cost = _queried(executables.compiled_cost, program)
    if not cost:
        return None
    return CostReport(float(cost.get("flops", 0.0)), float(cost.get("bytes accessed", 0.0)))


def _memory(program: Compilation) -> MemoryReport | None:
    stats = _queried(executables.compiled_memory, program)
    if stats is None:
        return None
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    host = ("argument", "output", "temp", "generated_code")
    return MemoryReport(
        argument_bytes=stats.argument_size_in_bytes,
        result_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        peak_bytes=peak or None,
        host_bytes=sum(getattr(stats, f"host_{part}_size_in_bytes", 0) for part in host),
    )
