"""Layouts of assignments: specs of arguments and results, and constraints inside."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import product

from xlashard._jax.trace.primitive_names import SCATTERS
from xlashard.auto.axis_costs import PARTIAL, WHOLE, Assignment
from xlashard.auto.axis_orders import AxisOrderer, AxisOrders, find_factors
from xlashard.auto.foreseen import foreseen_transfers
from xlashard.auto.graph.graph_values import GraphOperation
from xlashard.auto.graph.program_graph import ProgramGraph
from xlashard.auto.problem import AutoProblem, ConstraintSite, ProgramLayout
from xlashard.auto.rules.factors import can_shard
from xlashard.core.sharding import PartitionSpec

SMALL_BYTES = 1 << 12
"""Shards below this size, in bytes, are negligible."""

INSIDE = "; inside: "
"""Ends the name of a layout, before that of its constraints."""

type LayoutKey = tuple[object, ...]
"""Shardings of a layout, which equal layouts share."""


def layout_key(layout: ProgramLayout) -> LayoutKey:
    """Return the shardings of a layout."""
    return layout.in_specs, layout.out_specs, layout.constraints


class LayoutBuilder:
    """Builder of the layouts of a program.

    Args:
        graph: The graph of the program.
        problem: Its problem.
        orderer: Chooses the orders of its axes.
    """

    def __init__(self, graph: ProgramGraph, problem: AutoProblem, orderer: AxisOrderer) -> None:
        self._graph, self._problem = graph, problem
        self._axes = {axis.name: axis for axis in problem.machine.axes if axis.size > 1}
        self._orderer = orderer
        self._small_bytes = problem.machine.join([*self._axes.values()]).small_bytes
        self._whole_sums: dict[LayoutKey, tuple[tuple[ConstraintSite, PartitionSpec], ...]] = {}

    def thinned(self, layout: ProgramLayout) -> list[ProgramLayout]:
        """Return a layout with other constraints inside, as the partitioner may do better so.

        Constraints remain on results of products, nowhere, as specs by hand often have none, or on
        operands. Or partial sums are constrained to be whole before they are sharded, so that the
        partitioner doesn't turn their products into loops.
        """
        products = {op.path for op in self._graph.operations if op.rule.flops}
        kept = {
            "results of products": lambda site: site.path in products and site.kind == "result",
            "none": lambda site: False,
            "operands": lambda site: site.kind == "operand",
        }
        variants = {
            name: tuple((site, spec) for site, spec in layout.constraints if keep(site))
            for name, keep in kept.items()
        }
        sums = self._whole_sums.get(layout_key(layout), layout.constraints)
        if sums != layout.constraints:
            variants["whole sums"] = sums
        return [
            replace(layout, name=f"{layout.name}{INSIDE}{name}", constraints=constraints)
            for name, constraints in variants.items()
        ]

    def layout(
        self, name: str, assignment: Assignment, seconds: float, memory_bytes: float
    ) -> ProgramLayout:
        """Return the layout of shardings on all axes.

        Args:
            name: Its name.
            assignment: The shardings.
            seconds: Predicted time of a step.
            memory_bytes: Predicted memory per device.
        """
        orders = self._orderer.choose_orders(assignment)

        def stored(value: int | None) -> PartitionSpec:
            if value is None:
                return PartitionSpec()
            return self.spec(value, assignment.states(self._graph, self._axes, value), orders)

        ins, outs = self._graph.fixed
        layout = ProgramLayout(
            name=name,
            in_specs=tuple(ins.get(i, stored(v)) for i, v in enumerate(self._graph.arguments)),
            out_specs=tuple(outs.get(i, stored(v)) for i, v in enumerate(self._graph.results)),
            constraints=tuple(self._constraints(assignment, orders)),
            seconds=seconds,
            memory_bytes=memory_bytes,
            transfers=tuple(
                foreseen_transfers(self._graph, tuple(self._axes), assignment, self._small_bytes)
            ),
        )
        whole = self._constraints(assignment, orders, sums_whole=True)
        self._whole_sums.setdefault(layout_key(layout), tuple(whole))
        return layout

    def spec(
        self,
        value: int,
        states: dict[str, int],
        orders: AxisOrders | None = None,
        factors: Mapping[int, Hashable] | None = None,
    ) -> PartitionSpec:
        """Return the spec of a value.

        Args:
            value: The value.
            states: By axis, the dimension that is sharded over it, or WHOLE.
            orders: Orders of the axes of labels and of factors; None for that of the mesh.
            factors: By dimension, the factor of the operation that needs the value so; None for a
                value as it is stored.
        """
        entries: list[str | tuple[str, ...] | None] = []
        for dim in range(len(self._graph.values[value].shape)):
            axes = tuple(axis for axis, state in states.items() if state == dim)
            if len(axes) > 1 and orders:
                key = (factors or {}).get(dim, self._graph.label(value, dim))
                axes = tuple(axis for axis in orders.get(key, axes) if axis in axes)
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def _divides(self, value: int, states: dict[str, int]) -> bool:
        """Return True if the axes that shard a value divide its dimensions, or nearly so."""
        pieces = [1] * len(self._graph.values[value].shape)
        for axis, dim in states.items():
            if dim != WHOLE:
                pieces[dim] *= self._axes[axis].size
        return all(map(can_shard, self._graph.values[value].shape, pieces))

    def _needed(self, assignment: Assignment, number: int, slot: int) -> dict[str, int | None]:
        return {a: assignment.needed(self._graph, a, number, slot) for a in self._axes}

    def _constrained_state(
        self, stored: dict[str, int], needed: dict[str, int | None], sums_whole: bool
    ) -> dict[str, int]:
        """Return the states to constrain a result to before it is stored."""
        state_at = dict(stored)
        for axis, state in needed.items():
            if sums_whole and state == PARTIAL:
                state_at[axis] = WHOLE
            elif state not in (None, WHOLE, PARTIAL):
                state_at[axis] = state
        return state_at

    def _sums(self, assignment: Assignment) -> dict[int, dict[str, int]]:
        """Return the sums of results that are made alike, but not as stored, with their states.

        Their addends stay as they are made, and the sum is reduced once.
        """
        graph = self._graph
        requirements: dict[int, list[dict[str, int | None]]] = {}
        for number, op in enumerate(graph.operations):
            for slot, value in op.slots:
                if slot < 0 and value in graph.sums:
                    needed = self._needed(assignment, number, slot)
                    requirements.setdefault(graph.sums[value], []).append(needed)
        sums = {}
        for value, every in requirements.items():
            stored = assignment.states(graph, self._axes, value)
            constrained = self._constrained_state(stored, every[0], sums_whole=True)
            alike = constrained != stored and all(needed == every[0] for needed in every)
            if alike and self._divides(value, constrained):
                sums[value] = constrained
        return sums

    def _of_total(
        self, assignment: Assignment, op: GraphOperation, orders: AxisOrders
    ) -> Iterable[tuple[ConstraintSite, PartitionSpec]]:
        """Yield the constraints of a total that is sharded otherwise than its loop's carry."""
        specs = [
            self.spec(v, assignment.states(self._graph, self._axes, v), orders) for _, v in op.slots
        ]
        carried = self._graph.values[op.slots[0][1]]
        if specs[0] != specs[1] and carried.nbytes >= SMALL_BYTES * self._problem.machine.size:
            yield from product(carried.sites, specs)

    def _constraints(
        self, assignment: Assignment, orders: AxisOrders, *, sums_whole: bool = False
    ) -> Iterable[tuple[ConstraintSite, PartitionSpec]]:
        """Yield the constraints inside: what operations need and make, and the carries of loops."""
        graph = self._graph
        # The shards of smaller values are negligible: they follow, or the partitioner decides.
        small = SMALL_BYTES * self._problem.machine.size
        sums = self._sums(assignment)
        for number, op in enumerate(graph.operations):
            if op.fixed is not None:
                continue
            if not op.path:
                yield from self._of_total(assignment, op, orders)
                continue
            for slot, value in op.slots:
                if graph.values[value].nbytes < small:
                    continue
                stored = assignment.states(graph, self._axes, value)
                needed = self._needed(assignment, number, slot)
                factors = find_factors(assignment, op, number, slot, needed)
                if slot < 0 and op.name == "slice" and PARTIAL in needed.values():
                    # The partitioner sends an edge only to the devices that need it.
                    continue
                if slot < 0:
                    # First as the operation makes it: its result decides how it is partitioned.
                    total = sums.get(graph.sums.get(value, value))
                    constrained = total or self._constrained_state(stored, needed, sums_whole)
                    site = ConstraintSite(op.path, "result", -1 - slot)
                    if constrained != stored and self._divides(value, constrained):
                        yield site, self.spec(value, constrained, orders, factors)
                    if graph.is_state(value) and set(stored.values()) == {WHOLE}:
                        # A gradient that is added up needs no constraint, which costs a copy.
                        continue
                    if total is None:
                        yield site, self.spec(value, stored, orders)
                elif needed != stored or (slot == 1 and op.name in SCATTERS):
                    # The partitioner splits a scatter whose indices are open by its own costs.
                    states = {a: WHOLE if s is None else s for a, s in needed.items()}
                    yield (
                        ConstraintSite(op.path, "operand", slot),
                        self.spec(value, states, orders, factors),
                    )
        for value, constrained in sums.items():
            stored = assignment.states(graph, self._axes, value)
            for site in graph.values[value].sites if graph.values[value].nbytes >= small else ():
                if site.kind == "result":
                    yield site, self.spec(value, constrained, orders)
                    yield site, self.spec(value, stored, orders)
        arguments = set(graph.arguments)
        for index, value in enumerate(graph.values):
            if not value.is_stored or value.nbytes < small:
                continue
            for site in value.sites:
                if site.kind == "parameter" and (site.path or index not in arguments):
                    stored = assignment.states(graph, self._axes, index)
                    yield site, self.spec(index, stored, orders)
