"""Costs of the shardings of a program on one mesh axis, given its other axes."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

from xlashard.auto.graph_values import GraphOperation
from xlashard.auto.problem import Machine, MeshAxis
from xlashard.auto.program_graph import ProgramGraph
from xlashard.auto.rules.factors import Factor

_LANES = 128
"""Elements of the minor dimension of a tile."""
PARTIAL = -2
"""State of a result that devices must combine."""
WHOLE = -1
"""State of a value that every device of the axis holds whole."""
NEGLIGIBLE_BYTES = 1 << 12
"""Values below this size, in bytes, change their sharding at no cost."""


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
    """

    def __init__(
        self, graph: ProgramGraph, machine: Machine, axis: MeshAxis, others: Assignment
    ) -> None:
        self.graph, self.machine, self.axis = graph, machine, axis
        self._sizes = {a.name: a.size for a in machine.axes if a.name != axis.name}
        self._others = others

    def divided(self, value: int) -> float:
        """Return the number of pieces of a value on the other axes."""
        labels = self.graph.labels_of(value)
        return math.prod(
            size for name, size in self._sizes.items() if self._others.labels[name] & labels
        )

    def label_pieces(self, label: int) -> int:
        """Return the number of pieces of a label on the other axes."""
        return math.prod(
            size for name, size in self._sizes.items() if label in self._others.labels[name]
        )

    def factor_pieces(self, number: int, factor: int) -> int:
        """Return the number of pieces of a factor of an operation on the other axes."""
        return math.prod(
            size
            for name, size in self._sizes.items()
            if self._others.factors[name].get(number) == factor
        )

    def local_bytes(self, value: int, operation: int | None = None, slot: int = 0) -> float:
        """Return the bytes of a value on a device before this axis divides it.

        Args:
            value: The value.
            operation: An operation that takes or makes it, in place of how it is stored.
            slot: Its position among the operands, or `-1 - position` among the results.
        """
        nbytes = self.graph.values[value].nbytes
        if operation is None:
            return nbytes / self.divided(value)
        op = self.graph.operations[operation]
        for name, size in self._sizes.items():
            if required(op, self._others.factors[name].get(operation), slot) >= 0:
                nbytes /= size
        return nbytes

    def transfer_bytes(self, value: int, number: int, slot: int, *, exchanged: bool) -> float:
        """Return the bytes of a transfer on this axis.

        Axes that gather or reduce a value together share its bytes, each in its turn.

        Args:
            value: The value.
            number: Operation that takes or makes it.
            slot: Its position among the operands, or `-1 - position` among the results.
            exchanged: Whether it stays sharded over this axis, along another dimension.
        """
        own = self.local_bytes(value, number, slot)
        if exchanged:
            return max(own, self.local_bytes(value))
        op, together = self.graph.operations[number], 1
        for name in self._sizes:
            needed = required(op, self._others.factors[name].get(number), slot)
            stored = self._others.state(self.graph, name, value)
            if needed == PARTIAL or (slot >= 0 and needed == WHOLE and stored != WHOLE):
                together += 1
        return own / together

    def gather(self, nbytes: float) -> float:
        """Return the time to gather a value of some bytes, or to reduce and scatter it."""
        n = self.axis.size
        return self.axis.latency + nbytes * (n - 1) / n / self.axis.bytes_per_second

    def exchange(self, nbytes: float) -> float:
        """Return the time to move a sharding from one dimension to another."""
        return self.axis.latency + nbytes / 4 / self.axis.bytes_per_second

    def conversion(self, stored: int, needed: int, nbytes: float) -> float:
        """Return the time to change the sharding of a value of some bytes.

        Args:
            stored: Dimension, WHOLE or PARTIAL.
            needed: Dimension or WHOLE.
            nbytes: Bytes of the value, whole on this axis.
        """
        if stored in (needed, WHOLE) or nbytes < NEGLIGIBLE_BYTES:
            return 0.0
        if stored == PARTIAL:
            return self.gather(nbytes) * (2 if needed == WHOLE else 1)
        return self.gather(nbytes) if needed == WHOLE else self.exchange(nbytes)

    def work_seconds(self, number: int, factor: int | None = None) -> float:
        """Return the time of one run of an operation.

        Args:
            number: The operation.
            factor: Factor that is split over this axis, or None.
        """
        op, rates = self.graph.operations[number], self.machine.rates
        if op.name == "sharding_constraint":
            return 0.0
        split = math.prod(
            size
            for name, size in self._sizes.items()
            if (chosen := self._others.factors[name].get(number)) is not None
            and op.rule.factors[chosen].divides_work
        )
        share = 1.0 if factor is None else self.share(number, factor)
        compute = rates.product_seconds(op.rule.flops / split * share, "bfloat16")
        nbytes = 0.0
        for slot, value in _touched(op):
            local, dim = self.local_bytes(value, number, slot), required(op, factor, slot)
            if factor is None or dim < 0:
                nbytes += local
                continue
            size = self.graph.values[value].shape[dim]
            pieces = self.factor_pieces(number, factor) * self.axis.size
            is_minor = dim == len(self.graph.values[value].shape) - 1
            padded = _in_lanes(size / pieces) / _in_lanes(size) * pieces if is_minor else 1.0
            nbytes += local / self.axis.size * padded
        return max(compute, nbytes / rates.hbm_bytes) + rates.operation_seconds

    def share(self, number: int, factor: int) -> float:
        """Return the share of a product's FLOP that a device has if a factor is split."""
        op, n = self.graph.operations[number], self.axis.size
        f = op.rule.factors[factor]
        if not f.divides_work:
            return 1.0
        # Matrix units are padded to whole tiles.
        alike = [k for k, other in enumerate(op.rule.factors) if _role(other) == _role(f)]
        pieces = math.prod(self.factor_pieces(number, k) for k in alike) * n
        local = math.prod(op.rule.factors[k].size for k in alike) / pieces
        unit = self.machine.rates.matrix_size
        return math.ceil(local / unit) * unit / local / n

    def halo_seconds(self, number: int, factor: int) -> float:
        """Return the time to exchange the edges of an operation's pieces in one run."""
        op = self.graph.operations[number]
        halo, operand = op.rule.factors[factor].halo, next(iter(op.operands), None)
        if not halo or operand is None:
            return 0.0
        nbytes = self.local_bytes(operand, number) * halo
        return self.axis.latency + nbytes / self.axis.bytes_per_second

    def elementwise_seconds(self, value: int) -> float:
        """Return the time of an elementwise operation with a result, undivided on this axis."""
        made, rates = self.graph.values[value], self.machine.rates
        elements = math.prod(made.shape) / self.divided(value)
        return elements / rates.vector_ops + elements * made.itemsize / 3 / rates.hbm_bytes


