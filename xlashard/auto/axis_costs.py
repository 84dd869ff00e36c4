"""Costs of the shardings of a program on one mesh axis, given its other axes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xlashard._jax.trace.primitive_names import CONSTRAINT, IN_PLACE, INDEXING
from xlashard.auto.graph.graph_values import GraphOperation
from xlashard.auto.graph.program_graph import ProgramGraph
from xlashard.auto.problem import Machine, MeshAxis
from xlashard.auto.rules.factors import can_shard, piece
from xlashard.predict.costs.operation import padding
from xlashard.predict.costs.rates import LANES

PARTIAL = -2
"""State of a result that devices must combine."""
WHOLE = -1
"""State of a value that every device of the axis holds whole."""
HIDDEN_SHARE = 0.1
"""Time of the state's transfers that is hidden behind other work, over the time of that work.

Rounded from compiled layouts of the programs of `benchmarks.auto` on v5e, v6e and v5p.
"""
NEGLIGIBLE_BYTES = 1 << 12
"""Values of which a step has less, in bytes, change their sharding at no cost.

A loop waits for a small value in each of its runs.
"""


@dataclass
class Assignment:
    """Shardings of a program on all axes.

    Attributes:
        labels: By axis, the labels that are sharded over it, at most one of each value.
        factors: By axis, the factor along which each operation is split, by index; operations
            without one are computed by every device.
    """

    labels: dict[str, frozenset[int]] = field(default_factory=lambda: defaultdict(frozenset))
    factors: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))

    def without(self, axis: str) -> "Assignment":
        """Return a copy without an axis; all of it if there is no such axis."""
        copied = Assignment()
        copied.labels.update({k: v for k, v in self.labels.items() if k != axis})
        copied.factors.update({k: v for k, v in self.factors.items() if k != axis})
        return copied

    def needed(self, graph: ProgramGraph, axis: str, number: int, slot: int) -> int | None:
        """Return the state that an operation needs or makes on an axis; None if it is open.

        Args:
            graph: The graph of the program.
            axis: The mesh axis.
            number: The operation.
            slot: Position of the operand, or `-1 - position` of the result.
        """
        op = graph.operations[number]
        if op.fixed is None:
            return required(op, self.factors[axis].get(number), slot)
        return prescribed(op, axis, slot)

    def states(self, graph: ProgramGraph, axes: Iterable[str], value: int) -> dict[str, int]:
        """Return by axis the dimension of a value that is sharded over it, or WHOLE."""
        return {axis: self.state(graph, axis, value) for axis in axes}

    def state(self, graph: ProgramGraph, axis: str, value: int) -> int:
        """Return the dimension of a value that is sharded over an axis, or WHOLE."""
        sharded = self.labels[axis]
        for dim in range(len(graph.values[value].shape)) if sharded else ():
            if graph.label(value, dim) in sharded:
                return dim
        return WHOLE


class CostModel:
    """Costs of shardings on one axis, given the other axes.

    Args:
        graph: The graph of the program.
        machine: The machine.
        axis: The axis.
        others: Shardings on the other axes.
        combined: Labels of small arrays whose gradients are reduced as one, so that none of them
            waits for the links alone.
        skipped: An axis that isn't one of the others; empty without one.
    """

    def __init__(
        self,
        graph: ProgramGraph,
        machine: Machine,
        axis: MeshAxis,
        others: Assignment,
        combined: frozenset[int] = frozenset(),
        skipped: str = "",
    ) -> None:
        self.graph, self.machine, self.axis = graph, machine, axis
        self._sizes = {a.name: a.size for a in machine.axes if a.name not in (axis.name, skipped)}
        self.others, self._combined = others, combined
        self._label_pieces: dict[int, int] = {}
        for name, size in self._sizes.items():
            for label in others.labels[name]:
                self._label_pieces[label] = size * self.label_pieces(label)
        self._divided: dict[frozenset[int], float] = {}
        self._local: dict[tuple[int, int | None, int], float] = {}
        self._work = graph.work.setdefault(machine, {})

    def beside(self) -> "list[CostModel]":
        """Return the costs on the other axes, each given all axes but itself and this one."""
        alone = [(axis, self.others.without(axis.name)) for axis in self.machine.axes]
        return [
            CostModel(
                self.graph, self.machine, axis, others, self._combined, skipped=self.axis.name
            )
            for axis, others in alone
            if axis.name in self._sizes and axis.size > 1
        ]

    def divided(self, value: int) -> float:
        """Return the number of pieces of a value on the other axes."""
        labels, sizes = self.graph.labels_of(value), self.graph.labels.sizes
        if labels not in self._divided:
            self._divided[labels] = math.prod(
                sizes[label] / piece(sizes[label], self.label_pieces(label))
                for label in labels & self._label_pieces.keys()
                if sizes[label]
            )
        return self._divided[labels]

    def label_pieces(self, label: int) -> int:
        """Return the number of pieces of a label on the other axes."""
        return self._label_pieces.get(label, 1)

    def label_share(self, label: int) -> float:
        """Return the size of a piece of a label over that before this axis divides it."""
        return self._size_share(self.graph.labels.sizes[label], self.label_pieces(label))

    def _size_share(self, size: int, before: int) -> float:
        n = self.axis.size
        return piece(size, before * n) / piece(size, before) if size else 1 / n

    def can_split(self, number: int, factor: int) -> bool:
        """Return True if this axis can split an operation along a factor, evenly or padded."""
        op = self.graph.operations[number]
        f, pieces = op.rule.factors[factor], self.factor_pieces(number, factor) * self.axis.size
        sizes = self._factor_sizes(number, factor)
        padded = pieces <= f.most_padded and all(can_shard(size, pieces) for size in sizes)
        return f.size % pieces == 0 or padded

    def _factor_sizes(self, number: int, factor: int) -> list[int]:
        """Return the sizes of the dimensions that a factor indexes."""
        op = self.graph.operations[number]
        indexed = op.indexed(op.rule.factors[factor])
        return [self.graph.values[value].shape[dim] for value, dim in indexed]

    def _factor_share(self, number: int, factor: int) -> float:
        """Return the work of a device over that before this axis splits a factor."""
        before, f = self.factor_pieces(number, factor), self.graph.operations[number].rule.factors
        if f[factor].size % (before * self.axis.size) == 0:
            return 1 / self.axis.size
        return max(self._size_share(size, before) for size in self._factor_sizes(number, factor))

    def factor_pieces(self, number: int, factor: int) -> int:
        """Return the number of pieces of a factor of an operation on the other axes."""
        return math.prod(
            size
            for name, size in self._sizes.items()
            if self.others.factors[name].get(number) == factor
        )

    def local_bytes(self, value: int, operation: int | None = None, slot: int = 0) -> float:
        """Return the bytes of a value on a device before this axis divides it.

        Args:
            value: The value.
            operation: An operation that takes or makes it, in place of how it is stored.
            slot: Its position among the operands, or `-1 - position` among the results.
        """
        nbytes = self._local.get((value, operation, slot))
        if nbytes is None:
            nbytes = self.graph.values[value].nbytes / self._pieces(value, operation, slot)
            self._local[value, operation, slot] = nbytes
        return nbytes

    def _pieces(self, value: int, operation: int | None, slot: int) -> float:
        if operation is None:
            return self.divided(value)
        return math.prod(
            size
            for name, size in self._sizes.items()
            if self.states(name, value, operation, slot)[1] >= 0
        )

    def states(self, axis: str, value: int, number: int, slot: int) -> tuple[int, int]:
        """Return the states of a value on another axis as it is stored, and as it is needed."""
        stored = self.others.state(self.graph, axis, value)
        needed = self.others.needed(self.graph, axis, number, slot)
        return stored, stored if needed is None else needed

    def gather(self, nbytes: float, others: Sequence[MeshAxis] = ()) -> float:
        """Return this axis's part of the time to gather a value of some bytes.

        Args:
            nbytes: Its bytes.
            others: Other axes that gather it at the same time, and share the time that this takes.
        """
        along = self.machine.join([self.axis, *others])
        if nbytes <= along.small_bytes:
            return self.reduce(nbytes, others)
        return _pass_seconds(nbytes, along) / (1 + len(others))

    def reduce(
        self, nbytes: float, others: Sequence[MeshAxis] = (), *, scattered: bool = False
    ) -> float:
        """Return this axis's part of the time to reduce partial results of some bytes.

        Args:
            nbytes: Their bytes.
            others: Other axes that reduce them at the same time.
            scattered: Whether each device receives its part of the sum, rather than all of it.
        """
        along = self.machine.join([self.axis, *others])
        seconds = _pass_seconds(nbytes * along.reduction_slowdown, along)
        return (seconds + (0.0 if scattered else _pass_seconds(nbytes, along))) / (1 + len(others))

    def reduce_value(self, value: int) -> float:
        """Return the time to reduce partial results of a value as it is stored."""
        nbytes = self.local_bytes(value)
        return self._reduce_combined(nbytes) if self._is_combined(value) else self.reduce(nbytes)

    def _reduce_combined(self, nbytes: float, others: Sequence[MeshAxis] = ()) -> float:
        """Return the time to reduce partial results that don't wait for the links alone."""
        waiting = 2 * self.machine.join([self.axis, *others]).latency / (1 + len(others))
        return self.reduce(nbytes, others) - waiting

    def _is_combined(self, value: int) -> bool:
        labels = self.graph.labels_of(value)
        return bool(labels) and labels <= self._combined

    def conversion(
        self,
        value: int,
        number: int,
        slot: int,
        stored: int,
        needed: int,
        beside: tuple[MeshAxis, int, int] | None = None,
    ) -> float:
        """Return the time to change the sharding of a value before or after an operation.

        Axes that gather or reduce a value together use their links at the same time, and share the
        time that this takes. A product's partial result is scattered over one axis, and what is
        left is reduced over the others. Over several axes, and of other operations, it is reduced
        whole.

        Args:
            value: The value.
            number: Operation that takes or makes it.
            slot: Its position among the operands, or `-1 - position` among the results.
            stored: Dimension that is sharded as it is stored, or WHOLE.
            needed: Dimension as the operation takes or makes it, WHOLE or PARTIAL.
            beside: An axis that `others` leaves out, with its states as for `stored` and `needed`.
        """
        source, target = (stored, needed) if slot >= 0 else (needed, stored)
        if source in (target, WHOLE) or is_negligible(self.graph, value, number):
            return 0.0
        own, kept = self.local_bytes(value, number, slot), self.local_bytes(value)
        if beside is not None:
            own /= beside[0].size if beside[2] >= 0 else 1
            kept /= beside[0].size if beside[1] >= 0 else 1
        changes = self._list_changes(value, number, slot, beside)
        if source == PARTIAL:
            return self._combine(value, number, target, own, changes)
        sliced = [each for each in changes if each[1] == WHOLE and each[2] >= 0]
        # What another axis slices is sliced first.
        nbytes = min(own, kept) if sliced else max(own, kept)
        if target != WHOLE:
            # About half of the changes that slice a value, too, permute it.
            if sliced:
                return self.axis.latency + 2.0 * self._exchange_seconds(nbytes)
            return self._move_seconds(nbytes, source, target, changes)
        others = self._list_alike_transfers(source, changes)
        order = [axis.name for axis in self.machine.axes]
        place = sum(order.index(each.name) < order.index(self.axis.name) for each, _ in others)
        if place >= len(sliced):
            return self.gather(nbytes, [each for each, _ in others])
        # It is moved from this axis to another one, before it is sliced there.
        axis, _, after = sliced[place]
        if axis.size != self.axis.size:
            return self.gather(nbytes * axis.size)
        seconds = self.axis.latency + self._swap_seconds(nbytes * axis.size, axis)
        if after != source:
            seconds += self._exchange_seconds(nbytes * axis.size)
        return seconds

    def order_seconds(self, value: int, number: int, slot: int, other: MeshAxis) -> float:
        """Return the time to permute a value that this and another axis shard in the wrong order.

        Args:
            value: The value.
            number: Operation that takes or makes it.
            slot: Its position among the operands, or `-1 - position` among the results.
            other: The other axis.
        """
        nbytes = min(self.local_bytes(value), self.local_bytes(value, number, slot))
        return self._swap_seconds(nbytes, other)

    def _combine(
        self, value: int, number: int, target: int, own: float, changes: "_Changes"
    ) -> float:
        """Return the time to combine partial results of some bytes into a state."""
        others = self._list_alike_transfers(PARTIAL, changes)
        scattered = [axis for axis, state in others if state != WHOLE]
        of_product = self.graph.operations[number].rule.flops > 0
        runs = self.graph.accumulated.get(value, 1.0)
        alike = [axis for axis, _ in others]
        if target == WHOLE and not scattered and (runs > 1 or self._is_combined(value)):
            return self.reduce(own, alike) / runs if runs > 1 else self._reduce_combined(own, alike)
        if target == WHOLE and len(scattered) == 1 and of_product:
            return self.reduce(own / scattered[0].size)
        if target == WHOLE or scattered or (others and not of_product):
            return self.reduce(own, alike)
        return self.reduce(own, scattered=True)

    def _exchange_seconds(self, nbytes: float) -> float:
        """Return the time of an all-to-all of a value of some bytes, without its latency."""
        return nbytes / 4 / self.axis.bytes_per_second

    def _swap_seconds(self, nbytes: float, other: MeshAxis) -> float:
        """Return the time to permute a value, of some bytes before this axis divides it."""
        return self.machine.swap_seconds(nbytes / self.axis.size, self.axis, other)

    def _move_seconds(self, nbytes: float, source: int, target: int, changes: "_Changes") -> float:
        """Return the time of a move between dimensions, as other axes move as well.

        The partitioner exchanges between two dimensions at a time, over all axes that move alike.
        What is left in another order of devices than it finds is permuted. Where two axes leave one
        dimension apart, or meet in one, it gathers the value.

        Args:
            nbytes: Bytes of the value before this axis divides it.
            source: Dimension that is sharded before.
            target: Dimension that is sharded after.
            changes: Other axes that change, with their states before and after.
        """
        most = once = self._exchange_seconds(nbytes)
        alike = 1
        for axis, before, after in changes:
            if min(before, after) < 0:
                continue
            if (before, after) == (source, target):
                alike += 1
            elif (before, after) == (target, source):
                most = max(most, self._swap_seconds(nbytes, axis) / 2)
            elif before == target or after == source:
                most = max(most, (once + self._swap_seconds(nbytes, axis)) / 2)
            elif before == source or after == target:
                most = max(most, self.gather(nbytes * axis.size, [axis]))
        return self.axis.latency + most / alike

    def _list_changes(
        self, value: int, number: int, slot: int, beside: tuple[MeshAxis, int, int] | None
    ) -> "_Changes":
        """Return the other axes along which a transfer changes a value, with both states."""
        states = [
            (axis, *self.states(axis.name, value, number, slot))
            for axis in self.machine.axes
            if axis.name in self._sizes and axis.size > 1
        ]
        every = states if beside is None else [*states, beside]
        ordered = [(axis, *((s, n) if slot >= 0 else (n, s))) for axis, s, n in every]
        return [(axis, before, after) for axis, before, after in ordered if before != after]

    def _list_alike_transfers(self, source: int, changes: "_Changes") -> list[tuple[MeshAxis, int]]:
        """Return the other axes that gather or reduce a value alike, with their target states."""
        if source == PARTIAL:
            return [(axis, after) for axis, before, after in changes if before == PARTIAL]
        return [(axis, after) for axis, before, after in changes if before >= 0 and after == WHOLE]

    def work_seconds(self, number: int, factor: int | None = None) -> float:
        """Return the time of one run of an operation.

        Args:
            number: The operation.
            factor: Factor that is split over this axis, or None.
        """
        chosen = tuple((name, self.others.factors[name].get(number)) for name in self._sizes)
        key = number, factor, self.axis.size, chosen
        if key not in self._work:
            self._work[key] = self._compute_work(number, factor)
        return self._work[key]

    def _compute_work(self, number: int, factor: int | None) -> float:
        op, rates = self.graph.operations[number], self.machine.rates
        if op.name == CONSTRAINT:
            return 0.0
        split = math.prod(
            size
            for name, size in self._sizes.items()
            if (chosen := self.others.factors[name].get(number)) is not None
            and op.rule.factors[chosen].divides_work
        )
        flops = op.rule.flops / split * self.share(number, factor) if op.rule.flops else 0.0
        compute = rates.product_seconds(flops, "bfloat16")
        nbytes, share = 0.0, 1.0 if factor is None else self._factor_share(number, factor)
        for slot, value in _touched(op):
            local, dim = self.local_bytes(value, number, slot), required(op, factor, slot)
            if dim == len(self.graph.values[value].shape) - 1:
                local /= self.axis.size  # Its padding is that to lanes.
            elif dim >= 0:
                local *= share
            nbytes += local * self._lane_padding(number, factor, slot, value)
        nbytes *= op.rule.passes
        return max(compute, nbytes / rates.hbm_bytes) + rates.operation_seconds

    def _lane_padding(self, number: int, factor: int | None, slot: int, value: int) -> float:
        """Return the bytes of pieces of a value in lanes over their bytes as if it were whole."""
        op, shape = self.graph.operations[number], self.graph.values[value].shape
        minor = len(shape) - 1
        needed = {name: self.states(name, value, number, slot)[1] for name in self._sizes}
        pieces = math.prod(self._sizes[name] for name, dim in needed.items() if dim == minor)
        if factor is not None and required(op, factor, slot) == minor:
            pieces *= self.axis.size
        if pieces == 1 or minor < 0 or not shape[minor]:
            return 1.0
        return in_lanes(shape[minor] / pieces) * pieces / in_lanes(shape[minor])

    def share(self, number: int, factor: int | None) -> float:
        """Return the FLOP of a device over those before this axis divides them, with padding.

        Args:
            number: A product.
            factor: Factor that is split over this axis, or None.
        """
        op = self.graph.operations[number]
        sizes: dict[tuple[bool, ...], float] = {}
        own = 1.0 if factor is None else self._factor_share(number, factor)
        for k, f in enumerate(op.rule.factors):
            # Only a convolution's images are rows of its matrix product, not their pixels.
            if op.name == "conv_general_dilated" and f.role == _ROWS and _ROWS in sizes:
                continue
            local = f.size / self.factor_pieces(number, k)
            sizes[f.role] = sizes.get(f.role, 1.0) * (local * own if k == factor else local)
        unit = self.machine.rates.matrix_size
        # What no factor indexes can't be split, and its padding is the same for all.
        rows, depth, columns = (round(sizes.get(role, unit)) for role in (_ROWS, _DEPTH, _COLUMNS))
        divided = factor is not None and op.rule.factors[factor].divides_work
        padded = padding(max(rows, 1), max(depth, 1), max(columns, 1), unit)
        return padded * (own if divided else 1.0)

    def halo_seconds(self, number: int, factor: int) -> float:
        """Return the time to exchange the edges of an operation's pieces in one run.

        Axes that split the same factor exchange together.
        """
        op = self.graph.operations[number]
        f, operand = op.rule.factors[factor], next(iter(op.operands), None)
        if not f.halo or operand is None:
            return 0.0
        halo, before = f.halo, self.factor_pieces(number, factor)
        if f.size == 1:
            # Pieces of other sizes begin ever further from those that they are made of.
            sizes, pieces = self._factor_sizes(number, factor), before * self.axis.size
            shift = piece(max(sizes), pieces) - piece(min(sizes), pieces)
            halo += shift * (pieces - 1) / max(sizes)
        nbytes = self.local_bytes(operand, number) * halo
        together = 1 + sum(self.others.factors[name].get(number) == factor for name in self._sizes)
        return (self.axis.latency + nbytes / self.axis.bytes_per_second) / together

    def elementwise_seconds(self, value: int) -> float:
        """Return the time of an elementwise operation with a result, undivided on this axis."""
        result, rates = self.graph.values[value], self.machine.rates
        elements = math.prod(result.shape) / self.divided(value)
        return elements / rates.vector_ops + elements * result.itemsize / 3 / rates.hbm_bytes


