"""`explain`: describe the program that a call would run, without running it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard._jax.trace import jitted
from xlashard._version import __version__
from xlashard.errors import ArgumentError
from xlashard.geometry import MeshGrid
from xlashard.pjit.function import Function
from xlashard.pjit.lower import LoweringRequest
from xlashard.pjit.report.communication import describe_collectives
from xlashard.pjit.report.facts import compiled_facts
from xlashard.pjit.report.jax_stages import (
    WITHOUT_ARRAYS,
    explained_executable,
    explained_stage,
)
from xlashard.pjit.report.model import CostReport, MemoryReport, PlaceReport
from xlashard.pjit.report.program_report import ProgramReport
from xlashard.pjit.report.program_values import (
    ExplainedProgram,
    describe_donations,
    describe_inputs,
    describe_moves,
    describe_outputs,
)
from xlashard.pjit.report.repeated import describe_repeated
from xlashard.pjit.report.replication import describe_replications, describe_uneven
from xlashard.pjit.shardings.automatic import planned_call
from xlashard.pjit.stages.compiled import Executable
from xlashard.pjit.stages.from_jax import call_of_stage, traced_call
from xlashard.pjit.stages.recorded import RecordedProgram
from xlashard.pjit.stages.traced import Lowered, Traced
from xlashard.pjit.trace import Call
from xlashard.sharding.named import grid_of


def explain(fun: Any, *args: Any, **kwargs: Any) -> ProgramReport:
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
        **kwargs: Keyword arguments of the call.

    Returns:
        The report. `print(report)` shows the largest rows of each table, `report.print(all=True)`
        all rows.

    Raises:
        ArgumentError: If `fun` is of another type, or the arguments do not match its signature.
        ResourceError: As the call itself; likewise its other errors.

    Example:
        >>> import numpy as np
        >>> from xlashard.pjit import pjit
        >>> report = explain(pjit(lambda x: x @ x.T), np.ones((4, 8), np.float32))
        >>> [(value.path, value.type, value.device_bytes) for value in report.inputs]
        [('x', 'float32[4,8]', 128)]
        >>> report.collectives
        ()
    """
    with short_tracebacks:
        return _report(_program(fun, args, kwargs))


def _program(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExplainedProgram:
    fun = jitted.inner_stage(fun) or fun
    if isinstance(fun, _STAGES) and (args or kwargs):
        raise ArgumentError(
            f"explain takes a {type(fun).__name__} without arguments: write "
            "xlashard.explain(stage), or pass the function and its arguments"
        )
    match fun:
        case Executable():
            return explained_executable(fun)
        case Traced():
            return _from_stage(fun.lower())
        case Lowered():
            return _from_stage(fun)
        case RecordedProgram():
            return _from_stage(fun.stage.lower())
        case jax.stages.Traced():
            return replace(_from_call(*call_of_stage(fun)), forgotten=WITHOUT_ARRAYS)
        case jax.stages.Lowered() | jax.stages.Compiled():
            return explained_stage(fun)
    if not callable(fun):
        raise ArgumentError(
            f"explain takes a function or one of its stages, not {type(fun).__name__}: write "
            "xlashard.explain(f, x), without calling f"
        )
    function, call = traced_call(fun, args, kwargs)
    return _from_call(function, call)


_STAGES = (
    Executable,
    RecordedProgram,
    jax.stages.Traced,
    jax.stages.Lowered,
    jax.stages.Compiled,
)


def _from_call(function: Function, call: Call) -> ExplainedProgram:
    call = planned_call(function, call)
    return _from_request(function, call, function.lowering_request(call, function.arguments(call)))


def _from_stage(lowered: Lowered) -> ExplainedProgram:
    own = compiler.platform_of(lowered._request.placement.devices[0])
    if lowered._platform != own:
        raise ArgumentError(
            f"{lowered.fun_name} was lowered for {lowered._platform}, but its devices are of "
            f"{own}: omit lowering_platforms to explain its program"
        )
    return _from_request(lowered._traced._function, lowered._traced._call, lowered._request)


def _from_request(function: Function, call: Call, request: LoweringRequest) -> ExplainedProgram:
    return ExplainedProgram.of_call(call, compiled_facts(function.compile(call, request)))


def _report(program: ExplainedProgram) -> ProgramReport:
    collectives = [collective for module in program.modules for collective in module.collectives]
    mesh = program.mesh
    grid: MeshGrid | None = None if mesh is None else grid_of(mesh)
    inputs = describe_inputs(program)
    not_understood = Counter[str]()
    for module in program.modules:
        not_understood.update(module.not_understood)
        not_understood["loop of unknown trip count"] += len(module.unknown_loops)
    return ProgramReport(
        name=program.info.name,
        place=_place(program),
        cost=_cost(program),
        memory=_memory(program),
        inputs=inputs,
        outputs=describe_outputs(program),
        collectives=describe_collectives(
            collectives, grid, {v.path for v in inputs}, program.sources
        ),
        moves=describe_moves(program),
        not_understood=tuple((+not_understood).items()),
        donations=describe_donations(program),
        replications=describe_replications(program, collectives, program.sources),
        forgotten=program.forgotten,
        uneven=describe_uneven(program),
        repeated=describe_repeated(program, program.modules),
    )


def _place(program: ExplainedProgram) -> PlaceReport:
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


def _queried(query: Callable[[Any], Any], program: ExplainedProgram) -> Any:
    try:
        return query(program.facts.executable)
    except jax.errors.JaxRuntimeError:  # unsupported by some PJRT plugins
        return None


def _cost(program: ExplainedProgram) -> CostReport | None:
    cost = _queried(executables.compiled_cost, program)
    if not cost:
        return None
    return CostReport(float(cost.get("flops", 0.0)), float(cost.get("bytes accessed", 0.0)))


def _memory(program: ExplainedProgram) -> MemoryReport | None:
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
