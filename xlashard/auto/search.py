"""Search for layouts: one mesh axis after the other, from several starting points."""

import math
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, permutations, product
from typing import Any

from xlashard.auto.axis_costs import HIDDEN_SHARE, Assignment, CostModel
from xlashard.auto.axis_orders import AxisOrderer
from xlashard.auto.axis_program import (
    EXCESS_SECONDS,
    WHOLE_SHARE,
    AxisProgram,
    AxisSolution,
    RaisedCosts,
    Restriction,
)
from xlashard.auto.foreseen import state_changes
from xlashard.auto.graph.graph_values import GraphOperation
from xlashard.auto.graph.program_graph import ProgramGraph, batch_labels
from xlashard.auto.layout_builder import INSIDE, LayoutBuilder, LayoutKey, layout_key
from xlashard.auto.memory_model import MemoryModel
from xlashard.auto.problem import AutoProblem, MeshAxis, ProgramLayout
from xlashard.core.sharding import spec_of

_ROUNDS = 3
_MOST_SLOWDOWN = 10.0
"""Most wall-clock seconds for one second of a search."""
_PEAKS = 4
"""Most positions at which an integer program bounds the memory."""
_CHOICES, _FEWEST = 4000, 4
"""Starts of a kind times choices of a program's operations, and least number of these starts."""
_SMALL_SHARE = 1e-3
"""Share of the memory below which an argument may as well be replicated."""


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
        seconds: Time limit, in seconds that the process computes.
        restarts: Whether the search starts from boundaries of the largest arguments, too.

    Attributes:
        graph: Graph of the program.
        gap: Largest relative gap of the integer programs, each of one axis given the others.
    """

    def __init__(self, problem: AutoProblem, seconds: float, *, restarts: bool = True) -> None:
        self.problem = problem
        self.graph = ProgramGraph(problem.jaxpr, problem.tied, problem.in_specs, problem.out_specs)
        self.gap = 0.0
        self._restarts = restarts
        self._axes = {axis.name: axis for axis in problem.machine.axes if axis.size > 1}
        self._limit = seconds
        self._batch, self._along = batch_labels(self.graph)
        self._memory = MemoryModel(self.graph, problem)
        self._solutions: dict[tuple[Any, ...], AxisSolution] = {}
        self._found: dict[str, Assignment] = {}
        self._raised: dict[tuple[str, str], RaisedCosts] = {}
        self._started = time.process_time(), time.perf_counter()
        self._orderer = AxisOrderer(self.graph, problem.machine)
        self._builder = LayoutBuilder(self.graph, problem, self._orderer)
        self._layouts: dict[LayoutKey, ProgramLayout] = {}
        self._best = Assignment(), math.inf
        self._alike = self._interchangeable()
        self.thinned = self._builder.thinned

    def run(self) -> list[ProgramLayout]:
        """Return the layouts that were found, without repetitions and mirrors."""
        for start in self._starts():
            self._keep(start.name, *self._descend(start, Assignment()))
        if not self._axes or math.isinf(self._best[1]):
            return list(self._layouts.values())
        for start in islice(self._boundaries(), self._most) if self._restarts else ():
            self._keep(start.name, *self._descend(start, Assignment()))
        small = self._small_state()
        names = {"auto": frozenset[int](), "auto, small state replicated": small}
        for name, whole in names.items():
            if name == "auto" or small:
                begun = self._best[0].without("")
                begun.labels.update({axis: begun.labels[axis] - whole for axis in self._axes})
                start = self._start(name, dict.fromkeys(self._axes, Restriction(whole=whole)))
                self._keep(name, *self._descend(start, begun))
        return list(self._layouts.values())

    def _keep(self, name: str, assignment: Assignment, seconds: float) -> None:
        """Keep a layout, unless an equal one or its mirror is kept."""
        if math.isinf(seconds) and self._layouts:
            return
        layout, mirrored = self._layout(name, assignment, seconds), Assignment()
        for axes in set(self._alike.values()):
            pairs = [(assignment.labels[a], assignment.factors[a]) for a in axes]
            pairs.sort(key=lambda pair: (sorted(pair[0]), sorted(pair[1].items())))
            for axis, pair in zip(axes, pairs, strict=True):
                mirrored.labels[axis], mirrored.factors[axis] = pair
        key = layout_key(self._builder.layout(name, mirrored, seconds, 0.0))
        self._layouts.setdefault(key, layout)
        if seconds < self._best[1]:
            self._best = assignment, seconds

    def _boundaries(self) -> Iterator[_Start]:
        """Yield starts that shard the largest arguments along each dimension over each axis."""
        graph, names, seen = self.graph, tuple(self._axes), set[Hashable]()
        values = [graph.inside.get(value, value) for value in graph.arguments]
        large = sorted(range(len(values)), key=lambda k: -graph.values[values[k]].nbytes)
        # The largest of what is fed back, and of the rest.
        first = {values[k] in graph.state: k for k in reversed(large)}
        for k in sorted(first.values(), key=large.index):
            shape, is_state = graph.values[values[k]].shape, values[k] in graph.state
            # Equal layers get equal specs.
            equal = [
                value
                for value in values
                if (graph.values[value].shape, value in graph.state) == (shape, is_state)
            ]
            for dims in product(range(len(shape)), repeat=len(names)):
                key = k, tuple(sorted(zip(map(self._alike.get, names), dims, strict=True)))
                if key in seen:
                    continue
                seen.add(key)
                sharded = {
                    name: Restriction(sharded=frozenset(graph.label(v, dim) for v in equal))
                    for name, dim in zip(names, dims, strict=True)
                }
                spec = self._builder.spec(values[k], dict(zip(names, dims, strict=True)))
                yield self._start(f"argument {k} by {spec}", sharded)

    @cached_property
    def _most(self) -> int:
        """Number of starts of a kind, by the size of the integer programs."""
        choices = sum(len(op.rule.factors) + 1 for op in self.graph.operations)
        return max(_FEWEST, _CHOICES // max(choices, 1))

    def lighter(self, layout: ProgramLayout, nbytes: float) -> list[ProgramLayout]:
        """Return a layout near one of this search that takes less memory; none if none does.

        It shards more of the state, or, if that doesn't suffice, what else is best.

        Args:
            layout: A layout that was found, or one with fewer constraints inside.
            nbytes: Bytes to save.
        """
        name = layout.name.partition(INSIDE)[0]
        begun, limit = self._found.get(name), layout.memory_bytes - nbytes
        if begun is None:
            return []
        state = frozenset().union(*map(self.graph.labels_of, self.graph.state))
        inner = frozenset(map(self.graph.labels.find, range(len(self.graph.labels.sizes)))) - state
        kept = {
            axis: Restriction(
                unsharded=inner - begun.labels[axis],
                sharded=inner & begun.labels[axis],
                memory_bytes=limit,
            )
            for axis in self._axes
        }
        free = dict.fromkeys(self._axes, Restriction(memory_bytes=limit))
        for restrictions in (kept, free):
            start = self._start(f"{name}, lighter", restrictions)
            lighter = self._layout(start.name, *self._descend(start, begun.without("")))
            if lighter.memory_bytes <= limit:
                return self._alike_inside(lighter, layout)
        return []

    def dearer(
        self, layout: ProgramLayout, seconds: Mapping[tuple[str, int], float]
    ) -> list[ProgramLayout]:
        """Return a layout near one of this search, some of whose choices have got more expensive.

        None if they remain the best.

        Args:
            layout: A layout that was found, or one with fewer constraints inside.
            seconds: For a mesh axis and an operation, the time of a step that the layout's choice
                costs beyond what the search knows.
        """
        name = layout.name.partition(INSIDE)[0]
        begun = self._found.get(name)
        if begun is None:
            return []
        restrictions = {}
        for axis in self._axes:
            raised = [
                ((number, begun.factors[axis].get(number)), cost)
                for (other, number), cost in seconds.items()
                if other == axis
            ]
            before = self._raised.get((name, axis), frozenset())
            restrictions[axis] = Restriction(raised=before.union(raised))
        start = self._start(f"{name}, corrected", restrictions)
        self._raised |= {(start.name, axis): r.raised for axis, r in restrictions.items()}
        assignment, predicted = self._descend(start, begun.without(""))
        if math.isinf(predicted) or assignment == begun:
            return []
        return self._alike_inside(self._layout(start.name, assignment, predicted), layout)

    def _alike_inside(self, lighter: ProgramLayout, layout: ProgramLayout) -> list[ProgramLayout]:
        """Return a layout with the kinds of constraints inside that another one has."""
        inside = layout.name.partition(INSIDE)[2]
        if not inside:
            return [lighter]
        return [each for each in self.thinned(lighter) if each.name.endswith(INSIDE + inside)]

    def least_seconds(self) -> float:
        """Return a time that no layout is predicted to beat.

        It is that of the work alone, each operation split over all axes as is best for it.
        """
        nothing, machine = MeshAxis("", 1, 1.0, 0.0), self.problem.machine
        model = CostModel(self.graph, machine, nothing, Assignment())
        every = (model.elementwise_seconds(v) * times for v, times in self.graph.elementwise)
        seconds = sum(every) / machine.size
        for numbers in self.graph.alike:
            op = self.graph.operations[numbers[0]]
            least = math.inf
            for split in self._splits(op):
                assignment = Assignment()
                assignment.factors.update({axis: {numbers[0]: k} for axis, k in split.items()})
                model = CostModel(self.graph, machine, nothing, assignment)
                least = min(least, model.work_seconds(numbers[0]))
            seconds += least * op.times * len(numbers)
        return seconds

    def _splits(self, op: GraphOperation) -> Iterator[dict[str, int]]:
        """Yield the factors by axis along which an operation can be split over all axes."""
        factors = () if op.fixed is not None else op.rule.factors
        for chosen in product((None, *range(len(factors))), repeat=len(self._axes)):
            split = {axis: k for axis, k in zip(self._axes, chosen, strict=True) if k is not None}
            pieces = [
                math.prod(self._axes[a].size for a in split if split[a] == k)
                for k in range(len(factors))
            ]
            if all(
                f.size % n == 0 or n <= f.most_padded for f, n in zip(factors, pieces, strict=True)
            ):
                yield split

    def _start(self, name: str, restrictions: dict[str, Restriction]) -> _Start:
        order = sorted(self._axes, key=lambda axis: -self._axes[axis].size)
        return _Start(name, tuple(order), restrictions)

    def _interchangeable(self) -> dict[str, tuple[str, ...]]:
        """Return for each axis those with its size and links; itself alone beside fixed specs."""
        graph = self.graph
        if any(op.fixed is not None for op in graph.operations):
            return {name: (name,) for name in self._axes}
        rates = {name: replace(axis, name="") for name, axis in self._axes.items()}
        return {name: tuple(n for n in rates if rates[n] == rates[name]) for name in rates}

    def _layout(self, name: str, assignment: Assignment, seconds: float) -> ProgramLayout:
        self._found[name] = assignment
        return self._builder.layout(name, assignment, seconds, self._memory.peak(assignment))

    def _small_state(self) -> frozenset[int]:
        """Return the labels of arguments of the state whose shards would spare little memory.

        To gather many small arrays takes longer than their bytes do.
        """
        limit = _SMALL_SHARE * self.problem.machine.memory_bytes
        large, small = set[int](), set[int]()
        for index in self.graph.state:
            labels = self.graph.labels_of(index)
            (small if self.graph.values[index].nbytes < limit else large).update(labels)
        return frozenset(small - large)

    def _starts(self) -> list[_Start]:
        names = tuple(self._axes)
        if not names:
            return [_Start("replicated", (), {})]
        starts, seen = list[_Start](), set[Hashable]()
        for modes in product(("data", "fsdp", "tensor"), repeat=len(names)):
            mirrored = tuple(sorted((self._alike[n], m) for n, m in zip(names, modes, strict=True)))
            if mirrored in seen or (len(names) > 2 and len(set(modes)) > 2):
                continue
            seen.add(mirrored)
            label = "+".join(dict.fromkeys(modes))
            if len(set(modes)) > 1:
                label = ", ".join(
                    f"{name}: {mode}" for name, mode in zip(names, modes, strict=True)
                )
            # Both ways to shard the state are tried: `fsdp` on all axes has the other.
            named = {"fsdp": "major fsdp"} if len(set(modes)) > 1 else {}
            restrictions = {
                name: Restriction(self._batch, named.get(mode, mode))
                for name, mode in zip(names, modes, strict=True)
            }
            # Axes that split the batch come first: the others divide what these leave.
            order = tuple(sorted(names, key=lambda name: restrictions[name].mode == "tensor"))
            starts.append(_Start(label, order, restrictions))
        # The last axes get what a batch has no more rows for.
        last = dict.fromkeys(self._alike[n][-1] for n in names[-2:]) if self._along else ()
        for name in last:
            restrictions = {other: Restriction(self._batch, "data") for other in names}
            restrictions[name] = Restriction(self._along, "data")
            order = tuple(sorted(names, key=lambda other: other == name))
            starts.append(_Start(f"data, sequences over {name}", order, restrictions))
        free = dict.fromkeys(names, Restriction())
        orders = list(permutations(names))[: 1 if set(self._alike.values()) == {names} else 2]
        starts += [_Start(f"auto({'>'.join(order)})", order, free) for order in orders]
        return starts

    def _descend(self, start: _Start, begun: Assignment) -> tuple[Assignment, float]:
        """Solve axis after axis until nothing changes.

        Args:
            start: The starting point.
            begun: Shardings on the axes that are solved before.

        Returns:
            The best assignment, and its predicted time.
        """
        solved = {axis for axis in self._axes if begun.factors.get(axis)}
        current = best = begun.without("")
        least = self._predict(best, start) if len(solved) == len(self._axes) else math.inf
        share = self._limit / 12 / max(len(start.order), 1)
        for _ in range(_ROUNDS):
            before = least
            for name in start.order:
                others = current.without(name)
                unsolved = math.prod(
                    a.size for a in self._axes.values() if a.name not in solved | {name}
                )
                labels, factors, seconds, gap = self._solve(
                    self._axes[name], start.restrictions[name], others, unsolved, share
                )
                if math.isinf(seconds):
                    continue
                self.gap = max(self.gap, gap)
                current = others
                current.labels[name], current.factors[name] = labels, factors
                solved.add(name)
                if len(solved) == len(self._axes):
                    predicted = self._predict(current, start)
                    if predicted < least * 0.999:
                        best, least = current.without(""), predicted
            if least >= before * 0.999 and not math.isinf(before):
                break
            if len(start.order) == 1:
                break
        return best, least

    def _solve(
        self,
        axis: MeshAxis,
        restriction: Restriction,
        others: Assignment,
        unsolved: int,
        share: float,
    ) -> AxisSolution:
        """Return the solution of an axis, given the others; equal programs are solved once.

        An axis is solved again where a solution has its largest memory elsewhere.
        """
        key = (
            *(axis.name, restriction, unsolved),
            *(others.labels[name] for name in self._axes),
            *(frozenset(others.factors[name].items()) for name in self._axes),
        )
        if key in self._solutions:
            return self._solutions[key]
        memory, machine = self._memory, self.problem.machine
        model = CostModel(self.graph, machine, axis, others, restriction.whole)
        limit = min(self.problem.memory_bytes, restriction.memory_bytes) * unsolved
        live = dict.fromkeys((memory.live(Assignment()), memory.live(others)))
        while True:
            rows = [memory.row(axis, others, values) for values in live]
            program = AxisProgram(model, restriction, limit, self._fixed(axis.name), rows)
            # Other work of the machine takes no part of the limit.
            spent = time.process_time() - self._started[0]
            waited = time.perf_counter() - self._started[1]
            slowdown = min(max(waited / max(spent, 1e-3), 1.0), _MOST_SLOWDOWN)
            solution = program.solve(share * slowdown)
            chosen = others.without(axis.name)
            chosen.labels[axis.name] = solution[0]
            largest = memory.live(chosen)
            if largest in live or len(live) >= _PEAKS or memory.peak(chosen) <= limit:
                self._solutions[key] = solution
                return solution
            live[largest] = None

    def _predict(self, assignment: Assignment, start: _Start | None = None) -> float:
        """Return the time of a step that the integer programs minimize, with the memory's price.

        Args:
            assignment: Shardings on all axes.
            start: Starting point with restrictions of the axes; None for one without any.
        """
        graph, machine, alone = self.graph, self.problem.machine, MeshAxis("", 1, 1.0, 0.0)
        model = CostModel(graph, machine, alone, assignment)
        seconds = sum(model.work_seconds(k) * op.times for k, op in enumerate(graph.operations))
        seconds += sum(model.elementwise_seconds(v) * times for v, times in graph.elementwise)
        state_seconds = -HIDDEN_SHARE * seconds
        held = sum(map(model.local_bytes, graph.arguments))
        seconds += WHOLE_SHARE * held / machine.rates.hbm_bytes
        limit = self.problem.memory_bytes
        for name, axis in self._axes.items():
            restriction = Restriction() if start is None else start.restrictions[name]
            limit = min(limit, restriction.memory_bytes)
            along, state_along = self.transfer_seconds(assignment, axis, restriction)
            seconds, state_seconds = seconds + along, state_seconds + state_along
            chosen = assignment.factors[name]
            raised = restriction.raised
            seconds += sum(cost for (k, factor), cost in raised if chosen.get(k) == factor)
        seconds += max(state_seconds, 0.0) + self._orderer.price_permutations(assignment)
        return seconds + EXCESS_SECONDS * max(self._memory.peak(assignment) - limit, 0.0)

    def transfer_seconds(
        self, assignment: Assignment, axis: MeshAxis, restriction: Restriction
    ) -> tuple[float, float]:
        """Return the time of the collectives along an axis, and of those of the state.

        The state's may be hidden behind other work.
        """
        machine, others = self.problem.machine, assignment.without(axis.name)
        model = CostModel(self.graph, machine, axis, others, restriction.whole)
        seconds = state_seconds = 0.0
        changes = state_changes(self.graph, (axis.name,), assignment)
        for _, number, slot, value, stored, needed in changes:
            once = model.conversion(value, number, slot, stored, needed)
            every = once * self.graph.operations[number].times
            if self.graph.is_state(value):
                state_seconds += every
            else:
                seconds += every
        for number, factor in assignment.factors[axis.name].items():
            seconds += model.halo_seconds(number, factor) * self.graph.operations[number].times
        for value, label, times in self.graph.reductions:
            if self.graph.labels.find(label) in assignment.labels[axis.name]:
                seconds += model.reduce_value(value) * times
        return seconds, state_seconds

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
            rank = len(self.graph.values[value].shape)
            for dim, axes in enumerate(spec_of(spec).for_rank(rank)):
                fixed.setdefault(self.graph.label(value, dim), axis in (axes or ()))
        return fixed
