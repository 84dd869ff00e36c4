"""Describe arguments and results of a program: shardings, their origin, moves and donations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count, repeat
from typing import Any

import jax

from xlashard._jax.trace.jaxprs import is_reference
from xlashard._jax.trace.tracing import is_extended, physical_aval, shaped
from xlashard.geometry import reshard_plan
from xlashard.hlo.hlo_program import HloProgram
from xlashard.pjit.arguments import Argument, describe_arguments
from xlashard.pjit.report.communication import SourceLocator
from xlashard.pjit.report.facts import CompiledFacts
from xlashard.pjit.report.model import Decided, DonationReport, MoveReport, ValueReport
from xlashard.pjit.shardings.device_assignment import custom_memory_kind
from xlashard.pjit.stages.info import StageInfo
from xlashard.pjit.trace import Call
from xlashard.program.plan import ProgramPlan
from xlashard.sharding import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    partition_spec,
)


@dataclass(frozen=True, eq=False)
class CallArgument:
    """Argument of a call.

    Attributes:
        value: The argument itself.
        placement: Its sharding, layout and commitment.
        requested: The sharding that the caller requested for it, or None.
    """

    value: Any
    placement: Argument
    requested: Sharding | None


@dataclass(frozen=True, eq=False)
class ProgramValue:
    """Argument or result of a program.

    Attributes:
        path: Its path.
        aval: Its abstract value.
        sharding: Its sharding; None for an argument that the program drops.
        lowered_sharding: Its sharding in the lowered module; None leaves it to the partitioner.
        argument: The argument of the call; None for results, and if the call is unknown.
        is_chosen: True if its sharding was chosen under `AUTO`.
    """

    path: str
    aval: Any
    sharding: XLACompatibleSharding | None
    lowered_sharding: XLACompatibleSharding | None
    argument: CallArgument | None = None
    is_chosen: bool = False

    @property
    def requested(self) -> Sharding | None:
        """Return the sharding that the caller requested, or that of the lowered module."""
        return self.lowered_sharding if self.argument is None else self.argument.requested

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element; of a PRNG key, those of its integers."""
        if not is_extended(self.aval):
            return self.aval.dtype.itemsize
        physical = physical_aval(self.aval)
        return math.prod(physical.shape[self.aval.ndim :]) * physical.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole value."""
        return math.prod(self.aval.shape) * self.itemsize

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the shard on one device."""
        if self.sharding is None:
            return 0
        tiling = self.sharding.rank_tiling(self.aval.ndim)
        return math.prod(tiling.shard_shape(self.aval.shape, uneven=True)) * self.itemsize


