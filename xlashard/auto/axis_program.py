"""Integer program that shards a program over one mesh axis, given its other axes.

Every label is sharded or not, at most one of each value; every operation is split along one of its
factors or none.
A value that an operation needs otherwise than it is stored is gathered or exchanged, once for all
operations of a jaxpr that need it alike; partial results are reduced or scattered. The objective is
the time of the work and of these transfers; memory is bounded where most of it is live.
"""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from xlashard.auto.axis_costs import (
    HIDDEN_SHARE,
    WHOLE,
    CostModel,
    is_negligible,
    prescribed,
    required,
)
from xlashard.auto.rules.factors import can_shard

EXCESS_SECONDS = 1e-8
"""Price of a byte above the memory, in seconds: a gigabyte costs more than any step."""
_TIE_SECONDS = 1e-8
"""Price of a dimension of an argument over the one before it at most, in seconds."""
WHOLE_SHARE = 0.1
"""Price of an argument that a device holds whole, as a share of the time to read it."""
_GAP = 0.002
"""Gap to the best solution that is left, as a share of a step: costs err by more."""
_INTEGRAL = 1e-3
"""Distance of a relaxed choice from 0 or 1 within which it is one of them."""


type RaisedCosts = frozenset[tuple[tuple[int, int | None], float]]
"""Operations, each with a factor or None, and the seconds of a step that this choice costs more."""


@dataclass(frozen=True)
class Restriction:
    """Choices of one axis.

    Attributes:
        batch: Labels of the batch; None if the axis is free.
        mode: `free`; `data`: only batch labels; `fsdp`: only batch labels, and the state is sharded
            over its largest label; `major fsdp`: over one that isn't its minor dimension, if all
            devices divide one, as to gather a minor dimension takes a copy of the whole argument;
            `tensor`: no batch label.
        whole: Labels of small arrays of the state, which aren't sharded, and whose gradients are
            reduced as one.
        unsharded: Other labels that aren't sharded.
        sharded: Labels that are.
        memory_bytes: Memory per device, if it is less than that of the problem, in bytes.
        raised: Choices that cost more than the model knows.
    """

    batch: frozenset[int] = frozenset()
    mode: str = "free"
    whole: frozenset[int] = frozenset()
    unsharded: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()
    memory_bytes: float = math.inf
    raised: RaisedCosts = frozenset()

    def allows(self, labels: Collection[int]) -> bool:
        """Return True if operations may be split along a factor of some labels."""
        if self.mode == "free":
            return True
        return (not self.batch.isdisjoint(labels)) == (self.mode != "tensor")


type AxisSolution = tuple[frozenset[int], dict[int, int], float, float]
"""Sharded labels, factors of operations, the objective in seconds, and the relative gap."""

type _OrderCosts = dict[int, float]
"""Seconds of a permutation by the variable of the change that needs it."""


