"""Describe what a program takes, returns, donates, moves and sends, with the user's names."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from xlashard._jax.trace.jaxprs import is_reference
from xlashard._jax.trace.tracing import element_bits
from xlashard.analysis.explain.model import (
    CollectiveReport,
    ConstantReport,
    Decided,
    DonationReport,
    MoveReport,
    ValueReport,
)
from xlashard.analysis.programs.program import Compilation, ProgramValue
from xlashard.analysis.programs.source_lines import SourceLocator
from xlashard.core.program.donation import path_ends
from xlashard.core.sharding import (
    GSPMDSharding,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    partition_spec,
)
from xlashard.core.sharding.replicated import custom_memory_kind
from xlashard.geometry import MeshGrid, ReplicaGroups, SourceTargetPairs, reshard_plan
from xlashard.hlo.collectives import Collective, add_up, along_text


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


def describe_inputs(program: Compilation) -> tuple[ValueReport, ...]:
    """Describe the arguments, then the closed-over arrays."""
    arguments = (describe_value(value, decided_by(value)) for value in program.arguments)
    return (*arguments, *(describe_value(value, "function") for value in program.closed_over))


def describe_outputs(program: Compilation) -> tuple[ValueReport, ...]:
    """Describe the results."""
    alone = len(program.devices) == 1
    chosen: Decided = "default" if alone else "partitioner"
    # In a loaded program all shardings are final.
    lowered: Decided = "caller" if program.has_requests else "unknown"

    def decided(value: ProgramValue) -> Decided:
        if value.lowered_sharding is None:
            return chosen
        return "auto" if value.is_chosen else lowered

    return tuple(describe_value(value, decided(value)) for value in program.results)


def decided_by(value: ProgramValue) -> Decided:
    """Return what decided the sharding of an argument."""
    is_lowered = value.lowered_sharding is not None
    if value.is_chosen:
        return "auto"
    if value.requested is not None:
        return "caller"
    if value.committed:
        return "argument"
    if value.origin == "unknown" and is_lowered:
        return "unknown"
    is_alone = value.sharding is None or value.sharding.num_devices == 1
    return "default" if is_lowered or is_alone else "partitioner"


def describe_value(value: ProgramValue, decided: Decided) -> ValueReport:
    """Describe a value, whose sharding something decided."""
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
        weak_type=bool(getattr(value.aval, "weak_type", False)),
    )


_SMALL_CONSTANT = 1024
"""Bytes of a closed-over array below which no report lists it, such as a table of indices."""


def describe_constants(program: Compilation) -> tuple[ConstantReport, ...]:
    """Describe the closed-over arrays that are constants of the program, the largest first."""
    return tuple(
        ConstantReport(
            path=value.path,
            shape=tuple(value.aval.shape),
            dtype=str(value.aval.dtype),
            spec="" if value.current is None else spec_text(value.current),
            nbytes=value.nbytes,
            argument_bytes=value.bytes_under(value.current) or value.nbytes,
        )
        for value in program.program.constants
        if value.nbytes >= _SMALL_CONSTANT
    )


def describe_moves(program: Compilation) -> tuple[MoveReport, ...]:
    """Describe the arguments that a call has to move, most bytes first."""
    moves = [move for value in program.arguments if (move := _move(value)) is not None]
    return tuple(sorted(moves, key=lambda m: -m.nbytes))


def _move(value: ProgramValue) -> MoveReport | None:
    target, source = value.sharding, value.current
    if target is None or value.origin not in ("array", "host"):
        return None
    if target.is_unreduced:
        return None  # equal to the source, or an error of the call
    if source is None:
        nbytes = value.device_bytes * len(target.addressable_devices)
        return MoveReport(value.path, "host", spec_text(target), 0, nbytes)
    plan = reshard_plan(
        value.aval.shape,
        element_bits(value.aval),
        source.rank_tiling(value.aval.ndim),
        [device.id for device in source.devices],
        target.rank_tiling(value.aval.ndim),
        [device.id for device in target.devices],
    )
    same_memory = custom_memory_kind(source) == custom_memory_kind(target)
    bits = plan.bytes_moved if same_memory else plan.bytes_moved + plan.bytes_kept
    if not bits:
        return None
    return MoveReport(value.path, spec_text(source), spec_text(target), -(-bits // 8), 0)


def find_aliases(program: Compilation) -> tuple[str | None, ...]:
    """Return the path of the result that takes over the buffers of each argument, or None.

    The arguments are followed by the closed-over arrays.
    """
    tokens = program.tokens
    results = {argument: result - tokens for result, argument in program.aliases.items()}
    positions = (*program.parameters, *program.closed_positions)
    takers = [None if i is None else results.get(tokens + i) for i in positions]
    return tuple(None if i is None else program.results[i].path for i in takers)


def describe_donations(program: Compilation) -> tuple[DonationReport, ...]:
    """Describe the arguments that were donated, and those that a result could reuse."""
    aliases = find_aliases(program)
    alias_paths = set(aliases)
    own = program.results[: len(program.results) - len(program.written)]
    free = _FreeResults([r for r in own if r.path not in alias_paths])
    reports = []
    for value, path in zip(program.arguments, aliases, strict=False):
        if value.donated:
            reports.append(DonationReport(value.path, True, path or "", value.device_bytes))
        elif not is_reference(value.aval) and (match := free.take(value)) is not None:
            reports.append(DonationReport(value.path, False, match.path, value.device_bytes))
    return tuple(reports)


class _FreeResults:
    """Results that could reuse an argument's buffers, by place and by the ends of their paths."""

    def __init__(self, results: Sequence[ProgramValue]) -> None:
        self._places: dict[tuple[Sharding, int], Sharding] = {}
        self._results = results
        self._taken: set[int] = set()
        self._by_end: dict[object, deque[int]] = defaultdict(deque)
        for i, result in enumerate(results):
            if result.aval.ndim and (place := self._find_place(result)) is not None:
                for end in path_ends(result.path):
                    self._by_end[place, end].append(i)

    def take(self, value: ProgramValue) -> ProgramValue | None:
        """Return the free result whose path ends most like the argument's, free no longer."""
        place = self._find_place(value)
        for end in () if place is None else path_ends(value.path):
            alike = self._by_end.get((place, end), deque())
            while alike and alike[0] in self._taken:
                alike.popleft()
            if alike:
                self._taken.add(alike[0])
                return self._results[alike.popleft()]
        return None

    def _find_place(self, value: ProgramValue) -> object:
        """Return a key that is equal for values whose buffers can be the same."""
        sharding, ndim = value.sharding, value.aval.ndim
        if sharding is None:
            return None
        kind = custom_memory_kind(sharding)
        if (sharding, ndim) not in self._places:
            equal = (
                other
                for other, rank in self._places
                if rank == ndim
                and custom_memory_kind(other) == kind
                and sharding.is_equivalent_to(other, ndim)
            )
            self._places[sharding, ndim] = self._places.get((next(equal, sharding), ndim), sharding)
        return value.aval.shape, value.aval.dtype, kind, self._places[sharding, ndim]