def _in_lanes(size: float) -> float:
    """Return the size to which a minor dimension is padded in memory."""
    return math.ceil(size / _LANES) * _LANES


def _touched(op: GraphOperation) -> list[tuple[int, int]]:
    """Return the operands and results that an operation reads and writes, with their slots.

    A gather reads as much of its operand as its result has, and a scatter is in place.
    """
    skipped: tuple[int, ...] = ()
    if op.name in ("gather", "dynamic_slice"):
        skipped = (0,)
    elif op.name.startswith("scatter") or op.name == "dynamic_update_slice":
        skipped = (0, -1)
    return [(slot, value) for slot, value in op.slots if slot not in skipped]


def _role(factor: Factor) -> tuple[bool, ...]:
    """Return which operands a factor indexes: rows, columns, depth or batch of a product."""
    return tuple(dim is not None for dim in factor.operands)


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


def factor_labels(graph: ProgramGraph, op: GraphOperation, factor: Factor) -> set[int]:
    """Return the labels of the dimensions that a factor indexes."""
    found = set()
    for values, dims in ((op.operands, factor.operands), (op.results, factor.results)):
        for value, dim in zip(values, dims, strict=True):
            if value is not None and dim is not None:
                found.add(graph.label(value, dim))
    return found


_FAR_MORE = 4.0
"""A second dimension is that of the batch if it splits so many times the work of the first."""


def batch_labels(graph: ProgramGraph) -> frozenset[int]:
    """Return the labels of the batch.

    These are the labels reached from a dimension of an argument that isn't fed back, by factors of
    operations: from the argument whose labels split most of the work. The dimension is the first,
    unless the second splits far more work, as in a batch whose parts are computed one by one.
    """
    links: dict[int, set[int]] = defaultdict(set)
    for op in graph.operations:
        for factor in op.rule.factors if op.fixed is None else ():
            labels = factor_labels(graph, op, factor)
            for label in labels:
                links[label] |= labels
    best, most = frozenset[int](), 0.0
    for index in graph.arguments:
        if index in graph.state:
            continue
        own, least = frozenset[int](), 0.0
        for dim in range(min(len(graph.values[index].shape), 2)):
            reached = _closure(graph.label(graph.inside.get(index, index), dim), links)
            work = _split_work(graph, reached)
            if work > least * _FAR_MORE:
                own, least = frozenset(reached), work
        if least > most * 1.1:
            best, most = own, least
    return best


def _closure(label: int, links: dict[int, set[int]]) -> set[int]:
    reached, waiting = {label}, [label]
    while waiting:
        for other in links[waiting.pop()] - reached:
            reached.add(other)
            waiting.append(other)
    return reached


def _split_work(graph: ProgramGraph, labels: set[int]) -> float:
    """Return the FLOP and bytes of the operations that some labels split."""
    total = 0.0
    for op in graph.operations:
        if op.fixed is None and any(factor_labels(graph, op, f) & labels for f in op.rule.factors):
            nbytes = sum(graph.values[value].nbytes for _, value in op.slots)
            total += (op.rule.flops + nbytes) * op.times
    return total