class AxisProgram:
    """Integer program of one axis.

    Args:
        model: Costs on the axis.
        restriction: Choices of the axis.
        memory_bytes: Memory per device, in bytes.
        fixed: Labels that are sharded, or not, because a spec is fixed.
        live: For each position where much memory is live, the bytes that don't depend on the axis,
            and by label those that a device saves if it is sharded.
    """

    def __init__(
        self,
        model: CostModel,
        restriction: Restriction,
        memory_bytes: float,
        fixed: Mapping[int, bool],
        live: Sequence[tuple[float, Mapping[int, float]]],
    ) -> None:
        self._model, self._graph = model, model.graph
        self._beside = model.beside()
        self._restriction, self._memory = restriction, memory_bytes
        self._fixed, self._live = fixed, live
        self._cost: list[float] = []
        self._integer: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self.offset = 0.0
        # Seconds of the state's transfers by variable, less those that the work hides.
        self._exposed: dict[int, float] = defaultdict(float)
        self._exposed_offset = 0.0
        self._labels: dict[int, int] = {}
        self._factors: dict[int, dict[int | None, int]] = {}
        # By label and other axis that shards it: the changes that cost more if this axis is the
        # major one, and if it is the minor one.
        self._orders: dict[tuple[int, str], tuple[_OrderCosts, _OrderCosts]] = defaultdict(
            lambda: ({}, {})
        )
        self._add_labels()
        self._add_elementwise()
        for numbers in self._graph.alike:
            self._add_operation(numbers[0], len(numbers))
            for other in numbers[1:]:
                self._factors[other] = self._factors[numbers[0]]
        for (number, factor), seconds in restriction.raised:
            if factor in self._factors[number]:
                self._cost[self._factors[number][factor]] += seconds
        self._add_transfers()
        self._add_state_transfers()
        self._add_orders()
        self._add_memory()

    def _variable(self, cost: float = 0.0, *, integer: bool = False) -> int:
        self._cost.append(cost)
        self._integer.append(int(integer))
        return len(self._cost) - 1

    def _row(self, terms: Mapping[int, float], lower: float, upper: float) -> None:
        self._rows.append((dict(terms), lower, upper))

    def _add_labels(self) -> None:
        """Add a variable for each label that may be sharded, and allow one of a value's labels."""
        for label in self._allowed_labels():
            self._labels[label] = self._variable(integer=True)
            if label in self._fixed or label in self._restriction.sharded:
                share = float(self._fixed.get(label, True))
                self._row({self._labels[label]: 1.0}, share, share)
        together = {self._graph.labels_of(k) for k in range(len(self._graph.values))}
        if "fsdp" in self._restriction.mode:
            self._shard_state(together)
        for labels in together:
            present = [self._labels[label] for label in labels if label in self._labels]
            if len(present) > 1:
                self._row(dict.fromkeys(present, 1.0), 0, 1)

    def _allowed_labels(self) -> list[int]:
        graph, n = self._graph, self._model.axis.size
        candidates: dict[int, None] = {}
        refused = {graph.labels.find(label) for label in graph.loops}
        refused |= self._restriction.whole | self._restriction.unsharded
        of_state: set[int] = set()
        for index, value in enumerate(graph.values):
            labels = [graph.label(index, dim) for dim in range(len(value.shape))]
            for label, size in zip(labels, value.shape, strict=True):
                pieces = self._model.label_pieces(label) * n
                padded = label in graph.padded_labels and can_shard(size, pieces)
                fits = padded or size % pieces == 0
                if not fits or labels.count(label) > 1:
                    refused.add(label)
                candidates[label] = None
            if graph.is_state(index):
                of_state.update(labels)
        free = of_state if "fsdp" in self._restriction.mode else set()
        return [
            label
            for label in candidates
            if label not in refused
            and (label in self._fixed or label in free or self._restriction.allows({label}))
        ]

    def _shard_state(self, together: Collection[frozenset[int]]) -> None:
        """Shard each argument of the state over one label, the largest arguments first.

        Args:
            together: Labels of each value, at most one of which is sharded.
        """
        graph, sizes, devices = self._graph, self._graph.labels.sizes, self._model.machine.size
        used: set[int] = set()
        beside: set[int] = set()
        for index in sorted(graph.state, key=lambda k: -graph.values[k].nbytes):
            # A factored moment may have only the label that its parameter isn't sharded over.
            labels = graph.labels_of(index) & self._labels.keys() - beside
            if not graph.is_state(index) or not labels or labels & used:
                continue
            batch = labels & self._restriction.batch
            major: set[int] = set()
            if self._restriction.mode == "major fsdp":
                minor = graph.label(index, len(graph.values[index].shape) - 1)
                major = {k for k in labels if k != minor and sizes[k] % devices == 0}
            chosen = max(batch or major or labels, key=lambda label: (sizes[label], -label))
            if chosen not in self._fixed and not (labels & self._fixed.keys()):
                used.add(chosen)
                beside.update(*(labels - {chosen} for labels in together if chosen in labels))
                self._row({self._labels[chosen]: 1.0}, 1, 1)

    def _add_elementwise(self) -> None:
        graph, model, n = self._graph, self._model, self._model.axis.size
        for value, times in graph.elementwise:
            seconds = model.elementwise_seconds(value) * times
            self._save(value, seconds)
            self._exposed_offset -= HIDDEN_SHARE * seconds
            for label in graph.labels_of(value) & self._labels.keys():
                saved = seconds * (1 - model.label_share(label))
                self._exposed[self._labels[label]] += HIDDEN_SHARE * saved
        for value in graph.arguments:
            # Among equally fast shardings of an argument, that with the least memory, and of these
            # that of the first dimension, so that similar layers are sharded alike.
            price = WHOLE_SHARE * model.local_bytes(value) / model.machine.rates.hbm_bytes
            self._save(value, price)
            # Less than any sharding saves of the price of a whole argument.
            tie = min(_TIE_SECONDS, price / 2 / max(len(graph.values[value].shape), 1))
            for dim, variable in self._stored(value).items():
                self._cost[variable] += dim * tie
        for value, label, times in graph.reductions:
            root = graph.labels.find(label)
            if root in self._labels and n > 1:
                seconds = model.reduce_value(value) * times
                self._cost[self._labels[root]] += seconds
            for other in self._beside:
                if root in model.others.labels[other.axis.name]:
                    self._save(value, other.reduce_value(value) * times)

    def _save(self, value: int, seconds: float) -> None:
        """Add a time that is divided with a value."""
        self.offset += seconds
        for label in self._graph.labels_of(value) & self._labels.keys():
            self._cost[self._labels[label]] -= seconds * (1 - self._model.label_share(label))

    def _add_operation(self, number: int, count: int) -> None:
        graph, model = self._graph, self._model
        op = graph.operations[number]
        times = op.times * count
        seconds = model.work_seconds(number) * times
        choices: dict[int | None, int] = {}
        if op.fixed is not None:
            choices[None] = self._variable(seconds)
        else:
            halo = sum(
                other.halo_seconds(number, k)
                for other in self._beside
                if (k := model.others.factors[other.axis.name].get(number)) is not None
            )
            choices[None] = self._variable(seconds + halo * times, integer=True)
            for k, f in enumerate(op.rule.factors):
                if not model.can_split(number, k):
                    continue
                if not self._restriction.allows(graph.factor_labels(op, f)):
                    continue
                own = model.work_seconds(number, k) + model.halo_seconds(number, k)
                own += halo / (model.axis.size if required(op, k, 0) >= 0 else 1)
                choices[k] = self._variable(own * times, integer=True)
        self._factors[number] = choices
        for k, variable in choices.items():
            self._exposed[variable] -= HIDDEN_SHARE * model.work_seconds(number, k) * times
        self._row(dict.fromkeys(choices.values(), 1.0), 1, 1)

    def _needed(self, number: int, slot: int) -> dict[int, list[int]]:
        """Return the variables of an operation by the state that they need of a slot."""
        op = self._graph.operations[number]
        if op.fixed is not None:
            state = prescribed(op, self._model.axis.name, slot)
            if state is None:
                return {}
            return {state: [self._factors[number][None]]}
        needed: dict[int, list[int]] = defaultdict(list)
        for factor, variable in self._factors[number].items():
            needed[required(op, factor, slot)].append(variable)
        return needed

    def _stored(self, value: int) -> dict[int, int]:
        """Return the variables that shard a value, by dimension."""
        return {
            dim: self._labels[label]
            for dim in range(len(self._graph.values[value].shape))
            if (label := self._graph.label(value, dim)) in self._labels
        }

    def _add_transfers(self) -> None:
        graph = self._graph
        operand_uses: dict[tuple[int, object], list[tuple[int, int]]] = defaultdict(list)
        result_uses: dict[tuple[int, object], list[tuple[int, int]]] = defaultdict(list)
        for number, op in enumerate(graph.operations):
            for slot, value in op.slots:
                group = operand_uses if slot >= 0 else result_uses
                group[graph.transfer_key(op, slot, value)].append((number, slot))
        # Equal layers have equal transfers.
        first = {number: numbers[0] for numbers in graph.alike for number in numbers}
        equal: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
        for (value, _), uses in (*result_uses.items(), *operand_uses.items()):
            equal[tuple(sorted({(first[number], slot) for number, slot in uses}))].append(value)
        for uses, values in equal.items():
            self._transfer(values[0], uses, graph.operations[uses[0][0]].times * len(values))

    def _transfer(self, value: int, uses: Sequence[tuple[int, int]], times: float) -> None:
        """Add the change of a value's sharding, which some operations share."""
        stored = self._stored(value)
        if is_negligible(self._graph, value, uses[0][0]):
            return
        shared: dict[tuple[int, int], int] = {}
        moved: set[tuple[str, int]] = set()
        for number, slot in uses:
            # The first operation that needs a value alike on another axis pays for its transfer.
            states = [
                (each, *self._model.states(each.axis.name, value, number, slot))
                for each in self._beside
            ]
            others = [
                (each, before, after)
                for each, before, after in states
                if before != after and (each.axis.name, after) not in moved
            ]
            moved.update((each.axis.name, after) for each, _, after in others)
            needed = self._needed(number, slot)
            if not needed or (not stored and set(needed) == {WHOLE}):
                if self._graph.is_state(value):
                    self._exposed_offset += times * sum(
                        each.conversion(value, number, slot, before, after)
                        for each, before, after in others
                    )
                continue
            flows = self._flow(
                value, (number, slot), stored, needed, times, shared if uses[1:] else None, others
            )
            staying = [state for state in states if state[1] == state[2]]
            self._note_orders(value, (number, slot), flows, times, [*staying, *others])

    def _note_orders(
        self,
        value: int,
        use: tuple[int, int],
        flows: Mapping[tuple[int, int], int],
        times: float,
        others: Sequence[tuple[CostModel, int, int]],
    ) -> None:
        """Note the permutations of a change, by the place of this axis among those of a label."""
        stored = {state for state, _ in flows}
        for each, before, after in others:
            if before == WHOLE or before not in stored:
                continue
            seconds = times * self._model.order_seconds(value, *use, each.axis)
            key = self._graph.label(value, before), each.axis.name
            as_major, as_minor = self._orders[key]
            if before == after:
                leaving = [flow for (s, t), flow in flows.items() if s == before != t]
                as_major.update(dict.fromkeys(leaving, seconds))
            elif (before, before) in flows:
                as_minor[flows[before, before]] = seconds

    def _flow(
        self,
        value: int,
        use: tuple[int, int],
        stored: Mapping[int, int],
        needed: Mapping[int, list[int]],
        times: float,
        shared: dict[tuple[int, int], int] | None,
        others: Sequence[tuple[CostModel, int, int]],
    ) -> dict[tuple[int, int], int]:
        """Add the change of a value for an operation; return its variables by both states."""
        number, slot = use
        flows: dict[tuple[int, int], int] = {}
        for s in (*stored, WHOLE):
            for t in needed:
                seconds = self._model.conversion(value, number, slot, s, t) * times
                beside = times * sum(
                    each.conversion(value, number, slot, before, after, (self._model.axis, s, t))
                    for each, before, after in others
                )
                if shared is None or not seconds:
                    flows[s, t] = self._transfer_variable(value, seconds + beside)
                    continue
                flows[s, t] = self._transfer_variable(value, beside)
                if (s, t) not in shared:
                    shared[s, t] = self._transfer_variable(value, seconds)
                self._row({shared[s, t]: 1.0, flows[s, t]: -1.0}, 0, np.inf)
        for s, variable in stored.items():
            self._row({flows[s, t]: 1.0 for t in needed} | {variable: -1.0}, 0, 0)
        for t, variables in needed.items():
            terms = {flows[s, t]: 1.0 for s in (*stored, WHOLE)}
            self._row(terms | dict.fromkeys(variables, -1.0), 0, 0)
        return flows | {key: shared[key] for key in flows if shared and key in shared}

    def _transfer_variable(self, value: int, seconds: float) -> int:
        if not self._graph.is_state(value):
            return self._variable(seconds)
        variable = self._variable()
        self._exposed[variable] = seconds
        return variable

    def _add_state_transfers(self) -> None:
        """Add the time of the state's transfers that isn't hidden behind other work."""
        total = self._variable(1.0)
        terms = {variable: -seconds for variable, seconds in self._exposed.items() if seconds}
        self._row(terms | {total: 1.0}, self._exposed_offset, np.inf)

    def _add_orders(self) -> None:
        """Add the permutations of values whose axes have the wrong order.

        A label has one order of two axes. It doesn't matter where all changes want the same. That
        factors and other labels share the order is left to `AxisOrderer`.
        """
        for as_major, as_minor in self._orders.values():
            if not as_major or not as_minor:
                continue
            is_minor = self._variable()
            for flow, seconds in as_major.items():
                permuted = self._variable(seconds)
                self._row({permuted: 1.0, flow: -1.0, is_minor: 1.0}, 0, np.inf)
            for flow, seconds in as_minor.items():
                permuted = self._variable(seconds)
                self._row({permuted: 1.0, flow: -1.0, is_minor: -1.0}, -1, np.inf)

    def _add_memory(self) -> None:
        if not math.isfinite(self._memory):
            return
        excess = self._variable(EXCESS_SECONDS * 1e9)
        for total, saved in self._live:
            terms = {self._labels[k]: -b / 1e9 for k, b in saved.items() if k in self._labels}
            terms[excess] = -1.0
            self._row(terms, -np.inf, (self._memory - total) / 1e9)

    def solve(self, seconds: float) -> AxisSolution:
        """Solve the program.

        Args:
            seconds: Time limit, in seconds.

        Returns:
            Sharded labels, factors of operations, the objective, and the relative gap.
        """
        if not self._cost:
            return frozenset(), {}, self.offset, 0.0
        solution, gap = self._optimize(seconds)
        if solution.x is None:
            return frozenset(), {}, math.inf, math.inf
        labels = frozenset(k for k, variable in self._labels.items() if solution.x[variable] > 0.5)
        factors = {
            number: factor
            for number, choices in self._factors.items()
            for factor, variable in choices.items()
            if factor is not None and solution.x[variable] > 0.5
        }
        return labels, factors, float(solution.fun) / 1e3 + self.offset, gap

    def _optimize(self, seconds: float) -> tuple[Any, float]:
        """Return the solver's result and its relative gap.

        Few choices of the linear relaxation are fractional, so the others are fixed as it has them
        and the small program that is left is solved. The whole program, which takes ten times as
        long, is solved only if that leaves too large a gap to the relaxation.
        """
        integer = np.array(self._integer)
        ones: Any = np.where(integer == 1, 1.0, np.inf)
        solve = partial(milp, np.array(self._cost) * 1e3, constraints=self._build_constraints())
        end = time.monotonic() + seconds

        def run(integrality: Any, lower: Any, upper: Any, gap: float = 0.0) -> Any:
            left = max(end - time.monotonic(), 0.0)
            options = {"time_limit": left, "mip_rel_gap": gap}
            return solve(integrality=integrality, bounds=Bounds(lower, upper), options=options)

        relaxed = run(0 * integer, 0.0, ones)
        if relaxed.x is None:
            return relaxed, math.inf
        whole = np.round(relaxed.x)
        settled = (integer == 1) & (np.abs(relaxed.x - whole) < _INTEGRAL)
        best = run(integer, np.where(settled, whole, 0.0), np.where(settled, whole, ones))
        # A relaxation that the time limit stops is no bound.
        bound = relaxed.fun if relaxed.status == 0 else -math.inf
        total = max(abs(relaxed.fun + self.offset * 1e3), 1e-9)
        if best.x is None or best.fun - bound > _GAP * total:
            every = run(integer, 0.0, ones, _GAP * total / max(abs(relaxed.fun), 1e-9))
            bound = max(bound, -math.inf if every.x is None else every.mip_dual_bound)
            if every.x is not None and (best.x is None or every.fun < best.fun):
                best = every
        return best, math.inf if best.x is None else max(best.fun - bound, 0.0) / total

    def _build_constraints(self) -> LinearConstraint:
        rows, columns, data = [], [], []
        for k, (terms, _, _) in enumerate(self._rows):
            rows += [k] * len(terms)
            columns += terms.keys()
            data += terms.values()
        shape = (len(self._rows), len(self._cost))
        matrix = coo_array((data, (rows, columns)), shape=shape).tocsr()
        lower: Any = np.array([low for _, low, _ in self._rows])
        upper: Any = np.array([high for _, _, high in self._rows])
        return LinearConstraint(matrix, lower, upper)
