"""A predicted step beside a profile of a real one, and constants of a chip from both."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from xlashard.errors import ArgumentError, counted
from xlashard.hlo.collectives import REDUCTIONS
from xlashard.pjit.report.serde import PrintableReport
from xlashard.pjit.report.tables import Page, head, line_text, operation_text, section, table
from xlashard.preflights.render.report_text import error_text, words_of
from xlashard.preflights.report.preflight_model import PreflightFields, TopologyReport
from xlashard.preflights.report.profile_reader import (
    MeasuredOperation,
    Profile,
    read_profile,
)
from xlashard.preflights.report.step_model import CORES, LineTime, Timeline, TimelineSpan
from xlashard.wording import in_seconds

KERNEL, REDUCTION = "kernel", "reduction"
"""Kinds of operations with rates of their own, beside the units."""

_KINDS = {KERNEL: "kernels", REDUCTION: "reductions over links"}

_LEAST_WAIT = 0.05
"""Least share of a collective's time for which the cores wait, for a duration that is its own."""

_LEAST_SHARE = 1e-6
"""Least share of the step of an operation without a line; a loop's own time is a rounding error."""


@dataclass(frozen=True)
class MeasuredLine:
    """Predicted and measured time of a source line's operations in one execution.

    Attributes:
        line: The prediction.
        seconds: Measured time; None if the profile has none of its operations.
    """

    line: LineTime
    seconds: float | None


@dataclass(frozen=True, repr=False)
class MeasuredStep(PrintableReport):
    """A predicted step beside a measured one.

    Attributes:
        profile: The measurement.
        predicted_seconds: Predicted time of an execution.
        error: Error of the prediction in words.
        lines: Times by source line, the longest prediction first.
        unmatched: Measured operations without a predicted line, with their seconds, longest first.
        topology: Devices of the prediction.
        ratios: Measured by predicted time of single operations, with their measured seconds, by the
            unit that bounds them; those of kernels and of reductions apart.
    """

    profile: Profile
    predicted_seconds: float
    error: str
    lines: tuple[MeasuredLine, ...]
    unmatched: tuple[tuple[str, float], ...]
    topology: TopologyReport
    ratios: dict[str, tuple[tuple[float, float], ...]]

    def slowdowns(self) -> dict[str, float]:
        """Return by unit the median of measured by predicted time, weighted by measured time."""
        return {unit: _median(found) for unit, found in self.ratios.items() if found}

    def _sections(self, page: Page) -> Iterator[RenderableType]:
        ratio = self.profile.seconds / self.predicted_seconds - 1
        measured = f"{in_seconds(self.profile.seconds)}, {ratio:+.1%} of the prediction"
        facts = [
            ("predicted", f"{in_seconds(self.predicted_seconds)} ({self.error})"),
            ("measured", f"{measured}, mean of {counted(self.profile.executions, 'execution')}"),
        ]
        yield head(self.profile.module or "profile", [self.profile.path], facts)
        rows = [_row(each, words_of(self.topology).shares) for each in page.rows(self.lines)]
        columns = (">predicted", ">measured", ">ratio", "what", "bound by", "of")
        left = page.left(len(self.lines) - len(rows))
        yield section("Predicted and measured", "by source line", table(columns, rows), left)
        if self.unmatched:
            others = [(in_seconds(s), name) for name, s in page.rows(self.unmatched)]
            note = "operations of the profile that the predicted program lacks, and short ones"
            left = page.left(len(self.unmatched) - len(others))
            yield section("Others", note, table((">measured", "operation"), others), left)
        units = [
            (
                _KINDS.get(unit) or words_of(self.topology).shares.get(unit, unit),
                f"{ratio:.2f}",
                f"{len(self.ratios[unit]):,}",
            )
            for unit, ratio in self.slowdowns().items()
        ]
        if units:
            note = "measured by predicted time: the median over operations"
            yield section("Units", note, table(("unit", ">ratio", ">operations"), units))


def _row(each: MeasuredLine, shares: Mapping[str, str]) -> tuple[RenderableType, ...]:
    line = each.line
    measured = each.seconds
    place = "" if line.source is None else line_text(line.source)
    return (
        in_seconds(line.seconds),
        "–" if measured is None else in_seconds(measured),
        "" if measured is None else f"{measured / line.seconds:.2f}",
        Text(line.kind, "cyan"),
        shares[line.bound],
        f"{place} {operation_text(line.op_name) if line.op_name else ''}".strip(),
    )


