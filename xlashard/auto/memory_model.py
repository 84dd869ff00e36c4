"""Memory of a program's values on a device, in an assignment of shardings.

Live ranges follow the order in which XLA runs and fuses operations. XLA computes elementwise
results again wherever they are used, unless that keeps more bytes alive than the result has.
Operations that a loop doesn't need run after it, as products of gradients that wait for their
reduction do. Carries of loops, updates and donated arguments reuse their buffers.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from xlashard.auto.axis_costs import Assignment, in_lanes
from xlashard.auto.graph.graph_values import GraphStep, Labels, Value
from xlashard.auto.graph.program_graph import ProgramGraph
from xlashard.auto.layout_builder import SMALL_BYTES
from xlashard.auto.problem import AutoProblem, MeshAxis
from xlashard.auto.rules.factors import piece

_MOST_SOURCES = 8
_NEAR = 16
"""Positions within which operations are fused."""
_CLEARLY_MORE = 1.5
"""A value from sources of so many times its bytes is taken for stored."""


class MemoryModel:
    """Memory of the layouts of a program.

    Args:
        graph: The graph of the program, which gets the live ranges of its values.
        problem: Its problem.
    """

    def __init__(self, graph: ProgramGraph, problem: AutoProblem) -> None:
        self._graph = graph
        self._axes = {axis.name: axis.size for axis in problem.machine.axes if axis.size > 1}
        self._spatial = {graph.labels.find(label) for label in graph.spatial}
        tied = dict(problem.tied)
        donated = {
            k for k, is_donated in enumerate(problem.donated) if is_donated and k not in tied
        }
        results = [index for index in graph.results if index is not None]
        aliases = {
            alias: graph.arguments[argument]
            for argument, result in problem.tied
            if (alias := graph.results[result]) is not None
        }
        copies = {*aliases, *graph.arguments}
        # A loop reads its stacks while it writes others: XLA copies those that it would overwrite.
        read: dict[int | None, frozenset[int | None]] = {}
        for step in graph.steps:
            if step.body is not None:
                stacks = step.results[len(step.carries) :]
                read |= dict.fromkeys(stacks, frozenset(step.operands))
        inside = graph.inside
        aliases = {
            result: argument
            for result, argument in aliases.items()
            if inside.get(argument, argument) not in read.get(inside.get(result, result), ())
        }
        aliases |= {inner: outer for outer, inner in inside.items() if outer in copies}
        kept = [index for k, index in enumerate(graph.arguments) if k not in donated]
        stored = _LiveRanges(graph.values, graph.steps, kept, results, aliases).stored()
        self._stored = [k for k in stored if graph.values[k].nbytes >= SMALL_BYTES]

    def peak(self, assignment: Assignment) -> float:
        """Return the memory of a layout where it is largest, in bytes."""
        pieces = self._pieces(assignment)
        return sum(self._nbytes(index, pieces) for index in self.live(assignment))

    def live(self, assignment: Assignment) -> tuple[int, ...]:
        """Return the values that are live where the memory of a layout is largest."""
        pieces, values = self._pieces(assignment), self._graph.values
        changes: dict[int, float] = defaultdict(float)
        for index in self._stored:
            nbytes = self._nbytes(index, pieces)
            changes[values[index].first] += nbytes
            changes[values[index].last + 1] -= nbytes
        total, peak, where = 0.0, -1.0, 0
        for position in sorted(changes):
            total += changes[position]
            if total > peak:
                peak, where = total, position
        return tuple(k for k in self._stored if values[k].first <= where <= values[k].last)

    def row(
        self, axis: MeshAxis, others: Assignment, live: Iterable[int]
    ) -> tuple[float, Mapping[int, float]]:
        """Return the memory of live values as it depends on an axis.

        Args:
            axis: The axis.
            others: Shardings on the other axes.
            live: The values.

        Returns:
            The bytes without the axis, and by label the bytes that a device saves if it is sharded.
        """
        pieces, total = self._pieces(others), 0.0
        saved: dict[int, float] = defaultdict(float)
        for index in live:
            whole = self._nbytes(index, pieces)
            total += whole
            for label in self._graph.labels_of(index):
                split = {**pieces, label: pieces.get(label, 1) * axis.size}
                saved[label] += whole - self._nbytes(index, split)
        return total, saved

    def _pieces(self, assignment: Assignment) -> dict[int, int]:
        """Return the number of pieces of each label that is sharded."""
        pieces: dict[int, int] = defaultdict(lambda: 1)
        for axis, size in self._axes.items():
            for label in assignment.labels[axis]:
                pieces[label] *= size
        return dict(pieces)

    def _nbytes(self, index: int, pieces: Mapping[int, int]) -> float:
        """Return the bytes of a value on a device, with the padding of its minor dimension.

        That is the dimension with the least padding, but no spatial dimension of a convolution.
        """
        value, least, count = self._graph.values[index], math.inf, 1.0
        for dim, size in enumerate(value.shape):
            label = self._graph.label(index, dim)
            split = pieces.get(label, 1)
            count *= size / piece(size, split) if size else split
            if label not in self._spatial:
                local = size / split
                least = min(least, in_lanes(local) / max(local, 1))
        padding = least if len(value.shape) > 1 and math.isfinite(least) else 1.0
        return value.nbytes / count * padding


class _LiveRanges:
    """Live ranges of the values that have buffers.

    Args:
        values: The values.
        steps: Steps of the program, in its order.
        kept: Arguments that are live to the end.
        results: Results of the program.
        aliases: Results that take an argument's buffer, with the argument.
    """

    def __init__(
        self,
        values: Sequence[Value],
        steps: Sequence[GraphStep],
        kept: Collection[int],
        results: Collection[int],
        aliases: Mapping[int, int],
    ) -> None:
        self._values = values
        # Every step has two positions: operands are read at the first, results of fusions start at
        # the second and may take their buffers. Loops begin and end at positions of their own.
        self._order = list(_flattened(steps))
        self._end = 2 * len(self._order)
        self._forced = set(results)
        self._last = dict.fromkeys((*kept, *results), self._end)
        self._first: dict[int, int] = {}
        self._sources: dict[int, frozenset[int]] = {}
        self._made_of: dict[int, frozenset[int]] = {}
        self._stored: set[int] = set()
        self._buffers = Labels()
        for _ in values:
            self._buffers.new(0)
        for result, argument in aliases.items():
            self._buffers.join(argument, result)

    def stored(self) -> list[int]:
        """Set the live ranges of the values that have buffers, and return the values."""
        for number, (step, is_begin) in enumerate(self._order):
            self._define(step, 2 * number, is_begin)
        for number, (step, is_begin) in reversed([*enumerate(self._order)]):
            self._use(step, 2 * number, is_begin)
        buffers: dict[int, list[int]] = {}
        for index in {*self._stored, *self._last.keys() - self._first.keys()}:
            buffers.setdefault(self._buffers.find(index), []).append(index)
        stored = []
        for members in buffers.values():
            # An argument, or what is made last: a constant has no sharding of its own.
            whole = [index for index in members if index not in self._first]
            stored.append(min(whole) if whole else max(members))
            live_range = self._values[stored[-1]]
            live_range.first = min(self._first.get(index, 0) for index in members)
            live_range.last = max(self._last.get(index, live_range.first) for index in members)
        return sorted(stored)

    def _nbytes(self, indices: Iterable[int]) -> float:
        return sum(self._values[index].nbytes for index in indices)

    def _define(self, step: GraphStep, position: int, is_begin: bool) -> None:
        """Note where results begin, and the stored values that they are made of."""
        if step.body is not None:
            defined = [*step.results, *step.copies] if is_begin else []
            defined += [c.parameter for c in step.carries if is_begin and c.parameter is not None]
            for index in defined:
                self._first[index] = min(self._first.get(index, position), position)
            self._stored.update(step.results, step.copies)
            return
        for index in step.results:
            self._first[index] = position + step.fused
            if not step.fused:
                self._stored.add(index)
                continue
            every = [self._sources.get(o, {o}) for o in step.operands if o is not None]
            sources = frozenset[int]().union(*every)
            self._made_of[index] = sources
            most = _CLEARLY_MORE * self._values[index].nbytes
            if len(sources) <= _MOST_SOURCES and self._nbytes(sources) <= most:
                self._sources[index] = sources

    def _use(self, step: GraphStep, position: int, is_begin: bool) -> None:
        """Extend the live ranges of what a step reads; steps come in reverse order."""
        initial = {c.initial for c in step.carries}
        if step.body is None:
            for index in step.results if step.fused else ():
                self._read(step.operands, self._read_until(index, position))
            if not step.fused:
                self._read(step.operands, position)
                if step.in_place:
                    self._share(step.operands[0], step.results[0], position)
        elif is_begin:
            self._read(initial, position, forced=True)
            for carry in step.carries:
                if carry.parameter is not None:
                    self._share(carry.initial, carry.result, position)
                    self._buffers.join(carry.parameter, carry.result)
                    if carry.updated is not None:
                        begin = self._first.get(carry.updated, position)
                        self._share(carry.parameter, carry.updated, begin)
        else:
            self._read([o for o in step.operands if o not in initial], position, forced=True)
            self._read([c.updated for c in step.carries], position, forced=True)
            for index in step.copies:
                self._last[index] = max(self._last.get(index, position), position)

    def _read(self, operands: Iterable[int | None], position: int, *, forced: bool = False) -> None:
        for index in operands:
            if index is not None:
                self._last[index] = max(self._last.get(index, position), position)
                if forced:
                    self._forced.add(index)

    def _read_until(self, index: int, position: int) -> int:
        """Return the position to which a fusion's operands are live, and store its result or not.

        Args:
            index: The result.
            position: Position of the fusion.
        """
        last = self._last.get(index, position)
        if not self._made_of[index]:
            return last
        if index not in self._forced and last - position <= _NEAR:
            return last
        waiting = [s for s in self._made_of[index] if self._last.get(s, -1) < last]
        if index in self._forced or self._values[index].nbytes < self._nbytes(waiting):
            self._stored.add(index)
            return position
        return last

    def _share(self, operand: int | None, result: int, position: int) -> None:
        """Give a result the buffer of an operand that isn't read after a position."""
        if operand is None or self._last.get(operand, position) > position:
            return
        if self._values[operand].nbytes == self._values[result].nbytes:
            self._buffers.join(operand, result)


def _flattened(steps: Sequence[GraphStep]) -> Iterator[tuple[GraphStep, bool]]:
    """Yield the steps in the order of execution; loops at their beginning and at their end."""
    for step in _delayed(steps):
        yield step, True
        if step.body is not None:
            yield from _flattened(step.body)
            yield step, False


def _delayed(steps: Sequence[GraphStep]) -> Iterator[GraphStep]:
    """Yield steps; those that the next loop doesn't need come after it."""
    waiting: list[GraphStep] = []
    for step in steps:
        waiting.append(step)
        if step.body is None:
            continue
        needed, now, later = set(step.operands), [step], list[GraphStep]()
        for before in reversed(waiting[:-1]):
            if needed.isdisjoint(before.results):
                later.append(before)
            else:
                needed.update(before.operands)
                now.append(before)
        yield from reversed(now)
        waiting = later[::-1]
    yield from waiting
