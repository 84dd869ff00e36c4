"""Collectives of a compiled program that its layout did not foresee.

The search foresees a transfer wherever a value is stored otherwise than an operation needs or makes
it. The partitioner may reshard elsewhere, repeat a transfer, or choose a slower kind. A collective
is foreseen if it moves the elements of a foreseen transfer along its axis, as often, by its kind or
a cheaper one.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from xlashard.auto.axis_costs import PARTIAL, WHOLE, Assignment
from xlashard.auto.graph.program_graph import ProgramGraph
from xlashard.auto.problem import ForeseenTransfer
from xlashard.core.sharding import Mesh
from xlashard.geometry import MeshGrid
from xlashard.hlo.collective_kinds import CollectiveKind
from xlashard.hlo.collectives import Collective
from xlashard.hlo.shapes import Shape
from xlashard.predict.costs.network_model import NetworkCost

_TOLERANCE = 0.12
"""Share by which padding and halos change the elements of a collective."""
_NEGLIGIBLE_SHARE = 0.01
"""Share of a step below which a collective isn't named."""
_KINDS: dict[CollectiveKind, tuple[CollectiveKind, ...]] = {
    "all-reduce": ("all-reduce", "reduce-scatter", "all-gather", "collective-permute"),
    "reduce-scatter": ("reduce-scatter", "all-to-all", "collective-permute"),
    "all-gather": ("all-gather", "collective-permute", "collective-broadcast"),
    "all-to-all": ("all-to-all", "ragged-all-to-all", "collective-permute"),
}
"""Kinds of collectives that a transfer of a kind may become."""


type StateChange = tuple[str, int, int, int, int, int]
"""Mesh axis, operation, slot, value, and its states as it is stored and as it is needed."""


def state_changes(
    graph: ProgramGraph, axes: Sequence[str], assignment: Assignment
) -> Iterator[StateChange]:
    """Yield the changes of states between storage and operations; those that are shared, once.

    Args:
        graph: The graph of the program.
        axes: Names of the mesh axes.
        assignment: The assignment.
    """
    shared: set[tuple[object, ...]] = set()
    for (number, op), axis in itertools.product(enumerate(graph.operations), axes):
        for slot, value in op.slots:
            stored = assignment.state(graph, axis, value)
            needed = assignment.needed(graph, axis, number, slot)
            key = axis, graph.transfer_key(op, slot, value), needed
            if needed is not None and needed != stored and key not in shared:
                shared.add(key)
                yield axis, number, slot, value, stored, needed


def foreseen_transfers(
    graph: ProgramGraph, axes: Sequence[str], assignment: Assignment, small_bytes: float = 0.0
) -> Iterator[ForeseenTransfer]:
    """Yield the transfers of an assignment.

    Args:
        graph: The graph of the program.
        axes: Names of the mesh axes.
        assignment: The assignment.
        small_bytes: Bytes of a value up to which all devices gather it by an all-reduce.
    """
    for axis, number, slot, value, stored, needed in state_changes(graph, axes, assignment):
        source, target = (stored, needed) if slot >= 0 else (needed, stored)
        if source == WHOLE:
            continue
        elements = math.prod(graph.values[value].shape)
        if source == PARTIAL and _is_reduced_whole(graph, axes, assignment, number, slot):
            target = WHOLE
        kind, times = _kind(source, target), graph.operations[number].times
        if kind == "all-to-all" and _part_or_meet(graph, axes, assignment, number, slot, value):
            kind = "all-gather"
        if kind == "all-gather" and graph.values[value].nbytes <= small_bytes:
            kind = "all-reduce"
        elif kind == "all-reduce":
            times /= graph.accumulated.get(value, 1.0)
        yield ForeseenTransfer(axis, kind, elements, times)
    for value, label, times in graph.reductions:
        elements = math.prod(graph.values[value].shape)
        for axis in axes:
            if graph.labels.find(label) in assignment.labels[axis]:
                yield ForeseenTransfer(axis, "all-reduce", elements, times)


def _is_reduced_whole(
    graph: ProgramGraph, axes: Sequence[str], assignment: Assignment, number: int, slot: int
) -> bool:
    """Return True if a partial result is reduced over several axes before it is scattered."""
    op = graph.operations[number]
    value = op.results[-1 - slot]
    assert value is not None
    reduced = [a for a in axes if assignment.needed(graph, a, number, slot) == PARTIAL]
    scattered = [a for a in reduced if assignment.state(graph, a, value) != WHOLE]
    return len(reduced) > 1 and (len(scattered) > 1 or not op.rule.flops)


