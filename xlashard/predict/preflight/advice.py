"""Trials of suggestions: each is compiled for the topology before a report gives it as advice."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from xlashard._jax.trace.constraint_changes import ConstraintChanges
from xlashard.analysis.programs.program import (
    Compilation,
    LoweredModule,
    Program,
    find_fed_back,
)
from xlashard.core.program.remote_compile import borrow_pool
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec
from xlashard.errors import counted
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.rates import Rates
from xlashard.predict.preflight.compilation import COMPILER_ERRORS, Estimate, compile_estimates
from xlashard.predict.preflight.memory_breakdown import describe_memory
from xlashard.predict.preflight.mesh_order import find_order, lay_out
from xlashard.predict.preflight.report.preflight_model import AdviceReport, Suggestion
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.time_estimate import estimate_time, schedule_step
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.workers.job_pool import is_worker

_MOST = 3
"""Suggestions that are tried alone, those of the longest collectives; one set of them follows."""
_TIMES = 2.0
"""Time in which trials may begin, over the time to compile the program. They make no code."""
_LEAST_SECONDS = 60.0
"""The same for a program that compiles fast, or whose compilation was cached."""
_ADVICE = ("helps", "within the error")


@dataclass(frozen=True, eq=False)
class AdviceTrials:
    """Trials of the suggestions of a report.

    Attributes:
        report: The report, whose suggestions are not tried yet.
        compilation: The compiled program.
        mesh: Its mesh on the topology.
        topology: The topology.
        lower: Lowers a program for a mesh on the topology.
        kernel_costs: Costs of kernels by name.
        rates: Measured rates of the chip; None for the published ones.
    """

    report: PreflightReport
    compilation: Compilation
    mesh: Mesh
    topology: BaseTopology
    lower: Callable[[Program, Mesh], LoweredModule]
    kernel_costs: Mapping[str, KernelCost] | None = None
    rates: Rates | None = None

    @property
    def can_lower(self) -> bool:
        """Return True if the program keeps its trace and mesh."""
        program = self.compilation.program
        return program.jaxpr is not None and program.mesh is not None

    def run(self) -> PreflightReport:
        """Return the report with the price of its suggestions, and without those of no help."""
        report = self.report
        # A worker compiles one program of a sweep, and starts no workers itself.
        if not self.can_lower or is_worker():
            return report
        order = find_order(self.topology, self.mesh, report.traffic, report.time.seconds)
        if order is None and not report.advice:
            return report
        orders = [] if order is None else [AdviceReport(order[0].text, order[:1], order[1])]
        deadline = monotonic() + max(_LEAST_SECONDS, _TIMES * self.compilation.seconds)
        tried = self._try([*orders, *report.advice[:_MOST]], deadline)
        # The links promise an order that the schedule may not need.
        tried = [each for each in tried if not each.changes[0].order or each.outcome in _ADVICE]
        good = _find_compatible(tried)
        if len(good) > 1:
            tried += self._try([_join(good)], deadline)
        useless = {each.text for each in tried if each.outcome not in (*_ADVICE, "not tried")}
        traffic = [
            replace(row, suggestion="") if row.suggestion in useless else row
            for row in report.traffic
        ]
        advice = (*sorted(tried, key=_rank), *report.advice[_MOST:])
        return replace(report, traffic=tuple(traffic), advice=advice)

    def _try(self, advice: Sequence[AdviceReport], deadline: float) -> list[AdviceReport]:
        """Compile the program under each of some suggestions; without a result they stay as is."""
        results = list(advice)
        started: dict[Estimate, int] = {}

        def start() -> Iterator[Estimate]:
            for position, each in enumerate(advice):
                if monotonic() > deadline:
                    return
                with suppress(*COMPILER_ERRORS):
                    lowered = self.lower(self._apply(each.changes), self._lay_out(each))
                    estimate = Estimate.saved(lowered, dict(self.compilation.options))
                    started[estimate] = position
                    yield estimate

        # Its process is there, since it has compiled the program.
        with borrow_pool() as pool:
            for estimate, compilation in compile_estimates(start(), pool):
                if isinstance(compilation, Compilation):
                    position = started[estimate]
                    results[position] = self._price(advice[position], compilation)
        return results

    def try_order(self, order: Suggestion) -> AdviceReport | None:
        """Return what an order of the mesh changes; None if the program can't be compiled."""
        deadline = monotonic() + max(_LEAST_SECONDS, _TIMES * self.compilation.seconds)
        (tried,) = self._try([AdviceReport(order.text, (order,), 0.0)], deadline)
        return None if tried.seconds is None else tried

    def _lay_out(self, advice: AdviceReport) -> Mesh:
        """Return the mesh under some suggestions."""
        order = next((each.order for each in advice.changes if each.order), ())
        return lay_out(self.topology, self.mesh, order) if order else self.mesh

    def _apply(self, changes: Iterable[Suggestion]) -> Program:
        """Return the program with the shardings of some suggestions."""
        program = self.compilation.program
        assert program.mesh is not None
        into = dict(find_fed_back(program))
        ins: list[Any] = [None] * len(program.arguments)
        outs: list[Any] = [None] * len(program.results)
        constraints = {}
        for each in changes:
            if each.order:
                continue
            if each.line is not None:
                constraints[each.line, each.shape, each.before] = each.after
                continue
            sharding = NamedSharding(program.mesh, PartitionSpec(*[a or None for a in each.after]))
            position = [value.path for value in program.arguments].index(each.path)
            ins[position] = sharding
            if each.returned:
                outs[into[position]] = sharding
        return program.with_layout(ConstraintChanges(constraints).jaxpr(program.jaxpr), ins, outs)

    def _price(self, advice: AdviceReport, compilation: Compilation) -> AdviceReport:
        """Return a suggestion with what it changes."""
        before, topology = self.report, self.topology
        memory, mesh = describe_memory(compilation, topology), self._lay_out(advice)
        schedule = schedule_step(compilation, topology, mesh, self.kernel_costs, self.rates)
        time = estimate_time(compilation, topology, mesh, self.kernel_costs, schedule, self.rates)
        # A trial has no code.
        code = before.memory.code_bytes
        priced = replace(
            advice,
            seconds=time.seconds - before.time.seconds,
            memory_bytes=memory.total_bytes + code - before.memory.total_bytes,
        )
        fits = not compilation.too_large and memory.total_bytes + code <= memory.available_bytes
        if not fits:
            return replace(priced, outcome="out of memory")
        if not before.fits or time.seconds < before.time.seconds * (1 + before.time.below):
            return replace(priced, outcome="helps")
        is_faster = time.seconds < before.time.seconds
        return replace(priced, outcome="within the error" if is_faster else "no help")


