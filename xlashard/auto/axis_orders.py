"""Orders of mesh axes that shard a dimension together, and what they cost.

An axis that stays on a dimension while another one comes or goes must be the major one: the other
order takes a permutation of devices besides. Where some operations need one order and others the
other one, the permutations of one of them remain.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import NamedTuple

from xlashard.auto.axis_costs import WHOLE, Assignment, is_negligible
from xlashard.auto.graph.graph_values import GraphOperation, Labels
from xlashard.auto.graph.program_graph import ProgramGraph
from xlashard.auto.problem import Machine

type AxisOrders = Mapping[Hashable, tuple[str, ...]]
"""Mesh axes in the order in which they shard a label, or a factor of an operation."""

type _Permutations = dict[tuple[str, str], float]
"""For a major and a minor axis, the seconds of a step that the other order costs."""


class AxisOrderer:
    """Chooses the orders of the axes of a program.

    Labels and factors between which several axes stay or move together have one order.

    Args:
        graph: The graph of the program.
        machine: The machine.
    """

    def __init__(self, graph: ProgramGraph, machine: Machine) -> None:
        self._graph, self._machine = graph, machine
        self._axes = {axis.name: axis for axis in machine.axes if axis.size > 1}

    def choose_orders(self, assignment: Assignment) -> AxisOrders:
        """Return the order of axes of the labels and factors that several axes shard.

        Args:
            assignment: Shardings on all axes.
        """
        keys, totals = self._count_permutations(assignment)
        return {key: self._rank_axes(totals[number]) for key, number in keys.items()}

    def price_permutations(self, assignment: Assignment) -> float:
        """Return the time of the permutations in a step that no order avoids.

        Of three axes or more, each two are priced as if the others had no order.

        Args:
            assignment: Shardings on all axes.
        """
        _, totals = self._count_permutations(assignment)
        return sum(
            min(total[a, b], total[b, a])
            for total in totals.values()
            for a, b in combinations(self._axes, 2)
        )

    def _count_permutations(
        self, assignment: Assignment
    ) -> tuple[dict[Hashable, int], dict[int, _Permutations]]:
        """Return what has one order, by label and factor, and the permutations of each."""
        totals: dict[int, _Permutations] = defaultdict(lambda: defaultdict(float))
        graph, joined = self._graph, Labels()
        keys: dict[Hashable, int] = defaultdict(lambda: joined.new(0))
        costs: dict[int, _Permutations] = defaultdict(lambda: defaultdict(float))
        changes = list(self._list_changes(assignment)) if len(self._axes) > 1 else []
        # Operations that need a value alike share its transfer.
        sharing = Counter(change.transfer for change in changes)
        for change in changes:
            op, slot, value = graph.operations[change.number], change.slot, change.value
            times = op.times / sharing[change.transfer]
            factors = find_factors(assignment, op, change.number, slot, change.needed)
            for dim, factor in factors.items():
                before = {axis for axis, state in change.stored.items() if state == dim}
                after = {axis for axis, state in change.needed.items() if state == dim}
                kept = before & after
                label, factor_key = keys[graph.label(value, dim)], keys[factor]
                for source in set(change.stored.values()) - {WHOLE}:
                    if sum(change.stored[axis] == source for axis in after) > 1:
                        joined.join(keys[graph.label(value, source)], factor_key)
                if slot < 0 and value in graph.sums:
                    # Addends are made as their sum is constrained.
                    joined.join(keys[graph.label(graph.sums[value], dim)], factor_key)
                if op.fixed is not None:
                    axes = op.fixed[slot < 0][slot if slot >= 0 else -1 - slot][dim]
                    self._add_costs(costs[factor_key], combinations(axes or (), 2), change, times)
                self._add_costs(costs[label], product(kept, before - kept), change, times)
                self._add_costs(costs[factor_key], product(kept, after - kept), change, times)
        for key, permutations in costs.items():
            total = totals[joined.find(key)]
            for pair, seconds in permutations.items():
                total[pair] += seconds
        return {key: joined.find(number) for key, number in keys.items()}, totals

    def _list_changes(self, assignment: Assignment) -> Iterator["_Change"]:
        """Yield the operands and results of operations, without negligible ones."""
        graph = self._graph
        for number, op in enumerate(graph.operations):
            for slot, value in op.slots:
                if is_negligible(graph, value, number):
                    continue
                stored = assignment.states(graph, self._axes, value)
                needed = {a: assignment.needed(graph, a, number, slot) for a in self._axes}
                transfer = graph.transfer_key(op, slot, value), *needed.values()
                yield _Change(number, slot, value, stored, needed, transfer)

    def _add_costs(
        self,
        permutations: _Permutations,
        pairs: Iterable[tuple[str, str]],
        change: "_Change",
        times: float,
    ) -> None:
        """Add the permutations that a change takes where pairs of axes have the other order."""
        for major, minor in pairs:
            needed = {a: change.stored[a] if s is None else s for a, s in change.needed.items()}
            pieces = max(
                math.prod(self._axes[a].size for a, state in states.items() if state >= 0)
                for states in (change.stored, needed)
            )
            nbytes = self._graph.values[change.value].nbytes / pieces
            once = self._machine.swap_seconds(nbytes, self._axes[major], self._axes[minor])
            permutations[major, minor] += once * times

    def _rank_axes(self, permutations: _Permutations) -> tuple[str, ...]:
        """Return the axes, those first whose place after others costs most."""

        def lost(axis: str) -> float:
            return sum(permutations[b, axis] - permutations[axis, b] for b in self._axes)

        return tuple(sorted(self._axes, key=lost))


class _Change(NamedTuple):
    """Operand or result of an operation, with its states by axis as stored, and as needed.

    What has an equal `transfer` is changed once.
    """

    number: int
    slot: int
    value: int
    stored: Mapping[str, int]
    needed: Mapping[str, int | None]
    transfer: Hashable


def find_factors(
    assignment: Assignment,
    op: GraphOperation,
    number: int,
    slot: int,
    needed: Mapping[str, int | None],
) -> dict[int, Hashable]:
    """Return by dimension the factor along which an operation splits an operand or a result.

    What a spec prescribes stands for itself.

    Args:
        assignment: Shardings on all axes.
        op: The operation.
        number: Its number.
        slot: Position of the operand, or `-1 - position` of the result.
        needed: By axis, the dimension that is sharded as the operation needs it.
    """
    return {
        dim: (number, slot, dim)
        if op.fixed is not None
        else (number, assignment.factors[axis].get(number))
        for axis, dim in needed.items()
        if dim is not None and dim >= 0
    }
