"""Search for layouts: one mesh axis after the other, from several starting points."""

import math
import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import permutations, product

from xlashard.auto.axis_costs import (
    PARTIAL,
    WHOLE,
    Assignment,
    CostModel,
    batch_labels,
    prescribed,
    required,
)
from xlashard.auto.axis_program import AxisProgram, Restriction
from xlashard.auto.foreseen import foreseen_transfers
from xlashard.auto.graph_values import spec_axes
from xlashard.auto.problem import AutoProblem, ConstraintSite, MeshAxis, ProgramLayout
from xlashard.auto.program_graph import ProgramGraph
from xlashard.sharding import PartitionSpec

_ROUNDS = 3
_SMALL_BYTES = 1 << 12


def find_layouts(problem: AutoProblem, seconds: float = 60.0) -> tuple[ProgramLayout, ...]:
    """Return layouts of a program, the fastest by prediction first.

    Among them are the usual ones: `data`, `fsdp`, `tensor`, and pairs of them on the axes.

    Args:
        problem: Program, machine and requirements.
        seconds: Time limit of the search, in seconds.
    """
    search = Search(problem, seconds)
    found = search.run()
    return tuple(sorted(found, key=lambda layout: layout.seconds))


@dataclass(frozen=True)
class _Start:
    """Starting point of a search: its name, the order of axes, and what each may do."""

    name: str
    order: tuple[str, ...]
    restrictions: dict[str, Restriction]


