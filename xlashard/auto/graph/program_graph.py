"""Graph of a program: values whose dimensions carry labels, and the operations between them.

Inner jaxprs are entered once, with the number of their runs. Values that elementwise operations
connect share the labels of their dimensions: one label is sharded alike in all of them.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

from xlashard._jax.trace.primitive_names import (
    ADDITIONS,
    CONSTRAINT,
    DEVICE_PROGRAMS,
    IN_PLACE,
    LINEAR,
    REDUCTIONS,
)
from xlashard.auto.graph.graph_values import (
    GraphOperation,
    GraphStep,
    boundary_specs,
    fixed_specs,
    is_pointwise,
    is_transparent,
    join_equal_labels,
    operation_kind,
)
from xlashard.auto.graph.inner_programs import InnerPrograms, find_called_body
from xlashard.auto.problem import ConstraintSite, Machine
from xlashard.auto.rules.factors import Factor, OpRule
from xlashard.auto.rules.op_rules import op_rule
from xlashard.core.sharding import PartitionSpec, spec_of

_FOLLOWING = frozenset(("broadcast_in_dim", *REDUCTIONS))
"""Primitives whose small side may follow the large one."""

_SMALL_BYTES = 1 << 21
"""Smaller values of the state, in bytes, follow what they are broadcast to or reduced from."""


class ProgramGraph(InnerPrograms):
    """Values, operations and labels of a jaxpr.

    Args:
        jaxpr: The closed jaxpr.
        tied: Positions of arguments and results with one sharding.
        in_specs: Spec of each argument that is fixed, or None; empty for none.
        out_specs: The same for results.

    Attributes:
        operations: Operations that aren't elementwise, in order of execution.
        arguments: Indices of the arguments among the values.
        results: Indices of the results; None for literals.
        fixed: Fixed specs of arguments and of results, by position.
        inside: For each argument and result with a fixed spec, the value inside of which it is a
            copy, whose sharding is free.
        reductions: Merged reductions: value, label that is reduced away, and runs.
        elementwise: Elementwise operations: index of the result, and runs.
        spatial: Labels of the spatial dimensions of convolutions.
        state: The tied arguments.
        state_clusters: Clusters of the tied arguments and what is made of them elementwise.
        work: Times of operations by machine, as far as they are known.
    """

    def __init__(
        self,
        jaxpr: Any,
        tied: Sequence[tuple[int, int]] = (),
        in_specs: Sequence[PartitionSpec | None] = (),
        out_specs: Sequence[PartitionSpec | None] = (),
    ) -> None:
        super().__init__()
        self.operations: list[GraphOperation] = []
        self.reductions: list[tuple[int, int, float]] = []
        self.elementwise: list[tuple[int, float]] = []
        self.spatial: set[int] = set()
        self.work: dict[Machine, dict[Hashable, float]] = {}
        self.state: set[int] = set()
        self._delayed: list[tuple[GraphOperation, int]] = []
        consts = [self._value(v.aval) for v in jaxpr.constvars]
        self.arguments = [
            self._value(v.aval, ConstraintSite((), "parameter", i))
            for i, v in enumerate(jaxpr.invars)
        ]
        self.consts = consts
        for index in (*consts, *self.arguments):
            self.values[index].is_stored = True
        self.inside: dict[int, int] = {}
        self.fixed = fixed_in, fixed_out = boundary_specs(tied, in_specs, out_specs)
        inputs = [
            self._copied(index, var.aval, fixed_in.get(i))
            for i, (index, var) in enumerate(zip(self.arguments, jaxpr.invars, strict=True))
        ]
        results = self._enter(jaxpr, [*consts, *inputs], (), 1.0, bound=True)
        self._use(results)
        self.results = [
            None if index is None else self._copied(index, var.aval, fixed_out.get(i), result=True)
            for i, (index, var) in enumerate(zip(results, jaxpr.outvars, strict=True))
        ]
        for index in self.results:
            if index is not None:
                self.values[index].is_stored = True
        for argument, result in tied:
            old, new = self.arguments[argument], self.results[result]
            self.state |= {old, self.inside.get(old, old)}
            if new is not None:
                self._same(old, new)
        self._merge_small()
        self._find_sums(self.operations)
        join_equal_labels(self.values, self.labels, self.operations, self.state, self.loops)

    @cached_property
    def padded_labels(self) -> frozenset[int]:
        """Labels that may have padded pieces, as no argument or result has them.

        They are those of products, and of what differs little from another dimension.

        All of their dimensions have one size.
        """
        padded = {
            label
            for op in self.operations
            if op.fixed is None
            for factor in op.rule.factors
            if factor.most_padded and (op.rule.flops or factor.size == 1)
            for label in self.factor_labels(op, factor)
        }
        for index in (*self.arguments, *self.results):
            padded -= frozenset() if index is None else self.labels_of(index)
        for labels, value in zip(self._joined, self.values, strict=True):
            pairs = zip(labels, value.shape, strict=True)
            padded -= {label for label, size in pairs if self.labels.sizes[label] != size}
        return frozenset(padded)

    @cached_property
    def alike(self) -> list[tuple[int, ...]]:
        """Operations that cost the same, as those of equal layers do, whose labels are the same."""
        groups: dict[Hashable, list[int]] = {}
        for number, op in enumerate(self.operations):
            labels = tuple((self._joined[index], self.is_state(index)) for _, index in op.slots)
            groups.setdefault((operation_kind(op, self.values), labels), []).append(number)
        return [tuple(numbers) for numbers in groups.values()]

    def is_state(self, value: int) -> bool:
        """Return True for a value in a cluster of the state."""
        return self.cluster(value) in self.state_clusters

    def _equation(
        self, eqn: Any, operands: list[int | None], path: tuple[int, ...], times: float
    ) -> list[int | None]:
        name = eqn.primitive.name
        special = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name)
        if special is not None:
            self._use(operands)
            return special(eqn, operands, path, times)
        rule = op_rule(eqn)
        if not rule.known and name not in DEVICE_PROGRAMS:
            called = find_called_body(eqn, operands)
            if called is not None:
                number, body, passed = called
                known, inner = self._known(body.invars, passed), (*path, number)
                if eqn.params.get("prevent_cse"):
                    # Behind the barrier against it the partitioner forgets a sharding.
                    for i, index in enumerate(known):
                        self.values[index].sites.append(ConstraintSite(inner, "parameter", i))
                return self._enter(body, known, inner, times)
        return self._operation(eqn, rule, operands, path, times)

    def _copied(
        self, value: int, aval: Any, spec: PartitionSpec | None, *, result: bool = False
    ) -> int:
        """Return a copy of a value, between which and the value a fixed spec stands."""
        rank = len(self.values[value].shape)
        if spec is None or not rank:
            return value
        copy = self._value(aval)
        outer, inner = (copy, value) if result else (value, copy)
        self.inside[outer] = inner
        if not result:
            self.values[inner].sites, self.values[outer].sites = self.values[outer].sites, []
        axes = spec_of(spec).for_rank(rank)
        self.operations.append(
            GraphOperation(
                path=(),
                name=CONSTRAINT,
                rule=OpRule(()),
                operands=(value,),
                results=(copy,),
                times=1.0,
                fixed=((axes,), (axes,)),
            )
        )
        return copy

    def _total(self, carried: int, aval: Any, addends: Sequence[int], runs: float) -> int:
        products = [op for op in self.operations if op.rule.flops]
        if not {v for op in products for v in op.results}.issuperset(addends):
            return carried
        # XLA reduces the partial sums of products once, after the loop. What is made of the total
        # may be sharded otherwise than the carry.
        self.accumulated |= dict.fromkeys(addends, runs)
        total = self._value(aval)
        sizes = enumerate(self.values[total].shape)
        rule = OpRule(tuple(Factor(size, (d,), (d,)) for d, size in sizes if size > 1))
        self._add(
            GraphOperation((), "total", rule, (carried,), (total,), self.values[carried].times)
        )
        self.steps.append(GraphStep([carried], [total], fused=True))
        return total

    def _operation(
        self,
        eqn: Any,
        rule: OpRule,
        operands: list[int | None],
        path: tuple[int, ...],
        times: float,
    ) -> list[int | None]:
        outs = self._results(eqn, path, times)
        self._use(operands)
        if eqn.primitive.name in ADDITIONS and rule.elementwise:
            left, right = operands
            if left is not None and right is not None:
                self._additions[outs[0]] = left, right
        if eqn.primitive.name in LINEAR and operands[0] is not None:
            self._passed[outs[0]] = operands[0]
        arrays = tuple(None if o is None or not self.values[o].shape else o for o in operands)
        operation = GraphOperation(
            path=path,
            name=eqn.primitive.name,
            rule=rule,
            operands=arrays,
            results=tuple(o if self.values[o].shape else None for o in outs),
            times=times,
            fixed=fixed_specs(eqn),
        )
        is_free = operation.fixed is None
        transparent = is_free and is_transparent(operation, self.values)
        pointwise = is_free and is_pointwise(operation, self.values)
        copied = is_free and (rule.pairwise or operation.name == "broadcast_in_dim")
        fused = copied or transparent or pointwise
        if operation.name == "conv_general_dilated":
            self._note_spatial(operation, eqn.params["dimension_numbers"])
        self.steps.append(
            GraphStep(operands, outs, fused=fused, in_place=operation.name in IN_PLACE)
        )
        if is_free and rule.pairwise:
            for operand, result in zip(operands, outs, strict=False):
                if operand is not None:
                    self._same(operand, result)
        elif transparent:
            self._unify(operation)
        elif pointwise or (is_free and operation.name in _FOLLOWING):
            self._delayed.append((operation, len(self.operations)))
        else:
            self._add(operation)
        return list(outs)

    def _note_spatial(self, convolution: GraphOperation, numbers: Any) -> None:
        for index, spec in (
            (convolution.operands[0], numbers.lhs_spec),
            (convolution.results[0], numbers.out_spec),
        ):
            if index is not None:
                self.spatial.update(self.values[index].labels[d] for d in spec[2:])

    def _add(self, operation: GraphOperation, at: int | None = None) -> None:
        for _, index in operation.slots:
            self.values[index].is_stored = True
        self.operations.insert(len(self.operations) if at is None else at, operation)

    def _unify(self, operation: GraphOperation) -> None:
        """Join the labels of an operation's operands and results along its factors."""
        for f in operation.rule.factors:
            labels = [self.values[o].labels[d] for o, d in operation.indexed(f)]
            for label in labels[1:]:
                self.labels.join(labels[0], label)
        # In place, only the update is moved: what is written into a state waits for activations.
        in_place = operation.name in IN_PLACE
        arrays = [index for slot, index in operation.slots if slot < 1 or not in_place]
        for other in arrays[1:]:
            self._join(arrays[0], other)
        # A value without operands, such as a constant, is made where it is used.
        if any(o is not None for o in operation.operands):
            moved = operation.operands[1:] if in_place else operation.results
            self.elementwise.extend((o, operation.times) for o in moved if o is not None)

    def _merge_small(self) -> None:
        """Merge small reductions and broadcasts into the clusters of their large sides.

        A value that belongs to the state isn't merged unless it is small.
        """
        state = {self.cluster(index) for index in self.state}
        inserted = 0
        for operation, at in self._delayed:
            arrays = [index for _, index in operation.slots]
            if len(arrays) < 2:
                continue
            small = min(arrays, key=lambda o: self.values[o].nbytes)
            limit = _SMALL_BYTES if self.cluster(small) in state else math.inf
            if self.values[small].nbytes > limit:
                self._add(operation, at + inserted)
                inserted += 1
                continue
            self._unify(operation)
            for f in operation.rule.factors:
                if not f.reduced:
                    continue
                for o, d in zip(operation.operands, f.operands, strict=True):
                    if o is not None and d is not None:
                        for result in operation.results:
                            if result is not None:
                                label = self.values[o].labels[d]
                                self.reductions.append((result, label, operation.times))
        self.state_clusters = self.clusters_led_by(self.state)


