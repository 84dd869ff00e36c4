"""Memory of a program's values on a device, in an assignment of shardings."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from xlashard.auto.axis_costs import LANES, Assignment
from xlashard.auto.graph.live_ranges import stored_values
from xlashard.auto.graph.program_graph import ProgramGraph
from xlashard.auto.layout_builder import SMALL_BYTES
from xlashard.auto.problem import AutoProblem, MeshAxis
from xlashard.auto.rules.factors import piece


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
        donated = {k for k, given in enumerate(problem.donated) if given and k not in tied}
        results = [index for index in graph.results if index is not None]
        aliases = {
            made: graph.arguments[argument]
            for argument, result in problem.tied
            if (made := graph.results[result]) is not None
        }
        copies = {*aliases, *graph.arguments}
        aliases |= {inner: outer for outer, inner in graph.inside.items() if outer in copies}
        kept = [index for k, index in enumerate(graph.arguments) if k not in donated]
        stored = stored_values(graph.values, graph.steps, kept, results, aliases)
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
                least = min(least, math.ceil(local / LANES) * LANES / max(local, 1))
        padding = least if len(value.shape) > 1 and math.isfinite(least) else 1.0
        return value.nbytes / count * padding
