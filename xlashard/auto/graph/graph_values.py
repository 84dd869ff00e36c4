"""Values, operations and steps of a program's graph, and the labels of dimensions.

Equal layers of a program get one layout: labels that operations use alike, in equal places, are
joined.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xlashard._jax.trace.primitive_names import CONSTRAINT
from xlashard.auto.problem import ConstraintSite
from xlashard.auto.rules.factors import Factor, OpRule
from xlashard.core.sharding import PartitionSpec, spec_of
from xlashard.geometry import DimAxes


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

    def indexed(self, factor: Factor) -> list[tuple[int, int]]:
        """Return the operands and results that a factor indexes, with the dimension of each."""
        pairs = [
            *zip(self.operands, factor.operands, strict=True),
            *zip(self.results, factor.results, strict=True),
        ]
        return [(value, dim) for value, dim in pairs if value is not None and dim is not None]


@dataclass(frozen=True)
class Carry:
    """Carry of a loop, as indices of values; None for literals.

    Attributes:
        initial: Its initial value.
        parameter: Its parameter in the body; None for a result of branches.
        updated: Its result in the body.
        result: Its final value.
    """

    initial: int | None
    parameter: int | None
    updated: int | None
    result: int


@dataclass(eq=False)
class GraphStep:
    """Equation of a program, as far as memory is concerned.

    Attributes:
        operands: Its operands, as indices of values; None for literals.
        results: Its results.
        fused: Whether its results can be computed again wherever they are used.
        in_place: Whether its result can take the buffer of its first operand.
        body: Steps of a loop's body, or of branches; None for other equations.
        carries: Carries of a loop.
        copies: Converted copies of stacks that a loop reads.
    """

    operands: Sequence[int | None]
    results: Sequence[int]
    fused: bool = False
    in_place: bool = False
    body: list["GraphStep"] | None = None
    carries: Sequence[Carry] = ()
    copies: Sequence[int] = ()


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


type FixedSpec = tuple[DimAxes, ...]
"""Mesh axes of each dimension; None for a dimension that is left open."""


def fixed_specs(eqn: Any) -> tuple[tuple[FixedSpec, ...], tuple[FixedSpec, ...]] | None:
    """Return the specs that an equation prescribes for its operands and its results, if any."""
    if eqn.primitive.name == "shard_map":
        return (
            _axes_of_all(eqn.params["in_specs"], eqn.invars),
            _axes_of_all(eqn.params["out_specs"], eqn.outvars),
        )
    if eqn.primitive.name != CONSTRAINT:
        return None
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return None
    opened = eqn.params.get("unconstrained_dims", ())
    fixed = spec_of(spec).for_rank(eqn.outvars[0].aval.ndim)
    fixed = tuple(None if d in opened else axes for d, axes in enumerate(fixed))
    return ((fixed,), (fixed,))


def _axes_of_all(specs: Iterable[PartitionSpec], variables: Iterable[Any]) -> tuple[FixedSpec, ...]:
    pairs = zip(specs, variables, strict=True)
    return tuple(spec_of(spec).for_rank(variable.aval.ndim) for spec, variable in pairs)


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
    operands = [k for k, index in enumerate(operation.operands) if index is not None]
    results = [k for k, index in enumerate(operation.results) if index is not None]
    if operation.rule.known and not operands:
        return True
    factors = operation.rule.factors
    return is_pointwise(operation, values) and all(
        [f.operands[k] is not None for f in factors for k in operands]
        + [f.results[k] is not None for f in factors for k in results]
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


_ROUNDS = 12
"""Most refinements of colors."""


def join_equal_labels(
    values: Sequence[Value],
    labels: Labels,
    operations: Sequence[GraphOperation],
    state: set[int],
    loops: set[int],
) -> None:
    """Join the labels that all operations use alike.

    Their colors are refined until they don't change: that of an operation by the colors of its
    labels, that of a label by those of the operations that use it.

    Args:
        values: The values of the program.
        labels: Their labels.
        operations: The operations.
        state: Values that are fed back.
        loops: Labels that loops go through.
    """
    # A number for each fact.
    colors: dict[Hashable, int] = defaultdict(itertools.count().__next__)
    whole = [tuple(map(labels.find, value.labels)) for value in values]
    through = set(map(labels.find, loops))
    facts: dict[int, set[Hashable]] = defaultdict(set)
    for index, (value, value_labels) in enumerate(zip(values, whole, strict=True)):
        for dim, label in enumerate(value_labels):
            facts[label].add((value.shape, value.itemsize, dim, index in state, label in through))
    color = {label: colors[frozenset(known)] for label, known in facts.items()}
    places = [
        [(slot, dim, label) for slot, index in op.slots for dim, label in enumerate(whole[index])]
        for op in operations
    ]
    kinds = [colors[operation_kind(op, values)] for op in operations]
    for _ in range(_ROUNDS):
        uses: dict[int, Counter[Hashable]] = defaultdict(Counter)
        for kind, uses_of in zip(kinds, places, strict=True):
            used = colors[kind, *(color[label] for _, _, label in uses_of)]
            for slot, dim, label in uses_of:
                uses[label][used, slot, dim] += 1
        before = len(set(color.values()))
        color = {k: colors[c, frozenset(uses[k].items())] for k, c in color.items()}
        if len(set(color.values())) == before:
            break
    # The dimensions of one value stay apart.
    apart = set[int]()
    for value_labels in whole:
        counts = Counter(color[label] for label in set(value_labels))
        apart.update(c for c, count in counts.items() if count > 1)
    first: dict[int, int] = {}
    for label, c in color.items():
        if c not in apart:
            labels.join(first.setdefault(c, label), label)


def operation_kind(operation: GraphOperation, values: Sequence[Value]) -> Hashable:
    """Return what operations have in common that cost the same if they are sharded alike.

    Args:
        operation: The operation.
        values: The values of the program.
    """
    types = tuple((slot, values[k].shape, values[k].itemsize) for slot, k in operation.slots)
    return operation.name, operation.rule, operation.fixed, operation.times, types