_FAR_MORE = 4.0
"""A second dimension is that of the batch if it splits so many times the work of the first."""


def batch_labels(graph: ProgramGraph) -> tuple[frozenset[int], frozenset[int]]:
    """Return the labels of the batch, and those of its other dimension, such as of sequences.

    These are the labels reached from a dimension of an argument that isn't fed back, by factors of
    operations: from the argument whose labels split most of the work. The dimension is the first,
    unless the second splits far more work, as in a batch whose parts are computed one by one. The
    other one has no labels unless it splits half as much work.
    """
    links: dict[int, set[int]] = defaultdict(set)
    for op in graph.operations:
        for factor in op.rule.factors if op.fixed is None else ():
            labels = graph.factor_labels(op, factor)
            for label in labels:
                links[label] |= labels
    best, along, most = frozenset[int](), frozenset[int](), 0.0
    for index in graph.arguments:
        if index in graph.state:
            continue
        own, least = frozenset[int](), 0.0
        splits: list[tuple[float, frozenset[int]]] = []
        for dim in range(min(len(graph.values[index].shape), 2)):
            reached = _closure(graph.label(graph.inside.get(index, index), dim), links)
            work = _split_work(graph, reached)
            splits.append((work, frozenset(reached)))
            if work > least * _FAR_MORE:
                own, least = frozenset(reached), work
        if least > most * 1.1:
            best, most = own, least
            others = [each for work, each in splits if own.isdisjoint(each) and 2 * work > least]
            along = others[0] if others else frozenset()
    return best, along


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
        if op.fixed is None and any(graph.factor_labels(op, f) & labels for f in op.rule.factors):
            nbytes = sum(graph.values[value].nbytes for _, value in op.slots)
            total += (op.rule.flops + nbytes) * op.times
    return total
