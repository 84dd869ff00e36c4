"""Values of a program and of its inner programs: loops and branches, entered once."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import Literal, scan_operands
from xlashard.auto.graph.graph_values import Carry, GraphOperation, GraphStep, Labels, Value
from xlashard.auto.problem import ConstraintSite
from xlashard.auto.rules.factors import Factor

_UNKNOWN_TRIPS = 1
"""Runs of a loop whose trip count isn't known."""


def find_called_body(
    eqn: Any, operands: Sequence[int | None]
) -> tuple[int, Any, Sequence[int | None]] | None:
    """Return the position of the inner jaxpr that an equation calls, the jaxpr, and its operands.

    None if the equation calls no inner jaxpr, several ones, or one of other operands or results.

    Args:
        eqn: The equation.
        operands: Its operands.
    """
    number, bodies = 0, list(tracing.bodies(eqn))
    if eqn.primitive.name == "custom_linear_solve":
        # The others are its transposed solution, and products with the matrix for derivatives.
        number, lengths = bodies.index(eqn.params["jaxprs"].solve), eqn.params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        operands = [*operands[start : start + lengths.solve], *operands[sum(lengths) :]]
    elif len(bodies) != 1:
        return None
    body = bodies[number]
    if (len(body.invars), len(body.outvars)) != (len(operands), len(eqn.outvars)):
        return None
    return number, body, operands


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
        itemsize = tracing.element_bits(aval) / 8 if hasattr(aval, "dtype") else 4.0
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

    def factor_labels(self, op: GraphOperation, factor: Factor) -> set[int]:
        """Return the labels of the dimensions that a factor of an operation indexes."""
        return {self.label(value, dim) for value, dim in op.indexed(factor)}

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
        addends: list[int] = []
        while left:
            value = left.pop()
            if self.values[value].uses != 1:
                return []
            if value in self._additions:
                left += self._additions[value]
            elif value in self._passed:
                left.append(self._passed[value])
            else:
                addends.append(value)
        return addends

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
        clusters: dict[int, list[int]] = {}
        for index in range(len(self.values)):
            clusters.setdefault(self.cluster(index), []).append(index)
        yield from clusters.items()