class Search:
    """Search for the layouts of a problem.

    Args:
        problem: The problem.
        seconds: Time limit, in seconds.

    Attributes:
        graph: Graph of the program.
        gap: Largest relative gap of the integer programs, which is 0 if all were solved.
    """

    def __init__(self, problem: AutoProblem, seconds: float) -> None:
        self.problem = problem
        self.graph = ProgramGraph(problem.jaxpr, problem.tied, problem.in_specs, problem.out_specs)
        self.gap = 0.0
        self._axes = {axis.name: axis for axis in problem.machine.axes if axis.size > 1}
        self._limit = seconds
        self._batch = batch_labels(self.graph)
        self._stored = self._stored_values()

    def run(self) -> list[ProgramLayout]:
        """Return the layouts that were found, without repetitions."""
        found: dict[tuple[object, ...], ProgramLayout] = {}
        best: Assignment | None = None
        best_seconds = math.inf
        starts = self._starts()
        for start in starts:
            assignment, seconds = self._descend(start, Assignment())
            layout = self._layout(start.name, assignment, seconds)
            found.setdefault(_key(layout), layout)
            if seconds < best_seconds:
                best, best_seconds = assignment, seconds
        if best is not None:
            free = {name: Restriction() for name in self._axes}
            order = tuple(sorted(self._axes, key=lambda name: -self._axes[name].size))
            assignment, seconds = self._descend(_Start("auto", order, free), best)
            layout = self._layout("auto", assignment, seconds)
            found.setdefault(_key(layout), layout)
        return list(found.values())

    def thinned(self, layout: ProgramLayout) -> list[ProgramLayout]:
        """Return a layout with fewer constraints, as the partitioner may do better alone.

        Constraints remain on results of products, on products, on operands, or nowhere.
        """
        products = {op.path for op in self.graph.operations if op.rule.flops}
        kept = {
            "results of products": lambda site: site.path in products and site.kind == "result",
            "products": lambda site: site.path in products,
            "operands": lambda site: site.kind == "operand",
            "none": lambda site: False,
        }
        return [
            replace(
                layout,
                name=f"{layout.name}; inside: {name}",
                constraints=tuple((site, spec) for site, spec in layout.constraints if keep(site)),
            )
            for name, keep in kept.items()
        ]

    def _starts(self) -> list[_Start]:
        names = tuple(self._axes)
        if not names:
            return [_Start("replicated", (), {})]
        starts = []
        for modes in product(("data", "fsdp", "tensor"), repeat=len(names)):
            if len(names) > 2 and len(set(modes)) > 2:
                continue
            label = "+".join(dict.fromkeys(modes))
            if len(set(modes)) > 1:
                label = ", ".join(
                    f"{name}: {mode}" for name, mode in zip(names, modes, strict=True)
                )
            restrictions = {
                name: Restriction(self._batch, mode)
                for name, mode in zip(names, modes, strict=True)
            }
            # Axes that split the batch come first: the others divide what these leave.
            order = tuple(sorted(names, key=lambda name: restrictions[name].mode == "tensor"))
            starts.append(_Start(label, order, restrictions))
        for overlap in (0.4, 1.0):
            free = {name: Restriction(overlap=overlap) for name in names}
            for order in list(permutations(names))[:2]:
                label = f"auto({'>'.join(order)}, {overlap})"
                starts.append(_Start(label, order, free))
        return starts

    def _descend(self, start: _Start, assignment: Assignment) -> tuple[Assignment, float]:
        """Solve axis after axis until nothing changes."""
        solved: set[str] = set(self._axes) if assignment.factors else set()
        best, best_seconds = assignment, math.inf
        current = assignment.without("")
        share = self._limit / 12 / max(len(start.order), 1)
        if not start.order:
            return current, self._work(current)
        for _ in range(_ROUNDS):
            before = best_seconds
            for name in start.order:
                axis = self._axes[name]
                others = current.without(name)
                unsolved = math.prod(
                    a.size for a in self._axes.values() if a.name not in solved | {name}
                )
                model = CostModel(self.graph, self.problem.machine, axis, others)
                program = AxisProgram(
                    model,
                    start.restrictions[name],
                    self.problem.memory_bytes * unsolved,
                    self._fixed(name),
                    self._live(others),
                )
                labels, factors, seconds, gap = program.solve(share)
                if math.isinf(seconds):
                    continue
                self.gap = max(self.gap, gap)
                current.labels[name], current.factors[name] = labels, factors
                solved.add(name)
                for other in self._axes.values():
                    if other.name != name:
                        overlap = start.restrictions[other.name].overlap
                        seconds += self.transfer_seconds(current, other, overlap)
                if len(solved) == len(self._axes) and seconds < best_seconds * 0.999:
                    best, best_seconds = current.without(""), seconds
            if best_seconds >= before * 0.999 and not math.isinf(before):
                break
            if len(start.order) == 1:
                break
        return best, best_seconds

    def _work(self, assignment: Assignment) -> float:
        axis = MeshAxis("", 1, 1.0, 0.0)
        model = CostModel(self.graph, self.problem.machine, axis, assignment)
        operations = enumerate(self.graph.operations)
        return sum(model.work_seconds(k) * op.times for k, op in operations)

    def transfer_seconds(self, assignment: Assignment, axis: MeshAxis, overlap: float) -> float:
        """Return the time of the collectives along an axis."""
        model = CostModel(self.graph, self.problem.machine, axis, assignment.without(axis.name))
        seconds = 0.0
        counted: set[tuple[int, tuple[int, ...], int]] = set()
        for number, op in enumerate(self.graph.operations):
            for slot, value in op.slots:
                stored = assignment.state(self.graph, axis.name, value)
                needed = self._needed(assignment, axis.name, number, slot)
                if needed is None or stored == needed:
                    continue
                if slot >= 0:
                    if (value, op.scope, needed) in counted:
                        continue
                    counted.add((value, op.scope, needed))
                source, target = (stored, needed) if slot >= 0 else (needed, stored)
                exchanged = source != PARTIAL and target != WHOLE
                nbytes = model.transfer_bytes(value, number, slot, exchanged=exchanged)
                share = overlap if self.graph.is_state(value) else 1.0
                seconds += model.conversion(source, target, nbytes) * op.times * share
        for value, label, times in self.graph.reductions:
            if self.graph.labels.find(label) in assignment.labels[axis.name]:
                seconds += 2 * model.gather(model.local_bytes(value)) * times
        return seconds

    def _needed(self, assignment: Assignment, axis: str, number: int, slot: int) -> int | None:
        op = self.graph.operations[number]
        if op.fixed is None:
            return required(op, assignment.factors[axis].get(number), slot)
        return prescribed(op, axis, slot)

    def _states(self, assignment: Assignment, value: int) -> dict[str, int]:
        """Return by axis the dimension of a value that is sharded over it, or WHOLE."""
        return {axis: assignment.state(self.graph, axis, value) for axis in self._axes}

    def _fixed(self, axis: str) -> dict[int, bool]:
        """Return the labels that fixed specs shard over an axis, and those that they don't."""
        fixed: dict[int, bool] = {}
        pairs = [
            *zip(self.graph.arguments, self.problem.in_specs, strict=True),
            *zip(self.graph.results, self.problem.out_specs, strict=True),
        ]
        for value, spec in pairs:
            if spec is None or value is None:
                continue
            for dim, axes in enumerate(spec_axes(spec, len(self.graph.values[value].shape))):
                fixed.setdefault(self.graph.label(value, dim), axis in (axes or ()))
        return fixed

    def _stored_values(self) -> list[int]:
        """Return the values that occupy memory, without results that reuse an argument's."""
        graph = self.graph
        aliases = {graph.results[result] for _, result in self.problem.tied}
        copies = aliases | set(graph.arguments)
        aliases |= {inner for outer, inner in graph.inside.items() if outer in copies}
        end = graph.positions
        for k, index in enumerate(graph.arguments):
            donated = k < len(self.problem.donated) and self.problem.donated[k]
            if not donated or k in {argument for argument, _ in self.problem.tied}:
                graph.values[index].last = end
        return [
            index
            for index, value in enumerate(graph.values)
            if value.is_stored and value.nbytes >= _SMALL_BYTES and index not in aliases
        ]

    def _live(self, assignment: Assignment) -> list[list[int]]:
        """Return the values that are live where most memory is: unsharded, and as assigned."""
        found: dict[int, list[int]] = {}
        for chosen in (Assignment(), assignment):
            changes: dict[int, float] = defaultdict(float)
            for index in self._stored:
                value = self.graph.values[index]
                nbytes = value.nbytes / self._pieces(chosen, index)
                changes[value.first] += nbytes
                changes[value.last + 1] -= nbytes
            total, peak, where = 0.0, -1.0, 0
            for position in sorted(changes):
                total += changes[position]
                if total > peak:
                    peak, where = total, position
            found[where] = self._live_at(where)
        return list(found.values())

    def _live_at(self, position: int) -> list[int]:
        values = self.graph.values
        return [i for i in self._stored if values[i].first <= position <= values[i].last]

    def _pieces(self, assignment: Assignment, value: int) -> int:
        states = self._states(assignment, value)
        return math.prod(self._axes[axis].size for axis, state in states.items() if state != WHOLE)

    def _memory(self, assignment: Assignment) -> float:
        """Return the memory of a layout where it is largest, in bytes."""
        return max(
            sum(self.graph.values[i].nbytes / self._pieces(assignment, i) for i in live)
            for live in self._live(assignment)
        )

    def _layout(self, name: str, assignment: Assignment, seconds: float) -> ProgramLayout:
        def stored(value: int | None) -> PartitionSpec:
            if value is None:
                return PartitionSpec()
            return self._spec(value, self._states(assignment, value))

        ins, outs = self.graph.fixed
        return ProgramLayout(
            name=name,
            in_specs=tuple(ins.get(i, stored(v)) for i, v in enumerate(self.graph.arguments)),
            out_specs=tuple(outs.get(i, stored(v)) for i, v in enumerate(self.graph.results)),
            constraints=tuple(self._constraints(assignment)),
            seconds=seconds,
            memory_bytes=self._memory(assignment),
            transfers=tuple(foreseen_transfers(self.graph, tuple(self._axes), assignment)),
        )

    def _spec(self, value: int, states: dict[str, int]) -> PartitionSpec:
        rank = len(self.graph.values[value].shape)
        entries: list[str | tuple[str, ...] | None] = []
        for dim in range(rank):
            axes = tuple(axis for axis, state in states.items() if state == dim)
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def _divides(self, value: int, states: dict[str, int]) -> bool:
        """Return True if the dimensions of a value divide by the axes that shard them."""
        pieces = [1] * len(self.graph.values[value].shape)
        for axis, dim in states.items():
            if dim != WHOLE:
                pieces[dim] *= self._axes[axis].size
        return not any(map(operator.mod, self.graph.values[value].shape, pieces))

    def _constraints(
        self, assignment: Assignment
    ) -> Iterable[tuple[ConstraintSite, PartitionSpec]]:
        """Yield the constraints inside: what operations need and make, and the carries of loops."""
        graph = self.graph
        # The shards of smaller values are negligible: they follow, or the partitioner decides.
        small = _SMALL_BYTES * self.problem.machine.size
        for number, op in enumerate(graph.operations):
            if op.fixed is not None:
                continue
            for slot, value in op.slots:
                if graph.values[value].nbytes < small:
                    continue
                stored = self._states(assignment, value)
                needed = {a: self._needed(assignment, a, number, slot) for a in self._axes}
                if slot < 0:
                    # First as the operation makes it: its result decides how it is partitioned.
                    made = {
                        a: stored[a] if s in (None, WHOLE, PARTIAL) else s
                        for a, s in needed.items()
                    }
                    site = ConstraintSite(op.path, "result", -1 - slot)
                    if made != stored and self._divides(value, made):
                        yield site, self._spec(value, made)
                    if graph.is_state(value) and set(stored.values()) == {WHOLE}:
                        # A gradient that is added up needs no constraint, which costs a copy.
                        continue
                    yield site, self._spec(value, stored)
                elif needed != stored:
                    states = {a: WHOLE if s is None else s for a, s in needed.items()}
                    yield ConstraintSite(op.path, "operand", slot), self._spec(value, states)
        arguments = set(graph.arguments)
        for index, value in enumerate(graph.values):
            if not value.is_stored or value.nbytes < small:
                continue
            for site in value.sites:
                if site.kind == "parameter" and (site.path or index not in arguments):
                    stored = self._states(assignment, index)
                    yield site, self._spec(index, stored)


def _key(layout: ProgramLayout) -> tuple[object, ...]:
    return layout.in_specs, layout.out_specs, layout.constraints
