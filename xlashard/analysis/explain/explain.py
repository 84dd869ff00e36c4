"""`explain`: describe the program that a call would run, without running it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import compress
from typing import Any

import jax

from xlashard._jax.lowering import LoweredBody
from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard._jax.trace import jitted
from xlashard._jax.trace.tracing import shaped
from xlashard._version import __version__
from xlashard.analysis.explain.descriptions import (
    describe_collectives,
    describe_donations,
    describe_inputs,
    describe_moves,
    describe_outputs,
)
from xlashard.analysis.explain.explained_program import (
    CompiledFacts,
    ExplainedProgram,
    compiled_facts,
)
from xlashard.analysis.explain.model import CostReport, MemoryReport, PlaceReport
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.analysis.explain.repeated import describe_repeated
from xlashard.analysis.explain.unmet_requests import describe_unmet
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.shardings.automatic import planned_call
from xlashard.core.pjit.stages.compiled import Executable
from xlashard.core.pjit.stages.from_jax import call_of_stage, traced_call
from xlashard.core.pjit.stages.info import StageInfo
from xlashard.core.pjit.stages.recorded import RecordedProgram
from xlashard.core.pjit.stages.traced import Lowered, Traced
from xlashard.core.pjit.stages.wrapper_paths import NnxPaths
from xlashard.core.pjit.trace import Call
from xlashard.core.program.donation import UnusedDonation, refusal
from xlashard.core.program.execute import ProgramParts
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan
from xlashard.core.sharding import from_jax
from xlashard.core.sharding.named import grid_of
from xlashard.errors import ArgumentError
from xlashard.geometry import MeshGrid
from xlashard.hlo.compiler_log import captured_log
from xlashard.hlo.hlo_program import read_modules
from xlashard.support.tracebacks import short_tracebacks


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
        >>> from xlashard import pjit
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
    with captured_log() as log:
        facts = compiled_facts(function.compile(call, request))
    return ExplainedProgram(
        StageInfo.of(call), replace(facts, log="".join([facts.log, *log])), call
    )


def _report(program: ExplainedProgram) -> ProgramReport:
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
            program.collectives, grid, {v.path for v in inputs}, program.sources
        ),
        not_understood=tuple((+not_understood).items()),
        donations=describe_donations(program),
        forgotten=program.forgotten,
        **find_all(program, ProgramReport),
    )


FINDERS: Mapping[str, Callable[[ExplainedProgram], Sequence[Any]]] = {
    "unmet": describe_unmet,
    "repeated": describe_repeated,
    "moves": describe_moves,
}
"""Functions that return the findings of a program, by the field of reports that holds them."""


def find_all(program: ExplainedProgram, report: type) -> dict[str, Any]:
    """Return the findings of a program, by the fields of a class of reports that hold them."""
    names = {field.name for field in fields(report)}
    return {field: find(program) for field, find in FINDERS.items() if field in names}


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


WITHOUT_ARRAYS = "moves of arguments (a Traced of JAX keeps only their types)"
"""Facts that a `jax.stages.Traced` does not keep."""


def forgotten_by(stage: Any, *, has_requests: bool) -> str:
    """Return the facts that a stage without its call does not keep, as one clause.

    Args:
        stage: The stage.
        has_requests: True if it keeps the shardings with which its results were lowered.
    """
    values = "arguments' shardings" if has_requests else "shardings"
    return (
        f"moves, gathers at constraints, who chose {values} (a {type(stage).__name__} keeps no "
        "arguments and no jaxpr)"
    )


def explained_executable(stage: Any) -> ExplainedProgram:
    """Return the program of a compiled stage of this package or of JAX."""
    if not isinstance(stage, Executable):
        return explained_stage(stage)
    facts = compiled_facts(stage._compiled)
    forgotten = forgotten_by(stage, has_requests=facts.has_requests)
    return ExplainedProgram(stage._info, facts, forgotten=forgotten)


def explained_stage(stage: jax.stages.Lowered | jax.stages.Compiled) -> ExplainedProgram:
    """Return the program of a stage of JAX; a Lowered is compiled first.

    Raises:
        ArgumentError: If the stage was lowered for another platform than that of its devices.
    """
    compiled, requests, log = stage, None, []
    if isinstance(stage, jax.stages.Lowered):
        _check_platform(stage)
        with captured_log() as log:
            compiled, requests = stage.compile(), jitted.read_requests(stage)
    read = jitted.read_compiled(compiled)
    if read is None:
        raise ArgumentError(  # no-catalogue: JAX makes no such stage in the supported versions
            f"{type(stage).__name__} does not run as one program: pass the function and its "
            "arguments"
        )
    shardings: Any = [tuple(map(from_jax, side)) for side in read.shardings]
    avals = tuple(map(shaped, read.taken_avals)), tuple(map(shaped, read.out_avals))
    closed = len(avals[0]) - sum(read.kept)
    nnx = NnxPaths.of(*read.trees, read.paths[0])
    paths = read.paths if nnx is None else (nnx.arguments, nnx.results)
    names = [*("",) * closed, *compress(paths[0], read.kept)], paths[1]
    plan = ProgramPlan(
        name=read.name,
        devices=read.devices,
        args=_values(avals[0], shardings[0], names[0]),
        results=_values(avals[1], shardings[1], names[1]),
        donated=(*(False,) * closed, *compress(read.donated, read.kept)),
        partitioner=Partitioner.in_force(),
    )
    aliases = executables.aliases(read.executable)
    refusals = _refusals(plan, aliases, len(read.ordered_effects))
    if requests is not None:
        ins, outs = (tuple(map(_requested, side)) for side in requests)
        args, results = _values(avals[0], ins, names[0]), _values(avals[1], outs, names[1])
        plan = replace(plan, args=args, results=results)
    parts = ProgramParts(
        plan=plan,
        in_shardings=shardings[0],
        out_shardings=shardings[1],
        in_avals=avals[0],
        out_avals=avals[1],
        committed=True,
        body=LoweredBody(ordered_effects=read.ordered_effects),
    )
    info = StageInfo(
        read.name, *read.trees, read.in_avals, avals[1], paths=paths[0], donated=read.donated
    )
    facts = CompiledFacts(
        parts=parts,
        kept=read.kept,
        written=(),
        aliases=aliases,
        refusals=refusals,
        has_requests=requests is not None,
        modules=lambda _: read_modules(read.executable),
        executable=read.executable,
        log="".join(log),
    )
    forgotten = forgotten_by(stage, has_requests=requests is not None)
    return ExplainedProgram(info, facts, source=read.source, forgotten=forgotten)


def _check_platform(lowered: jax.stages.Lowered) -> None:
    devices, platforms = jitted.target_of(lowered)
    own = compiler.platform_of(devices[0]) if devices else "no platform"
    if own not in platforms:
        raise ArgumentError(
            f"the Lowered was lowered for {', '.join(platforms)}, but its devices are of {own}: "
            "omit lowering_platforms to explain its program"
        )


def _values(
    avals: Sequence[Any], shardings: Sequence[Any], names: Sequence[str]
) -> tuple[ValuePlan, ...]:
    return tuple(
        ValuePlan(tuple(aval.shape), str(aval.dtype), sharding, name=name)
        for aval, sharding, name in zip(avals, shardings, names, strict=True)
    )


def _requested(sharding: Any) -> Any:
    return None if isinstance(sharding, UnspecifiedValue) else from_jax(sharding)


def _refusals(
    plan: ProgramPlan, aliases: Mapping[int, int], tokens: int
) -> dict[str, UnusedDonation]:
    """Return the reasons why donated arguments keep their buffers, by path."""
    aliased = {result - tokens: argument - tokens for result, argument in aliases.items()}
    return {
        value.name: refusal(plan, i, dict(aliased))
        for i, (value, donated) in enumerate(zip(plan.args, plan.donated, strict=True))
        if donated and i not in aliased.values()
    }
