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
from xlashard.predict.costs.kernel_costs import KernelCost
from xlashard.predict.costs.rates import Rates
from xlashard.predict.preflight.compilation import COMPILER_ERRORS, Estimate, compile_estimates
from xlashard.predict.preflight.memory_breakdown import describe_memory
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
        lower: Lowers a program for the topology.
        kernel_costs: Costs of kernels by name.
        rates: Measured rates of the chip; None for the published ones.
    """

    report: PreflightReport
    compilation: Compilation
    mesh: Mesh
    topology: BaseTopology
    lower: Callable[[Program], LoweredModule]
    kernel_costs: Mapping[str, KernelCost] | None = None
    rates: Rates | None = None

    def run(self) -> PreflightReport:
        """Return the report with the price of its suggestions, and without those of no help."""
        report = self.report
        # A worker compiles one program of a sweep, and starts no workers itself.
        program = self.compilation.program
        if not report.advice or program.jaxpr is None or program.mesh is None or is_worker():
            return report
        deadline = monotonic() + max(_LEAST_SECONDS, _TIMES * self.compilation.seconds)
        tried = self._try(report.advice[:_MOST], deadline)
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
                    lowered = self.lower(self._apply(each.changes))
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

    def _apply(self, changes: Iterable[Suggestion]) -> Program:
        """Return the program with the shardings of some suggestions."""
        program = self.compilation.program
        assert program.mesh is not None
        into = dict(find_fed_back(program))
        ins: list[Any] = [None] * len(program.arguments)
        outs: list[Any] = [None] * len(program.results)
        constraints = {}
        for each in changes:
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
        memory = describe_memory(compilation, topology)
        schedule = schedule_step(compilation, topology, self.mesh, self.kernel_costs, self.rates)
        time = estimate_time(
            compilation, topology, self.mesh, self.kernel_costs, schedule, self.rates
        )
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


def _rank(advice: AdviceReport) -> tuple[bool, bool, float]:
    return advice.seconds is None, advice.outcome not in _ADVICE, advice.seconds or 0.0


def _find_compatible(tried: Sequence[AdviceReport]) -> list[AdviceReport]:
    """Return suggestions that may be followed, at most one for each argument or constraint."""
    chosen: dict[object, AdviceReport] = {}
    for each in sorted(tried, key=_rank):
        if each.outcome in _ADVICE:
            (change,) = each.changes
            chosen.setdefault((change.path, change.line, change.shape, change.before), each)
    return list(chosen.values())


def _join(advice: Sequence[AdviceReport]) -> AdviceReport:
    return AdviceReport(
        "; ".join(each.text for each in advice),
        tuple(change for each in advice for change in each.changes),
        sum(each.removable_seconds for each in advice),
    )