def try_script_order(
    trials: Sequence[AdviceTrials], calls: Sequence[int]
) -> tuple[AdviceReport, ...]:
    """Return the order of the mesh that saves most over the programs of a script, if one does.

    Args:
        trials: The trials of each program. Programs of another mesh than the longest are left out.
        calls: Number of calls of each program.

    Returns:
        What the order changes in all calls together, and the largest change of a device's memory;
        empty without such an order.
    """
    counted_trials = [pair for pair in zip(trials, calls, strict=True) if pair[0].can_lower]
    if not counted_trials:
        return ()
    longest, _ = max(counted_trials, key=lambda pair: pair[0].report.time.seconds * pair[1])
    alike = [pair for pair in counted_trials if pair[0].mesh == longest.mesh]
    traffic = [
        replace(row, sent_bytes=row.sent_bytes * count)
        for each, count in alike
        for row in each.report.traffic
    ]
    before = sum(each.report.time.seconds * count for each, count in alike)
    better = find_order(longest.topology, longest.mesh, traffic, before)
    if better is None:
        return ()
    tried = [(each.try_order(better[0]), count) for each, count in alike]
    changes = [(one.seconds or 0.0) * count for one, count in tried if one is not None]
    seconds = sum(changes)
    if len(changes) < len(tried) or seconds >= 0:
        return ()
    below = sum(each.report.time.seconds * each.report.time.below * n for each, n in alike)
    outcomes = [one.outcome for one, _ in tried if one is not None]
    memory = max(one.memory_bytes or 0 for one, _ in tried if one is not None)
    text = f"{better[0].text}; {counted(len(alike), 'program')}"
    summed = AdviceReport(text, better[:1], better[1], "helps", seconds, memory)
    if "out of memory" in outcomes:
        return (replace(summed, outcome="out of memory"),)
    return (summed if seconds < below else replace(summed, outcome="within the error"),)


def _rank(advice: AdviceReport) -> tuple[bool, bool, float]:
    return advice.seconds is None, advice.outcome not in _ADVICE, advice.seconds or 0.0


def _find_compatible(tried: Sequence[AdviceReport]) -> list[AdviceReport]:
    """Return suggestions that may be followed, at most one for each argument or constraint."""
    chosen: dict[object, AdviceReport] = {}
    for each in sorted(tried, key=_rank):
        if each.outcome in _ADVICE:
            (change,) = each.changes
            place = change.path, change.line, change.shape, change.before, bool(change.order)
            chosen.setdefault(place, each)
    return list(chosen.values())


def _join(advice: Sequence[AdviceReport]) -> AdviceReport:
    return AdviceReport(
        "; ".join(each.text for each in advice),
        tuple(change for each in advice for change in each.changes),
        sum(each.removable_seconds for each in advice),
    )