@dataclass(frozen=True, eq=False)
class ExplainedProgram:
    """Compiled program with the call that it was compiled for.

    Attributes:
        info: Names, paths and types.
        facts: Facts about the program.
        call: The call; None for a compiled stage, which does not keep it.
        source: Name and location of the function of a program without its call, if known.
        forgotten: Facts that the explained stage does not keep, as one clause; empty for a call.
    """

    info: StageInfo
    facts: CompiledFacts
    call: Call | None = None
    source: str | None = None
    forgotten: str = ""

    @classmethod
    def of_call(cls, call: Call, facts: CompiledFacts) -> "ExplainedProgram":
        """Return the program of a call."""
        return cls(StageInfo.of(call), facts, call)

    @property
    def plan(self) -> ProgramPlan:
        """Plan of the compiled program."""
        return self.facts.parts.plan

    @cached_property
    def mesh(self) -> Mesh | None:
        """Return the mesh of the program; of a loaded program, that of its shardings."""
        parts = self.facts.parts
        named = (
            s.mesh
            for s in (*parts.in_shardings, *parts.out_shardings)
            if isinstance(s, NamedSharding)
        )
        meshes = (mesh for mesh in named if isinstance(mesh, Mesh))
        return self.plan.mesh or next(meshes, None)

    @cached_property
    def sources(self) -> SourceLocator:
        """Return the locator of the source lines that a report shows."""
        call = self.call
        return SourceLocator.of(
            self.source if call is None else call.traced.jaxpr.debug_info.func_src_info
        )

    @cached_property
    def modules(self) -> tuple[HloProgram, ...]:
        """Return the compiled modules, with the lines of this function."""
        return self.facts.modules(self.sources.own_line)

    @cached_property
    def arguments(self) -> tuple[ProgramValue, ...]:
        """Return the arguments of the call, in order."""
        info, facts, call, first = self.info, self.facts, self.call, self.facts.closed_over
        called: Sequence[CallArgument | None] = [None] * len(info.paths)
        if call is not None:
            placements = describe_arguments(call.values, info.paths, info.in_avals)
            called = list(map(CallArgument, call.values, placements, call.in_shardings))
        shardings = iter(facts.parts.in_shardings[first:])
        lowered = iter(self.plan.args[first:])
        moves = (call.moves if call else ()) or (False,) * len(info.paths)
        arguments = zip(info.paths, info.in_avals, called, facts.kept, moves, strict=True)
        return tuple(
            ProgramValue(
                path=path,
                aval=shaped(aval),
                sharding=next(shardings) if is_kept else None,
                lowered_sharding=next(lowered).sharding if is_kept else None,
                argument=argument,
                is_chosen=is_chosen,
            )
            for path, aval, argument, is_kept, is_chosen in arguments
        )

    @cached_property
    def closed_over(self) -> tuple[ProgramValue, ...]:
        """Return the closed-over arrays that are arguments of the program."""
        parts, count = self.facts.parts, self.facts.closed_over
        pairs = zip(parts.in_avals[:count], parts.in_shardings[:count], strict=True)
        return tuple(ProgramValue(f"closed over [{i}]", a, s, s) for i, (a, s) in enumerate(pairs))

    @cached_property
    def results(self) -> tuple[ProgramValue, ...]:
        """Return the results, in order, then the new values of references."""
        parts, written = self.facts.parts, self.facts.written
        count = len(parts.out_avals) - len(written)
        paths = [plan.name or f"result {i}" for i, plan in enumerate(self.plan.results[:count])]
        for reference in written:
            at = self.info.paths[reference] if isinstance(reference, int) else "closed over"
            paths.append(f"{at} as written")
        lowered = [plan.sharding for plan in self.plan.results]
        avals = map(shaped, parts.out_avals)
        values = map(ProgramValue, paths, avals, parts.out_shardings, lowered)
        chosen = self.call.chosen_results if self.call else ()
        flags = chain(chosen, repeat(False))
        return tuple(
            replace(value, is_chosen=flag) if flag else value
            for value, flag in zip(values, flags, strict=False)
        )


def spec_text(sharding: XLACompatibleSharding | Sharding) -> str:
    """Format a sharding: `P('data')`, `device 0`, or XLA's text."""
    match sharding:
        case NamedSharding():
            spec = sharding.normal_spec
            entries = map(_entry, partition_spec(spec).partitions)
            text = f"P({', '.join((*entries, *spec.keywords()))})"
        case SingleDeviceSharding():
            text = f"device {sharding.devices[0].id}"
        case GSPMDSharding():
            text = sharding.tile_assignment.to_text()
        case _:
            text = type(sharding).__name__
    kind = custom_memory_kind(sharding)
    return text if kind is None else f"{text} in {kind}"


def _entry(entry: Any) -> str:
    return "UNCONSTRAINED" if entry is jax.sharding.PartitionSpec.UNCONSTRAINED else repr(entry)


def describe_inputs(program: ExplainedProgram) -> tuple[ValueReport, ...]:
    """Describe the arguments, then the closed-over arrays."""
    arguments = (_describe(value, decided_by(value)) for value in program.arguments)
    return (*arguments, *(_describe(value, "function") for value in program.closed_over))


def describe_outputs(program: ExplainedProgram) -> tuple[ValueReport, ...]:
    """Describe the results."""
    alone = len(program.plan.devices) == 1
    chosen: Decided = "default" if alone else "partitioner"
    # In a loaded program all shardings are final.
    lowered: Decided = "caller" if program.facts.has_requests else "unknown"

    def decided(value: ProgramValue) -> Decided:
        if value.lowered_sharding is None:
            return chosen
        return "auto" if value.is_chosen else lowered

    return tuple(_describe(value, decided(value)) for value in program.results)


