"""Inner programs of a graph: loops and branches, entered once with the number of their runs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from xlashard._jax.trace import tracing
from xlashard._jax.trace.jaxprs import Literal, scan_operands
from xlashard.auto.graph.graph_values import LabelledValues, Value
from xlashard.auto.graph.live_ranges import Carry, GraphStep
from xlashard.auto.problem import ConstraintSite

_UNKNOWN_TRIPS = 1
"""Runs of a loop whose trip count isn't known."""


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
        known = [
            self._value(v.aval) if o is None else o
            for v, o in zip(body.invars, consts, strict=False)
        ]
        fresh = [
            self._value(v.aval, ConstraintSite(inner, "parameter", len(consts) + i), runs)
            for i, v in enumerate(body.invars[len(consts) :])
        ]
        for outer, made in zip(carry, fresh, strict=False):
            self.values[made].is_stored = True
            if outer is not None:
                self._same(outer, made)
        for outer, made in zip(xs, fresh[len(carry) :], strict=True):
            if outer is not None:
                self._slice_of(outer, made)
                self.steps.append(GraphStep([outer], [made], fused=True))
        results = self._enter(body, [*known, *fresh], inner, runs)
        self._use(results)
        outs = self._results(eqn, path, times)
        carries = map(Carry, carry, fresh, results, outs[: len(carry)])
        copies = [
            copy
            for outer, made in zip(xs, fresh[len(carry) :], strict=True)
            if outer is not None and (copy := self._converted(outer, made)) is not None
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
        for number, (made, result) in enumerate(zip(fresh[: len(carry)], results, strict=False)):
            added = [] if result is None else self._addends(made, result)
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
            made = self._value(var.aval, ConstraintSite(inner, "parameter", last + i), runs)
            self.values[made].is_stored = True
            if outer is not None:
                self._same(outer, made)
            fresh.append(made)
        for jaxpr, consts, number in ((condition, cond_consts, 0), (body, body_consts, 1)):
            known = [
                self._value(v.aval) if o is None else o
                for v, o in zip(jaxpr.invars, consts, strict=False)
            ]
            results = self._enter(jaxpr, [*known, *fresh], (*path, number), runs)
            self._use(results)
        outs = self._results(eqn, path, times)
        for made, result, out in zip(fresh, results, outs, strict=True):
            if result is not None:
                self._same(made, result)
            self._same(made, out)
        self._close(before, operands, outs, map(Carry, carry, fresh, results, outs))
        return list(outs)

    def _cond(
        self, eqn: Any, operands: list[int | None], path: tuple[int, ...], times: float
    ) -> list[int | None]:
        outs: list[int] = []
        made: list[list[int | None]] = []
        before, self.steps = self.steps, []
        for number, branch in enumerate(tracing.bodies(eqn)):
            inner = (*path, number)
            known = [
                self._value(v.aval) if o is None else o
                for v, o in zip(branch.invars, operands[1:], strict=True)
            ]
            made.append(self._enter(branch, known, inner, times))
            self._use(made[-1])
        outs = self._results(eqn, path, times)
        for results in made:
            for out, result in zip(outs, results, strict=True):
                if result is not None:
                    self._same(out, result)
        carries = [
            Carry(None, None, r, out) for rs in made for r, out in zip(rs, outs, strict=True)
        ]
        self._close(before, operands, outs, carries)
        return list(outs)
