"""Values and operations of a program's graph, and the labels of their dimensions."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from xlashard.auto.problem import ConstraintSite
from xlashard.auto.rules.factors import OpRule
from xlashard.sharding import PartitionSpec


@dataclass(eq=False)
class Value:
    """Value of a program.

    Attributes:
        shape: Its shape.
        itemsize: Bytes of an element.
        labels: Label of each dimension, an index for `ProgramGraph.label`.
        first: Position in the order of execution where its buffer is taken.
        last: Position where its buffer is read for the last time.
        is_stored: Whether it stands in memory: an argument, a result, a carry, or an operand or
            result of an operation that isn't elementwise.
        sites: Sites of its definition, as a result or parameter.
        times: Number of times that it is made.
        uses: Number of operations and results that take it.
    """

    shape: tuple[int, ...]
    itemsize: float
    labels: tuple[int, ...]
    first: int = 0
    last: int = 0
    is_stored: bool = False
    sites: list[ConstraintSite] = field(default_factory=list)
    times: float = 1.0
    uses: int = 0

    @cached_property
    def nbytes(self) -> float:
        """Bytes of the whole value."""
        return math.prod(self.shape) * self.itemsize


@dataclass(eq=False)
class GraphOperation:
    """Operation of a program that isn't elementwise.

    Attributes:
        path: Path of its equation.
        name: Name of its primitive.
        rule: Its sharding rule.
        operands: Its operands, as indices of values; None for literals and scalars.
        results: Its results.
        times: Number of its runs.
        fixed: Spec that a constraint or shard_map prescribes for each operand, and each result.
    """

    path: tuple[int, ...]
    name: str
    rule: OpRule
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    times: float
    fixed: tuple[Any, Any] | None = None

    @property
    def scope(self) -> tuple[int, ...]:
        """Path of the jaxpr that the operation stands in."""
        return self.path[:-1]

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Operands with their positions, and results with `-1 - position`; no literals."""
        every = [*enumerate(self.operands), *[(-1 - k, v) for k, v in enumerate(self.results)]]
        return [(slot, value) for slot, value in every if value is not None]