def describe_collectives(
    collectives: Sequence[Collective],
    grid: MeshGrid | None,
    arguments: Mapping[str, str],
    sources: SourceLocator,
) -> tuple[CollectiveReport, ...]:
    """Group equal collectives with the same cause, most sent bytes first.

    Args:
        collectives: The collectives of the program.
        grid: The mesh that names axes, or None.
        arguments: The path of each argument, by its path in the module.
        sources: Picks the lines to show.
    """
    alike: dict[CollectiveReport, list[Collective]] = {}
    for collective in collectives:
        described = describe_collective(collective, grid, arguments, sources)
        alike.setdefault(described, []).append(collective)
    reports = [replace(described, **add_up(equal)) for described, equal in alike.items()]
    return tuple(sorted(reports, key=lambda r: -r.sent_bytes))


def describe_collective(
    c: Collective, grid: MeshGrid | None, arguments: Mapping[str, str], sources: SourceLocator
) -> CollectiveReport:
    """Describe a collective without its counts and bytes, which equal ones may differ in.

    Args:
        c: The collective.
        grid: The mesh that names axes, or None.
        arguments: The path of each argument, by its path in the module.
        sources: Picks the lines to show.
    """
    axes = None if grid is None else c.axis_names(grid)
    # The cause of a gather is the consumer of the whole value; of others it is their own operation.
    has_consumer = c.kind == "all-gather" or not c.frames
    return CollectiveReport(
        kind=c.kind,
        along=along_text(c, grid),
        axes=axes,
        times_known=c.times_known,
        conditional=c.conditional,
        asynchronous=c.asynchronous,
        operands=tuple(map(str, c.operands)),
        results=tuple(map(str, c.results)),
        op_name=arguments.get(c.op_name, c.op_name),
        # XLA names an argument by its path, and a gather of it likewise.
        argument=arguments.get(c.op_name, ""),
        source=sources.line(c.frames),
        needed_by=c.needed_by if has_consumer else "",
        needed_by_source=sources.line(c.needed_by_frames) if has_consumer else None,
        groups=_positions(c.groups) if axes is None else None,
    )


def _positions(groups: ReplicaGroups | SourceTargetPairs) -> tuple[tuple[int, ...], ...]:
    return groups.pairs if isinstance(groups, SourceTargetPairs) else groups.devices()