type _Changes = list[tuple[MeshAxis, int, int]]
"""Other axes along which a transfer changes a value, with their states before and after."""


def _pass_seconds(nbytes: float, along: MeshAxis) -> float:
    """Return the time in which every device of an axis receives all of a value."""
    n = along.size
    return along.latency + nbytes * (n - 1) / n / along.bytes_per_second


def is_negligible(graph: ProgramGraph, value: int, number: int) -> bool:
    """Return True for an operand or result of an operation that is small in all of its runs."""
    return graph.values[value].nbytes * graph.operations[number].times < NEGLIGIBLE_BYTES


def in_lanes(size: float) -> float:
    """Return the size to which a minor dimension is padded in memory."""
    return math.ceil(size / LANES) * LANES


# Operations that read no more of their first operand than they yield.
_PARTLY_READ = frozenset(("slice", *INDEXING))


def _touched(op: GraphOperation) -> list[tuple[int, int]]:
    """Return the operands and results that an operation reads and writes, with their slots.

    What a gather or slice takes of its operand is read by the operations after it, which are fused
    with it, and a scatter is in place.
    """
    skipped = {0} if op.name in _PARTLY_READ else set[int]()
    skipped |= {-1} if op.name in IN_PLACE else set()
    return [(slot, value) for slot, value in op.slots if slot not in skipped]


_ROWS, _COLUMNS, _DEPTH = (True, False, True), (False, True, True), (True, True, False)
"""Roles of factors of products."""


def required(op: GraphOperation, factor: int | None, slot: int) -> int:
    """Return the state in which an operation needs an operand, or makes a result.

    Args:
        op: The operation.
        factor: Factor that is split, by index, or None.
        slot: Position of the operand, or `-1 - position` of the result.
    """
    if factor is None:
        return WHOLE
    f = op.rule.factors[factor]
    dim = f.operands[slot] if slot >= 0 else f.results[-1 - slot]
    if dim is not None:
        return dim
    return PARTIAL if slot < 0 and f.reduced else WHOLE


def prescribed(op: GraphOperation, axis: str, slot: int) -> int | None:
    """Return the state that the fixed spec of an operation has for a slot; None if it is open.

    Args:
        op: The operation.
        axis: The mesh axis.
        slot: Position of the operand, or `-1 - position` of the result.
    """
    assert op.fixed is not None
    spec = op.fixed[0][slot] if slot >= 0 else op.fixed[1][-1 - slot]
    for dim, axes in enumerate(spec):
        if axes and axis in axes:
            return dim
    return None if None in spec else WHOLE
