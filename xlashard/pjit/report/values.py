"""The arguments and results of a program: where they lie, who said so, and what it costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import jax

from xlashard._jax.runtime.shardings import default_memory_kind
from xlashard._jax.trace.jaxprs import is_reference
from xlashard._jax.trace.tracing import is_extended, physical_aval, shaped
from xlashard.geometry import reshard_plan
from xlashard.pjit.arguments import Argument, describe_arguments
from xlashard.pjit.report.communication import SourceLocator
from xlashard.pjit.report.facts import CompiledFacts
from xlashard.pjit.report.model import Decided, DonationReport, MoveReport, ValueReport
from xlashard.pjit.stages.info import StageInfo
from xlashard.pjit.trace import Call
from xlashard.program import ProgramPlan
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
class Given:
    """An argument as a call gave it.

    Attributes:
        value: The argument itself.
        there: Where it is.
        said: What the caller said of it, or None.
    """

    value: Any
    there: Argument
    said: Sharding | None


@dataclass(frozen=True, eq=False)
class Value:
    """One argument or result of a program.

    Attributes:
        path: Its path.
        aval: Its abstract value.
        sharding: How it is dealt out; None for an argument that the program leaves out.
        placed: How the program was asked to deal it out; None left that to the partitioner.
        given: The argument of the call; None for others, and where the call is not known.
    """

    path: str
    aval: Any
    sharding: XLACompatibleSharding | None
    placed: XLACompatibleSharding | None
    given: Given | None = None

    @property
    def said(self) -> Sharding | None:
        """What was said of it: by the caller, or, where that is not known, to the compiler."""
        return self.placed if self.given is None else self.given.said

    @property
    def itemsize(self) -> int:
        """Bytes of an element; of a PRNG key, of the integers that hold it."""
        if not is_extended(self.aval):
            return self.aval.dtype.itemsize
        physical = physical_aval(self.aval)
        return math.prod(physical.shape[self.aval.ndim :]) * physical.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return math.prod(self.aval.shape) * self.itemsize

    @property
    def device_bytes(self) -> int:
        """Bytes of the part on one device."""
        if self.sharding is None:
            return 0
        tiling = self.sharding.rank_tiling(self.aval.ndim)
        return math.prod(tiling.shard_shape(self.aval.shape, uneven=True)) * self.itemsize


@dataclass(frozen=True, eq=False)
class Program:
    """A program, and what is known of the call that it was compiled for.

    Attributes:
        info: Names, paths and types.
        facts: The program.
        call: The call; None for a compiled stage, which has forgotten it.
    """

    info: StageInfo
    facts: CompiledFacts
    call: Call | None = None

    @property
    def plan(self) -> ProgramPlan:
        """What was compiled."""
        return self.facts.parts.plan

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh that names axes; a program that was loaded knows it by its shardings only."""
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
        """Which lines of the program's source a report shows."""
        call = self.call
        return SourceLocator.of(
            None if call is None else call.traced.jaxpr.debug_info.func_src_info
        )

    @cached_property
    def text(self) -> str:
        """The optimised HLO, with the lines of this very function."""
        return self.facts.text(self.sources.own_line)

    @cached_property
    def arguments(self) -> tuple[Value, ...]:
        """The arguments of the call, in order."""
        info, facts, first = self.info, self.facts, self.facts.closed_over
        taken = iter(facts.parts.in_shardings[first:])
        placed = iter(self.plan.args[first:])
        arguments = zip(info.paths, info.in_avals, self._given, facts.kept, strict=True)
        return tuple(
            Value(
                path=path,
                aval=shaped(aval),
                sharding=next(taken) if is_kept else None,
                placed=next(placed).sharding if is_kept else None,
                given=given,
            )
            for path, aval, given, is_kept in arguments
        )

    @property
    def _given(self) -> "Sequence[Given | None]":
        call = self.call
        if call is None:
            return [None] * len(self.info.paths)
        there = describe_arguments(call.values, call.traced.arg_names, call.traced.in_avals)
        return tuple(map(Given, call.values, there, call.in_shardings))

    @cached_property
    def closed_over(self) -> tuple[Value, ...]:
        """The arrays that the function closes over and that became arguments."""
        parts, count = self.facts.parts, self.facts.closed_over
        pairs = zip(parts.in_avals[:count], parts.in_shardings[:count], strict=True)
        return tuple(Value(f"closed over [{i}]", a, s, s) for i, (a, s) in enumerate(pairs))

    @cached_property
    def results(self) -> tuple[Value, ...]:
        """The results, in order, then the new values of references."""
        parts, written = self.facts.parts, self.facts.written
        count = len(parts.out_avals) - len(written)
        paths = [plan.name or f"result {i}" for i, plan in enumerate(self.plan.results[:count])]
        for reference in written:
            at = self.info.paths[reference] if isinstance(reference, int) else "closed over"
            paths.append(f"{at} as written")
        placed = [plan.sharding for plan in self.plan.results]
        return tuple(map(Value, paths, map(shaped, parts.out_avals), parts.out_shardings, placed))