def decided_by(value: ProgramValue) -> Decided:
    """Return what decided the sharding of an argument."""
    argument, is_lowered = value.argument, value.lowered_sharding is not None
    if value.is_chosen:
        return "auto"
    if argument is not None and argument.requested is not None:
        return "caller"
    if argument is not None and argument.placement.committed:
        return "argument"
    if argument is None and is_lowered:
        return "unknown"
    is_alone = value.sharding is None or value.sharding.num_devices == 1
    return "default" if is_lowered or is_alone else "partitioner"


def _describe(value: ProgramValue, decided: Decided) -> ValueReport:
    sharding = value.sharding
    return ValueReport(
        path=value.path,
        shape=tuple(value.aval.shape),
        dtype=str(value.aval.dtype),
        spec="" if sharding is None else spec_text(sharding),
        decided_by=decided,
        nbytes=value.nbytes,
        device_bytes=value.device_bytes,
        copies=0 if sharding is None else sharding.rank_tiling(value.aval.ndim).num_replicas,
        memory_kind=None if sharding is None else custom_memory_kind(sharding),
        used=sharding is not None,
    )


def describe_moves(program: ExplainedProgram) -> tuple[MoveReport, ...]:
    """Describe the arguments that a call has to move, most bytes first."""
    moves = [move for value in program.arguments if (move := _move(value)) is not None]
    return tuple(sorted(moves, key=lambda m: -m.nbytes))


def _move(value: ProgramValue) -> MoveReport | None:
    argument, target = value.argument, value.sharding
    if argument is None or target is None or isinstance(argument.value, jax.ShapeDtypeStruct):
        return None
    source = argument.placement.sharding
    if target.is_unreduced:
        return None  # equal to the source, or an error of the call
    if source is None:
        nbytes = value.device_bytes * len(target.addressable_devices)
        return MoveReport(value.path, "host", spec_text(target), 0, nbytes)
    plan = reshard_plan(
        value.aval.shape,
        value.itemsize,
        source.rank_tiling(value.aval.ndim),
        [device.id for device in source.devices],
        target.rank_tiling(value.aval.ndim),
        [device.id for device in target.devices],
    )
    same_memory = custom_memory_kind(source) == custom_memory_kind(target)
    moved = plan.bytes_moved if same_memory else plan.bytes_moved + plan.bytes_kept
    if not moved:
        return None
    return MoveReport(value.path, spec_text(source), spec_text(target), moved, 0)


def describe_donations(program: ExplainedProgram) -> tuple[DonationReport, ...]:
    """Describe the arguments that were donated, and those that a result could reuse."""
    facts = program.facts
    results = {argument: result - facts.tokens for result, argument in facts.aliases.items()}
    taken = set(results.values())
    own = program.results[: len(program.results) - len(facts.written)]
    free = [r for i, r in enumerate(own) if i not in taken]
    positions = count(facts.tokens + facts.closed_over)
    reports = []
    for value, donated in zip(program.arguments, program.info.donated, strict=True):
        result = results.get(next(positions)) if value.sharding is not None else None
        if donated:
            path = "" if result is None else program.results[result].path
            reason = "" if path else facts.refusals.get(value.path, "")
            reports.append(DonationReport(value.path, True, path, value.device_bytes, reason))
        elif not is_reference(value.aval) and (match := _reusing_result(value, free)) is not None:
            free.remove(match)
            reports.append(DonationReport(value.path, False, match.path, value.device_bytes))
    return tuple(reports)


def _reusing_result(value: ProgramValue, results: Sequence[ProgramValue]) -> ProgramValue | None:
    """Return the first result that could reuse an argument's buffers."""
    for result in results:
        same = (result.aval.shape, result.aval.dtype) == (value.aval.shape, value.aval.dtype)
        if same and result.aval.ndim and _same_place(value, result):
            return result
    return None


def _same_place(value: ProgramValue, result: ProgramValue) -> bool:
    one, other = value.sharding, result.sharding
    if one is None or other is None or custom_memory_kind(one) != custom_memory_kind(other):
        return False
    return one.is_equivalent_to(other, value.aval.ndim)
