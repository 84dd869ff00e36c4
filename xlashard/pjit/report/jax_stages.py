"""Explain compiled stages of JAX: the facts that JAX keeps of a program."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import jax

from xlashard._jax.lowering import LoweredBody, uses_shardy
from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.shardings import UnspecifiedValue
from xlashard._jax.trace import jitted
from xlashard._jax.trace.tracing import shaped
from xlashard.errors import ArgumentError
from xlashard.hlo.hlo_program import read_modules
from xlashard.pjit.report.facts import CompiledFacts, compiled_facts
from xlashard.pjit.report.program_values import ExplainedProgram
from xlashard.pjit.stages.compiled import Executable
from xlashard.pjit.stages.info import StageInfo
from xlashard.pjit.stages.nnx_paths import NnxPaths
from xlashard.program.donation import refusal
from xlashard.program.execute import ProgramParts
from xlashard.program.plan import Partitioner, ProgramPlan, ValuePlan
from xlashard.sharding import from_jax

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
    compiled, requests = stage, None
    if isinstance(stage, jax.stages.Lowered):
        _check_platform(stage)
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
        partitioner=Partitioner.SHARDY if uses_shardy() else Partitioner.GSPMD,
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


def _refusals(plan: ProgramPlan, aliases: Mapping[int, int], tokens: int) -> dict[str, str]:
    """Return the reasons why donated arguments keep their buffers, by path."""
    taken = {result - tokens: argument - tokens for result, argument in aliases.items()}
    return {
        value.name: refusal(plan, i, dict(taken)).reason
        for i, (value, donated) in enumerate(zip(plan.args, plan.donated, strict=True))
        if donated and i not in taken.values()
    }