class Labels:
    """Disjoint sets of labels.

    Attributes:
        sizes: Size of each label's dimensions.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._parent: list[int] = []

    def new(self, size: int) -> int:
        """Make a label."""
        self._parent.append(len(self._parent))
        self.sizes.append(size)
        return len(self._parent) - 1

    def find(self, label: int) -> int:
        """Return the label that stands for the set of a label."""
        parent = self._parent
        while parent[label] != label:
            parent[label] = parent[parent[label]]
            label = parent[label]
        return label

    def join(self, first: int, other: int) -> None:
        """Join the sets of two labels."""
        a, b = sorted((self.find(first), self.find(other)))
        if a != b:
            self._parent[b] = a


class LabelledValues:
    """Values of a program, whose dimensions carry labels.

    Attributes:
        values: The values.
        labels: The labels.
        clusters: Sets of values that elementwise operations connect.
        loops: Labels of the dimensions that loops go through, which aren't sharded.
        sums: For results of operations that are only added to one another, their sum.
        accumulated: For results of operations that a loop only adds to a carry, its runs.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.labels = Labels()
        self.clusters = Labels()
        self.loops: set[int] = set()
        self.sums: dict[int, int] = {}
        self.accumulated: dict[int, float] = {}
        self._additions: dict[int, tuple[int, int]] = {}
        # Results of linear functions, with their operands.
        self._passed: dict[int, int] = {}
        self._cluster: list[int] = []

    def label(self, value: int, dim: int) -> int:
        """Return the label of a dimension."""
        return self._joined[value][dim]

    def labels_of(self, value: int) -> frozenset[int]:
        """Return the labels of the dimensions of a value."""
        return self._sets[value]

    @cached_property
    def _joined(self) -> list[tuple[int, ...]]:
        """Labels of the dimensions of each value, once no more labels are joined."""
        return [tuple(map(self.labels.find, value.labels)) for value in self.values]

    @cached_property
    def _sets(self) -> list[frozenset[int]]:
        return list(map(frozenset, self._joined))

    def cluster(self, value: int) -> int:
        """Return the cluster of a value."""
        return self.clusters.find(self._cluster[value])

    def _value(
        self,
        aval: Any,
        site: ConstraintSite | None = None,
        times: float = 1,
    ) -> int:
        shape = tuple(int(d) if isinstance(d, int) else 1 for d in getattr(aval, "shape", ()))
        itemsize = float(getattr(getattr(aval, "dtype", None), "itemsize", 4) or 4)
        labels = tuple(self.labels.new(size) for size in shape)
        value = Value(shape, itemsize, labels, times=times)
        if site is not None:
            value.sites.append(site)
        self.values.append(value)
        self._cluster.append(self.clusters.new(0))
        return len(self.values) - 1

    def _use(self, indices: Iterable[int | None]) -> None:
        """Count a use of some values."""
        for index in indices:
            if index is not None:
                self.values[index].uses += 1

    def _join(self, first: int, other: int) -> None:
        """Put two values into one cluster."""
        self.clusters.join(self._cluster[first], self._cluster[other])

    def _same(self, first: int, other: int) -> None:
        """Give two values of one shape the same labels."""
        a, b = self.values[first], self.values[other]
        if a.shape != b.shape:
            return
        for x, y in zip(a.labels, b.labels, strict=True):
            self.labels.join(x, y)
        self._join(first, other)

    def _slice_of(self, whole: int, part: int) -> None:
        """Give the step of a stacked value the labels of the stack, without its first one."""
        self.loops.add(self.values[whole].labels[0])
        for x, y in zip(self.values[whole].labels[1:], self.values[part].labels, strict=True):
            self.labels.join(x, y)
        self._join(whole, part)
        self.values[whole].is_stored = self.values[part].is_stored = True

    def transfer_key(self, op: GraphOperation, slot: int, value: int) -> tuple[int, object]:
        """Return a key that is equal for operands or results whose transfers are one.

        Operations of a jaxpr share the transfer of an operand, and addends that of their sum.

        Args:
            op: The operation.
            slot: Position of the operand, or `-1 - position` of the result.
            value: The value at it.
        """
        return (value, op.scope) if slot >= 0 else (self.sums.get(value, value), None)

    def _find_sums(self, operations: Iterable[GraphOperation]) -> None:
        """Find results that run as often as their sum, and that nothing else takes."""
        addends: dict[int, list[int]] = {
            value: [value]
            for op in operations
            for value in op.results
            if value is not None and op.fixed is None
        }
        for total, pair in self._additions.items():
            times = self.values[total].times
            if all(
                x in addends and (self.values[x].uses, self.values[x].times) == (1, times)
                for x in pair
            ):
                addends[total] = [*addends[pair[0]], *addends[pair[1]]]
                self.sums.update(dict.fromkeys(addends[total], total))

    def _addends(self, carry: int, updated: int) -> list[int]:
        """Return the values whose sum a loop adds to a carry; empty if it does more with any.

        Args:
            carry: Parameter of the carry.
            updated: Its result.
        """
        pair = self._additions.get(updated, ())
        left = [value for value in pair if value != carry]
        if len(left) != 1 or self.values[carry].uses != 1:
            return []
        found: list[int] = []
        while left:
            value = left.pop()
            if self.values[value].uses != 1:
                return []
            if value in self._additions:
                left += self._additions[value]
            elif value in self._passed:
                left.append(self._passed[value])
            else:
                found.append(value)
        return found

    def clusters_led_by(self, leaders: Iterable[int]) -> set[int]:
        """Return the clusters whose largest value is one of some values."""
        largest: dict[int, int] = {}
        for cluster, members in self.members():
            largest[cluster] = max(math.prod(self.values[index].shape) for index in members)
        return {
            self.cluster(index)
            for index in leaders
            if math.prod(self.values[index].shape) >= largest[self.cluster(index)]
        }

    def members(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each cluster with its values."""
        found: dict[int, list[int]] = {}
        for index in range(len(self.values)):
            found.setdefault(self.cluster(index), []).append(index)
        yield from found.items()


type FixedSpec = tuple[tuple[str, ...] | None, ...]
"""Mesh axes of each dimension; None for a dimension that is left open."""


def fixed_specs(eqn: Any) -> tuple[tuple[FixedSpec, ...], tuple[FixedSpec, ...]] | None:
    """Return the specs that an equation prescribes for its operands and its results, if any."""
    if eqn.primitive.name == "shard_map":
        ins, outs = eqn.params["in_specs"], eqn.params["out_specs"]
        return (
            tuple(map(spec_axes, ins, [v.aval.ndim for v in eqn.invars])),
            tuple(map(spec_axes, outs, [v.aval.ndim for v in eqn.outvars])),
        )
    if eqn.primitive.name != "sharding_constraint":
        return None
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return None
    opened = eqn.params.get("unconstrained_dims", ())
    fixed = spec_axes(spec, eqn.outvars[0].aval.ndim)
    fixed = tuple(None if d in opened else axes for d, axes in enumerate(fixed))
    return ((fixed,), (fixed,))


def spec_axes(spec: Any, rank: int) -> FixedSpec:
    """Return the mesh axes of each dimension of a value with a spec."""
    entries = [*tuple(spec), *(None,) * (rank - len(spec))]
    return tuple(
        None
        if entry is jax.sharding.PartitionSpec.UNCONSTRAINED
        else ((entry,) if isinstance(entry, str) else tuple(entry or ()))
        for entry in entries
    )


def boundary_specs(
    tied: Iterable[tuple[int, int]],
    in_specs: Sequence[PartitionSpec | None],
    out_specs: Sequence[PartitionSpec | None],
) -> tuple[dict[int, PartitionSpec], dict[int, PartitionSpec]]:
    """Return the fixed specs of arguments and of results by position, those of ties for both."""
    ins, outs = (
        {i: spec for i, spec in enumerate(specs) if spec is not None}
        for specs in (in_specs, out_specs)
    )
    for argument, result in tied:
        spec = ins.get(argument, outs.get(result))
        if spec is not None:
            ins[argument] = outs[result] = spec
    return ins, outs


def is_transparent(operation: GraphOperation, values: Sequence[Value]) -> bool:
    """Return True if each dimension of each array is that of one factor of them all."""
    taken = [k for k, index in enumerate(operation.operands) if index is not None]
    made = [k for k, index in enumerate(operation.results) if index is not None]
    if operation.rule.known and not taken:
        return True
    factors = operation.rule.factors
    return is_pointwise(operation, values) and all(
        [f.operands[k] is not None for f in factors for k in taken]
        + [f.results[k] is not None for f in factors for k in made]
    )


def is_pointwise(operation: GraphOperation, values: Sequence[Value]) -> bool:
    """Return True if each dimension of each array is that of a factor, and none is reduced.

    Operands may lack factors, as one does that is broadcast along a dimension of size 1.
    """
    rule = operation.rule
    if not rule.known or rule.flops or any(f.reduced or f.halo for f in rule.factors):
        return False
    for side, arrays in (("operands", operation.operands), ("results", operation.results)):
        for k, index in enumerate(arrays):
            if index is None:
                continue
            covered = {getattr(f, side)[k] for f in rule.factors}
            if any(n > 1 and d not in covered for d, n in enumerate(values[index].shape)):
                return False
    return True