def _part_or_meet(
    graph: ProgramGraph,
    axes: Sequence[str],
    assignment: Assignment,
    number: int,
    slot: int,
    value: int,
) -> bool:
    """Return True if two axes leave a dimension for different ones, or move to one from those."""
    moves = [
        (assignment.state(graph, axis, value), assignment.needed(graph, axis, number, slot))
        for axis in axes
    ]
    moves = [(a, b) for a, b in moves if b is not None and min(a, b) >= 0 and a != b]
    return any((a == c) != (b == d) for (a, b), (c, d) in itertools.combinations(moves, 2))


def _kind(source: int, target: int) -> CollectiveKind:
    if source == PARTIAL:
        return "all-reduce" if target == WHOLE else "reduce-scatter"
    return "all-gather" if target == WHOLE else "all-to-all"


def unforeseen_collectives(
    costs: Iterable[tuple[Collective, NetworkCost]],
    transfers: Iterable[ForeseenTransfer],
    mesh: Mesh,
    step_seconds: float,
) -> list[tuple[Collective, NetworkCost]]:
    """Return the collectives that aren't foreseen and aren't negligible, most expensive first.

    A combined collective has the unforeseen part of its values and of its time.

    Args:
        costs: Collectives of a compiled program, with the network cost of one run.
        transfers: The foreseen transfers.
        mesh: The mesh.
        step_seconds: Time of a step, in seconds.
    """
    sizes = [size for size in mesh.shape.values() if size > 1]
    pieces = {math.prod(c) for n in range(len(sizes) + 1) for c in itertools.combinations(sizes, n)}
    left = [_Remaining(transfer, transfer.times) for transfer in transfers]
    unforeseen = []
    for collective, cost in sorted(costs, key=lambda each: -link_seconds(*each)):
        total = link_seconds(collective, cost)
        if total < _NEGLIGIBLE_SHARE * step_seconds:
            continue
        names = set(axes_along(collective, mesh))
        shapes = max(collective.operands, collective.results, key=_nbytes)
        unknown = tuple(
            shape for shape in shapes if not _take_transfer(collective, shape, names, left, pieces)
        )
        share = _nbytes(unknown) / max(_nbytes(shapes), 1)
        if total * share >= _NEGLIGIBLE_SHARE * step_seconds:
            part = replace(collective, operands=unknown, results=unknown)
            seconds = cost.expected_seconds * share
            unforeseen.append((part, replace(cost, expected_seconds=seconds)))
    return unforeseen


def link_seconds(collective: Collective, cost: NetworkCost) -> float:
    """Return the time of a collective on the links in a step, which other work may hide."""
    return collective.times * cost.expected_seconds


def axes_along(collective: Collective, mesh: MeshGrid | Mesh) -> tuple[str, ...]:
    """Return the mesh axes that a collective goes along; all, if its groups follow none."""
    names = collective.axis_names(mesh)
    return tuple(mesh.axis_names) if names is None else names


@dataclass
class _Remaining:
    """Foreseen transfer, and its runs that no collective has taken."""

    transfer: ForeseenTransfer
    runs: float


def _nbytes(shapes: Iterable[Shape]) -> int:
    return sum(shape.nbytes for shape in shapes)


def _take_transfer(
    collective: Collective,
    shape: Shape,
    axes: set[str],
    left: Sequence[_Remaining],
    pieces: set[int],
) -> bool:
    """Find a foreseen transfer for a value of a collective, and take its runs."""
    moved, runs = math.prod(shape.dims) or 1, float(collective.times)
    for each in left:
        transfer = each.transfer
        if transfer.axis not in axes or collective.kind not in _KINDS[transfer.kind]:
            continue
        if _is_share(transfer.elements / moved, pieces) and each.runs > 0.99 * runs:
            each.runs -= runs
            return True
        # Outside of a loop, for all of its runs.
        total = transfer.elements * transfer.times / (moved * runs)
        if each.runs == transfer.times and _is_share(total, pieces):
            each.runs = 0.0
            return True
    return False


def _is_share(ratio: float, pieces: set[int]) -> bool:
    return any(abs(ratio / count - 1) < _TOLERANCE for count in pieces)