def spec_text(sharding: XLACompatibleSharding | Sharding) -> str:
    """A sharding in short: `P('data')`, `device 0`, or XLA's text."""
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
    kind = _special_memory(sharding)
    return text if kind is None else f"{text} in {kind}"


def _entry(entry: Any) -> str:
    return "UNCONSTRAINED" if entry is jax.sharding.PartitionSpec.UNCONSTRAINED else repr(entry)


def _special_memory(sharding: Any) -> str | None:
    kind = sharding.memory_kind
    return None if kind in (None, default_memory_kind(sharding.devices[0])) else kind


def describe_inputs(program: Program) -> tuple[ValueReport, ...]:
    """The arguments, then what the function closes over."""
    arguments = (_describe(value, _decided(value)) for value in program.arguments)
    return (*arguments, *(_describe(value, "function") for value in program.closed_over))


def describe_outputs(program: Program) -> tuple[ValueReport, ...]:
    """The results."""
    alone = len(program.plan.devices) == 1
    chosen: Decided = "default" if alone else "partitioner"
    # A program that was loaded from a file has all of them settled.
    placed: Decided = "caller" if program.facts.remembers else "unknown"
    return tuple(
        _describe(value, chosen if value.placed is None else placed) for value in program.results
    )


def _decided(value: Value) -> Decided:
    alone = value.sharding is None or value.sharding.num_devices == 1
    if value.given is None:
        return "unknown" if value.placed is not None else "default" if alone else "partitioner"
    if value.given.said is not None:
        return "caller"
    if value.given.there.committed:
        return "argument"
    return "default" if value.placed is not None or alone else "partitioner"


def _describe(value: Value, decided: Decided) -> ValueReport:
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
        memory_kind=None if sharding is None else _special_memory(sharding),
        used=sharding is not None,
    )


def describe_moves(program: Program) -> tuple[MoveReport, ...]:
    """The arguments that a call has to move, most bytes first."""
    moves = [move for value in program.arguments if (move := _move(value)) is not None]
    return tuple(sorted(moves, key=lambda m: -(m.device_bytes_moved + m.host_bytes)))


def _move(value: Value) -> MoveReport | None:
    given, wanted = value.given, value.sharding
    if given is None or wanted is None or isinstance(given.value, jax.ShapeDtypeStruct):
        return None
    there = given.there.sharding
    if wanted.is_unreduced:
        return None  # it is in place, or refused
    if there is None:
        nbytes = value.device_bytes * len(wanted.addressable_devices)
        return MoveReport(value.path, "host", spec_text(wanted), 0, nbytes)
    plan = reshard_plan(
        value.aval.shape,
        value.itemsize,
        there.rank_tiling(value.aval.ndim),
        [device.id for device in there.devices],
        wanted.rank_tiling(value.aval.ndim),
        [device.id for device in wanted.devices],
    )
    same_memory = _special_memory(there) == _special_memory(wanted)
    moved = plan.bytes_moved if same_memory else plan.bytes_moved + plan.bytes_kept
    if not moved:
        return None
    return MoveReport(value.path, spec_text(there), spec_text(wanted), moved, 0)


def describe_donations(program: Program) -> tuple[DonationReport, ...]:
    """The arguments that were donated, and those that have a result to take them over."""
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
        elif not is_reference(value.aval) and (match := _alike(value, free)) is not None:
            free.remove(match)
            reports.append(DonationReport(value.path, False, match.path, value.device_bytes))
    return tuple(reports)


def _alike(value: Value, results: Sequence[Value]) -> Value | None:
    """The first result that could take over an argument's buffers."""
    for result in results:
        same = (result.aval.shape, result.aval.dtype) == (value.aval.shape, value.aval.dtype)
        if same and result.aval.ndim and _same_place(value, result):
            return result
    return None


def _same_place(value: Value, result: Value) -> bool:
    one, other = value.sharding, result.sharding
    if one is None or other is None or _special_memory(one) != _special_memory(other):
        return False
    return one.is_equivalent_to(other, value.aval.ndim)