class InnerPrograms(LabelledValues, ABC):
    """Values of a program and of its inner jaxprs.

    Attributes:
        steps: Steps of the program, by which the live ranges of its values follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[GraphStep] = []
        self._copies: dict[tuple[int, float], int] = {}

    @abstractmethod
    def _equation(
        self, eqn: Any, operands: list[int | None], path: tuple[int, ...], times: float
    ) -> list[int | None]:
        """Add an equation, and return its results."""

    @abstractmethod
    def _total(self, carried: int, aval: Any, addends: Sequence[int], runs: float) -> int:
        """Return the final value of a carry, to which a loop added some values in its runs."""

    def _enter(
        self,
        jaxpr: Any,
        inputs: Sequence[int | None],
        path: tuple[int, ...],
        times: float,
        *,
        bound: bool = False,
    ) -> list[int | None]:
        """Add the operations of a jaxpr, and return its results."""
        env: dict[Any, int | None] = {}
        variables = [*jaxpr.constvars, *jaxpr.invars] if bound else list(jaxpr.invars)
        if not bound:
            for var in jaxpr.constvars:
                env[var] = self._value(var.aval)
        env.update(zip(variables, inputs, strict=True))

        def read(atom: Any) -> int | None:
            return None if isinstance(atom, Literal) else env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            outs = self._equation(eqn, operands, (*path, number), times)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _known(self, variables: Sequence[Any], operands: Sequence[int | None]) -> list[int]:
        """Return the values of the first variables of a jaxpr: operands, or new ones."""
        return [
            self._value(var.aval) if operand is None else operand
            for var, operand in zip(variables, operands, strict=False)
        ]

    def _results(self, eqn: Any, path: tuple[int, ...], times: float) -> list[int]:
        return [
            self._value(v.aval, ConstraintSite(path, "result", i), times)
            for i, v in enumerate(eqn.outvars)
        ]

    def _scan(
        self, eqn: Any, operands: list[int | None], path: tuple[int, ...], times: float
    ) -> list[int | None]:
        body = next(iter(tracing.bodies(eqn)))
        consts, carry, xs = scan_operands(eqn.params, operands)
        runs = times * eqn.params["length"]
        inner = (*path, 0)
        before, self.steps = self.steps, []
        known = self._known(body.invars, consts)
        fresh = [
            self._value(v.aval, ConstraintSite(inner, "parameter", len(consts) + i), runs)
            for i, v in enumerate(body.invars[len(consts) :])
        ]
        for outer, parameter in zip(carry, fresh, strict=False):
            self.values[parameter].is_stored = True
            if outer is not None:
                self._same(outer, parameter)
        for outer, parameter in zip(xs, fresh[len(carry) :], strict=True):
            if outer is not None:
                self._slice_of(outer, parameter)
                self.steps.append(GraphStep([outer], [parameter], fused=True))
        results = self._enter(body, [*known, *fresh], inner, runs)
        self._use(results)
        outs = self._results(eqn, path, times)
        carries = map(Carry, carry, fresh, results, outs[: len(carry)])
        copies = [
            copy
            for outer, parameter in zip(xs, fresh[len(carry) :], strict=True)
            if outer is not None and (copy := self._converted(outer, parameter)) is not None
        ]
        for number, (out, result) in enumerate(zip(outs, results, strict=True)):
            if result is None:
                continue
            if number < len(carry):
                self._same(fresh[number], result)
                self._same(out, result)
                self.values[result].is_stored = True
            else:
                self._slice_of(out, result)
                self.steps.append(GraphStep([result], []))
        self._close(before, operands, outs, carries, copies)
        for number, (parameter, result) in enumerate(
            zip(fresh[: len(carry)], results, strict=False)
        ):
            added = [] if result is None else self._addends(parameter, result)
            if added:
                aval, length = eqn.outvars[number].aval, eqn.params["length"]
                outs[number] = self._total(outs[number], aval, added, length)
        return list(outs)

    def _close(
        self,
        before: list[GraphStep],
        operands: Sequence[int | None],
        outs: Sequence[int],
        carries: Iterable[Carry],
        copies: Sequence[int] = (),
    ) -> None:
        """Add a loop, whose body's steps stand in `steps`, to those before it."""
        for index in outs:
            self.values[index].is_stored = True
        before.append(GraphStep(operands, outs, body=self.steps, carries=[*carries], copies=copies))
        self.steps = before

    def _converted(self, stack: int, part: int) -> int | None:
        """Return the copy of a stack in a narrower type, if its parts are converted to that alone.

        XLA converts the whole stack, before the first loop that takes the parts.
        """
        readers = [step for step in self.steps if part in step.operands]
        sizes = {self.values[index].itemsize for step in readers for index in step.results}
        whole, narrow = self.values[stack], min(sizes, default=0.0)
        if len(sizes) != 1 or narrow >= whole.itemsize or not all(s.fused for s in readers):
            return None
        if (stack, narrow) not in self._copies:
            self._copies[stack, narrow] = len(self.values)
            self.values.append(Value(whole.shape, narrow, whole.labels))
            self._cluster.append(self.clusters.new(0))
        return self._copies[stack, narrow]

    def _while(
        self, eqn: Any, operands: list[int | None], path: tuple[int, ...], times: float
    ) -> list[int | None]:
        condition, body = tracing.bodies(eqn)
        split, last = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_consts, body_consts = operands[:split], operands[split : split + last]
        carry = operands[split + last :]
        before, self.steps = self.steps, []
        runs = times * _UNKNOWN_TRIPS
        fresh = []
        inner = (*path, 1)
        for i, (outer, var) in enumerate(zip(carry, body.invars[last:], strict=True)):
            parameter = self._value(var.aval, ConstraintSite(inner, "parameter", last + i), runs)
            self.values[parameter].is_stored = True
            if outer is not None:
                self._same(outer, parameter)
            fresh.append(parameter)
        for jaxpr, consts, number in ((condition, cond_consts, 0), (body, body_consts, 1)):
            inputs = [*self._known(jaxpr.invars, consts), *fresh]
            results = self._enter(jaxpr, inputs, (*path, number), runs)
            self._use(results)
        outs = self._results(eqn, path, times)
        for parameter, result, out in zip(fresh, results, outs, strict=True):
            if result is not None:
                self._same(parameter, result)
            self._same(parameter, out)
        self._close(before, operands, outs, map(Carry, carry, fresh, results, outs))
        return list(outs)

    def _cond(
        self, eqn: Any, operands: list[int | None], path: tuple[int, ...], times: float
    ) -> list[int | None]:
        outs: list[int] = []
        results_of: list[list[int | None]] = []
        before, self.steps = self.steps, []
        for number, branch in enumerate(tracing.bodies(eqn)):
            known = self._known(branch.invars, operands[1:])
            results_of.append(self._enter(branch, known, (*path, number), times))
            self._use(results_of[-1])
        outs = self._results(eqn, path, times)
        for results in results_of:
            for out, result in zip(outs, results, strict=True):
                if result is not None:
                    self._same(out, result)
        carries = [
            Carry(None, None, r, out) for rs in results_of for r, out in zip(rs, outs, strict=True)
        ]
        self._close(before, operands, outs, carries)
        return list(outs)