def compare_with_profile(report: PreflightFields, path: str | os.PathLike[str]) -> MeasuredStep:
    """Return a predicted step beside a measured one.

    Operations are matched by the names of their instructions, which equal compilers give alike,
    else by their JAX names.

    Args:
        report: The prediction.
        path: File `*.xplane.pb` of `jax.profiler.trace`, or a folder of profiles, of which the
            newest is read.

    Raises:
        ArgumentError: If there is no profile, it is of another program, or the report has no
            schedule.
    """
    profile = read_profile(path)
    timeline = report.time.timeline
    if timeline is None:
        # no-catalogue: as for a trace
        raise ArgumentError(f"the report of {report.name} has no schedule: make it again")
    lines = report.time.lines
    places = {s.name: s.line for block in timeline.blocks for s in block.spans if s.track == CORES}
    by_op_name: dict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        by_op_name[line.op_name].append(number)
    sums: dict[int, float] = defaultdict(float)
    unmatched: dict[str, float] = {}
    for operation in profile.operations.values():
        place = _place(operation, places, by_op_name)
        if place >= 0:
            sums[place] += operation.seconds
        elif operation.seconds > _LEAST_SHARE * profile.seconds:
            unmatched[operation.name] = operation.seconds
    if not sums:
        raise ArgumentError(  # no-catalogue: needs a profile
            f"{profile.path} has no operation of {report.name}, but those of {profile.module}: "
            "profile the program that the report is of"
        )
    return MeasuredStep(
        profile,
        report.time.seconds,
        error_text(report.time),
        tuple(MeasuredLine(line, sums.get(n)) for n, line in enumerate(lines)),
        tuple(sorted(unmatched.items(), key=lambda item: -item[1])),
        report.topology,
        _ratios(timeline, lines, profile),
    )


def _place(
    operation: MeasuredOperation, places: dict[str, int], by_op_name: dict[str, list[int]]
) -> int:
    by_name = places.get(operation.name, -1)
    candidates = by_op_name.get(operation.op_name, []) if operation.op_name else []
    if by_name in candidates or not candidates:
        return by_name
    return candidates[0]


def _ratios(
    timeline: Timeline, lines: Sequence[LineTime], profile: Profile
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return measured by predicted time of the operations that both have by name."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for block in timeline.blocks:
        waited = {span.name for span in block.spans if span.track == CORES}
        for span in block.spans:
            if span.block >= 0 or not span.seconds:
                continue
            is_network = span.resource in ("ici", "dcn")
            if is_network and span.track != CORES:
                seconds = _duration(span.name, waited, profile)
            elif is_network or span.track != CORES or span.name.startswith("copy-done"):
                continue
            else:
                measured = profile.operations.get(span.name)
                seconds = None if measured is None else measured.seconds / measured.runs
            if seconds is not None and seconds > 0:
                found[_kind(span, lines)].append((seconds / span.seconds, seconds))
    return {unit: tuple(ratios) for unit, ratios in found.items()}


def _kind(span: TimelineSpan, lines: Sequence[LineTime]) -> str:
    """Return the unit that bounds an operation, or its kind if that has rates of its own."""
    kind = lines[span.line].kind if span.line >= 0 else ""
    if kind == "kernel" and span.resource in ("matrix", "vector", "hbm"):
        return KERNEL
    return REDUCTION if kind in REDUCTIONS and span.resource == "ici" else span.resource


def _duration(name: str, waited: set[str], profile: Profile) -> float | None:
    """Return the time of a collective, if the cores wait for its end; else it is unknown."""
    start = profile.operations.get(name)
    if start is None:
        return None
    if name in waited:
        return start.seconds / start.runs
    end = profile.operations.get(name.replace("-start", "-done"))
    if end is None or end is start or len(end.last) != len(start.first):
        return None
    whole = [last - first for first, last in zip(start.first, end.last, strict=True)]
    waits = [last - first for first, last in zip(end.first, end.last, strict=True)]
    own = [w for w, wait in zip(whole, waits, strict=True) if wait > _LEAST_WAIT * w > 0]
    return sum(own) / len(own) if own else None


def _median(ratios: tuple[tuple[float, float], ...]) -> float:
    """Return the weighted median of values."""
    half = sum(weight for _, weight in ratios) / 2
    total = 0.0
    for value, weight in sorted(ratios):
        total += weight
        if total >= half:
            return value
    return 1.0
