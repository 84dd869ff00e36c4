"""Trials of suggestions, for the topology, before a report or that of a script gives advice.

One of them is another order in which mesh axes take the links of the topology.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np

from xlashard._jax.trace.constraint_changes import ConstraintChanges
from xlashard.analysis.explain.model import CollectiveReport
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
from xlashard.predict.preflight.report.preflight_model import (
    AdviceOutcome,
    AdviceReport,
    Suggestion,
)
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.time_estimate import estimate_time, schedule_step
from xlashard.predict.targets.base_topology import AxisLinks, BaseTopology, axis_links
from xlashard.workers.job_pool import is_worker

_MOST_AXES = 5
"""Axes of more than one device up to which every order is compared: 120 orders."""
_LEAST_SHARE = 0.01
"""Share of a step that an order has to save on the links to be tried."""


def lay_out(topology: BaseTopology, mesh: Mesh, order: Sequence[str]) -> Mesh:
    """Return a mesh of the same axes that take the links of a topology in another order.

    Args:
        topology: Topology of the devices.
        mesh: The mesh.
        order: Axis names, the axis with the most communication first.
    """
    devices = topology.mesh(dict(mesh.shape), order=order).devices
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def find_order(
    topology: BaseTopology,
    mesh: Mesh,
    traffic: Sequence[CollectiveReport],
    step_seconds: float,
) -> tuple[Suggestion, float] | None:
    """Return the order by which the links carry the traffic fastest, and the time that it saves.

    The times are those of the bytes at link bandwidth; what a step gains is known once the program
    is compiled for that order.

    Args:
        topology: Topology of the devices.
        mesh: Mesh of the program on it.
        traffic: Collectives of the program, or of several.
        step_seconds: Time of the program.

    Returns:
        The suggestion; None if no order saves enough to be tried.
    """
    names = [name for name, size in mesh.shape.items() if size > 1]
    sent = _sum_bytes(traffic)
    if not sent or not 2 <= len(names) <= _MOST_AXES:
        return None
    now = _seconds(topology, mesh, sent)
    rest = [name for name in mesh.axis_names if name not in names]
    seconds = {
        order: _seconds(topology, lay_out(topology, mesh, (*order, *rest)), sent)
        for order in itertools.permutations(names)
    }
    best = min(seconds, key=lambda order: seconds[order])
    saved = now - seconds[best]
    after = lay_out(topology, mesh, (*best, *rest))
    if saved < _LEAST_SHARE * step_seconds or np.array_equal(after.devices, mesh.devices):
        return None
    reason = "; ".join(_describe_gains(topology, mesh, after, sent))
    return Suggestion("", None, (), (), (), order=(*best, *rest), reason=reason), saved


def _sum_bytes(traffic: Sequence[CollectiveReport]) -> dict[tuple[str, ...], int]:
    """Return the bytes that a device sends, by the axes of their groups."""
    sent: dict[tuple[str, ...], int] = {}
    for row in traffic:
        if row.axes:
            sent[row.axes] = sent.get(row.axes, 0) + row.sent_bytes
    return {axes: nbytes for axes, nbytes in sent.items() if nbytes}


def _seconds(topology: BaseTopology, mesh: Mesh, sent: dict[tuple[str, ...], int]) -> float:
    rates = {axes: axis_links(topology, mesh, axes).bytes_per_second for axes in sent}
    return math.fsum(n / rates[axes] if rates[axes] else math.inf for axes, n in sent.items())


def _describe_gains(
    topology: BaseTopology, before: Mesh, after: Mesh, sent: dict[tuple[str, ...], int]
) -> Iterator[str]:
    """Yield the links of the axes whose rate changes, those with the most traffic first."""
    for axes in sorted(sent, key=lambda axes: -sent[axes]):
        old, new = (axis_links(topology, mesh, axes) for mesh in (before, after))
        if not math.isclose(old.bytes_per_second, new.bytes_per_second):
            yield f"{', '.join(axes)} from {_links_text(old)} to {_links_text(new)}"


def _links_text(links: AxisLinks) -> str:
    return f"{links.bytes_per_second / 1e9:,.0f} GB/s of {links.network.upper()}"


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
        # A worker compiles one program of a sweep, and starts no workers itself.
        if not self.can_lower or is_worker():
            return self.report
        _, together = _try_together([self], [1])
        return self.keep(together)

    def keep(self, tried: Iterable[AdviceReport]) -> PreflightReport:
        """Return the report with tried suggestions in place of those that were not."""
        ranked = sorted(tried, key=_rank)
        texts = {each.text for each in ranked}
        useless = {each.text for each in ranked if each.outcome not in (*_ADVICE, "not tried")}
        traffic = [
            replace(row, suggestion="") if row.suggestion in useless else row
            for row in self.report.traffic
        ]
        others = [each for each in self.report.advice if each.text not in texts]
        return replace(self.report, traffic=tuple(traffic), advice=(*ranked, *others))

    def compile_each(
        self, advice: Sequence[AdviceReport], deadline: float
    ) -> Sequence[AdviceReport]:
        """Compile the program under each of some suggestions; without a result they stay as is."""
        if not advice:
            return ()
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
        below = before.time.seconds * before.time.below
        return replace(priced, outcome=_judge(priced.seconds or 0.0, below, fits, before.fits))


def _judge(seconds: float, below: float, fits: bool, fitted: bool) -> AdviceOutcome:
    """Return the outcome of a trial.

    Args:
        seconds: Change of the time.
        below: Lower end of the error bar of the time before.
        fits: Whether the programs fit with the change.
        fitted: Whether they did before.
    """
    if not fits:
        return "out of memory"
    if not fitted or seconds < below:
        return "helps"
    return "within the error" if seconds < 0 else "no help"


def try_script(
    trials: Sequence[AdviceTrials], calls: Sequence[int]
) -> tuple[Sequence[PreflightReport], Sequence[AdviceReport]]:
    """Try the suggestions for the programs of a script, and one order of their mesh.

    A suggestion is tried in all programs that have it, such as one for a line that they share.

    Args:
        trials: The trials of each program.
        calls: Number of calls of each program.

    Returns:
        The reports, with the change of a call; and the suggestions, with the change of all calls
        together and the largest one of a device's memory. Of a single program its report has all.
    """
    if len(trials) == 1:
        return [trials[0].run()], ()
    alone, together = _try_together(trials, calls)
    # An order is of the whole script.
    reports = [
        trial.keep(each for each in {*own.values()} if not any(c.order for c in each.changes))
        for trial, own in zip(trials, alone, strict=True)
    ]
    return reports, together


def _try_together(
    trials: Sequence[AdviceTrials], calls: Sequence[int]
) -> tuple[Sequence[Mapping[str, AdviceReport]], Sequence[AdviceReport]]:
    """Return suggestions by text as tried for each program, and as tried for all, the best first.

    Those of the longest collectives are tried alone, then those together that help; the others
    follow as they are.
    """
    offers = [
        {each.text: each for each in trial.report.advice} if trial.can_lower else {}
        for trial in trials
    ]
    texts = dict.fromkeys(text for offer in offers for text in offer)
    untried = {text: _sum_up(text, offers, trials, calls) for text in texts}
    ranked = sorted(untried, key=lambda text: -untried[text].removable_seconds)
    chosen = ranked[:_MOST]
    if (order := _find_script_order(trials, calls)) is not None:
        advice, alike = order
        chosen.insert(0, advice.text)
        for position in alike:
            offers[position][advice.text] = advice
    compiled = sum(trial.compilation.seconds for trial in trials)
    deadline = monotonic() + max(_LEAST_SECONDS, _TIMES * compiled)
    alone: list[dict[str, AdviceReport]] = []
    for trial, offer in zip(trials, offers, strict=True):
        own = [offer[text] for text in chosen if text in offer]
        alone.append({each.text: each for each in trial.compile_each(own, deadline)})
    together = {text: _sum_up(text, alone, trials, calls) for text in chosen}
    # The links promise an order that the schedule may not need.
    together = {
        text: each
        for text, each in together.items()
        if not each.changes[0].order or each.outcome in _ADVICE
    }
    helpful = _find_compatible(together)
    if len(helpful) > 1:
        joined = "; ".join(helpful)
        for trial, tried in zip(trials, alone, strict=True):
            own = [tried[text] for text in helpful if text in tried]
            if own:  # A single one is tried already.
                several = trial.compile_each([_join(own)], deadline) if len(own) > 1 else own
                tried[joined] = several[0]
        together[joined] = _sum_up(joined, alone, trials, calls)
    others = [untried[text] for text in ranked[_MOST:]]
    return alone, [*sorted(together.values(), key=_rank), *others]


def _sum_up(
    text: str,
    trial_results: Sequence[Mapping[str, AdviceReport]],
    trials: Sequence[AdviceTrials],
    calls: Sequence[int],
) -> AdviceReport:
    """Return what a suggestion changes in all calls of the programs that have it."""
    parts = [
        (own[text], trial.report, count)
        for own, trial, count in zip(trial_results, trials, calls, strict=True)
        if text in own
    ]
    changes = dict.fromkeys(change for each, _, _ in parts for change in each.changes)
    removable = sum(each.removable_seconds * count for each, _, count in parts)
    shown = f"{text}; {counted(len(parts), 'program')}" if len(trials) > 1 else text
    summed = AdviceReport(shown, tuple(changes), removable)
    if any(each.seconds is None for each, _, _ in parts):
        return summed
    seconds = sum((each.seconds or 0.0) * count for each, _, count in parts)
    below = sum(report.time.seconds * report.time.below * count for _, report, count in parts)
    fits = all(each.outcome != "out of memory" for each, _, _ in parts)
    outcome = _judge(seconds, below, fits, all(report.fits for _, report, _ in parts))
    memory = max(each.memory_bytes or 0 for each, _, _ in parts)
    return replace(summed, outcome=outcome, seconds=seconds, memory_bytes=memory)


def _find_script_order(
    trials: Sequence[AdviceTrials], calls: Sequence[int]
) -> tuple[AdviceReport, Sequence[int]] | None:
    """Return an order of the mesh to try, and the positions of the programs of that mesh.

    Programs of another mesh than the longest are left out.
    """
    lowered = [n for n, trial in enumerate(trials) if trial.can_lower]
    if not lowered:
        return None
    times = [trial.report.time.seconds * n for trial, n in zip(trials, calls, strict=True)]
    longest = trials[max(lowered, key=lambda n: times[n])]
    alike = [n for n in lowered if trials[n].mesh == longest.mesh]
    traffic = [
        replace(row, sent_bytes=row.sent_bytes * calls[n])
        for n in alike
        for row in trials[n].report.traffic
    ]
    order = find_order(longest.topology, longest.mesh, traffic, sum(times[n] for n in alike))
    return None if order is None else (AdviceReport(order[0].text, order[:1], order[1]), alike)


def _rank(advice: AdviceReport) -> tuple[bool, bool, float]:
    return advice.seconds is None, advice.outcome not in _ADVICE, advice.seconds or 0.0


def _find_compatible(tried: Mapping[str, AdviceReport]) -> list[str]:
    """Return suggestions that may be followed, at most one for each argument or constraint."""
    chosen: dict[object, str] = {}
    for text in sorted(tried, key=lambda text: _rank(tried[text])):
        if tried[text].outcome in _ADVICE:
            change = tried[text].changes[0]
            place = change.path, change.line, change.shape, change.before, bool(change.order)
            chosen.setdefault(place, text)
    return list(chosen.values())


def _join(advice: Sequence[AdviceReport]) -> AdviceReport:
    return AdviceReport(
        "; ".join(each.text for each in advice),
        tuple(change for each in advice for change in each.changes),
        sum(each.removable_seconds for each in advice),
    )
