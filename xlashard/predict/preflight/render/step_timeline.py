"""The timeline of a step: rows of a drawing over folded time, and a trace in Chrome's format."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from xlashard.analysis.explain.model import CollectiveReport
from xlashard.analysis.report.texts import line_text, operation_text
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.render.report_text import topology_text, words_of
from xlashard.predict.preflight.report.preflight_model import (
    MemoryBreakdown,
    PreflightFields,
    TimeEstimate,
)
from xlashard.predict.preflight.report.step_model import (
    CORES,
    FoldedSpan,
    FoldedTimeline,
    LineTime,
    Timeline,
    TimelineSpan,
)
from xlashard.support.formatting import in_bytes, in_seconds

LANE = 20
"""Pixels of a lane."""

_MOST_LANES = 4
_LEAST_TEXT = 0.2
"""Least percent of the width at which a span has a text, which shows when it is zoomed."""
_WIDTH, _HEIGHT = 1000, 100
_LOOPS = "loops"
"""Start of the names of tracks of loops, by their depth."""

_ROUNDING = 1e-12
"""Seconds by which neighbours may overlap, as sums of times are rounded."""


class DrawnSpan(NamedTuple):
    """Operation in a row.

    Attributes:
        x: Percent of the width.
        width: Percent of the width.
        y: Pixels from the top of the row.
        kind: CSS class.
        text: Text inside; empty for a short one.
        title: Description.
        light_key: Key of the rows of tables that it belongs to.
    """

    x: float
    width: float
    y: int
    kind: str
    text: str
    title: str
    light_key: str = ""


class TimelineRow(NamedTuple):
    """Row of operations that occupy the same.

    Attributes:
        label: Name of the track.
        height: Pixels.
        spans: Its operations, in order.
    """

    label: str
    height: int
    spans: list[DrawnSpan]


class MemoryCurve(NamedTuple):
    """HBM in use over folded time, in a box of 1000 x 100.

    Attributes:
        points: Corners of the area.
        limit: Height of the available HBM; None if it lies far above.
        words: Peak in words.
    """

    points: str
    limit: float | None
    words: str


class DrawnStep(NamedTuple):
    """Step in a drawing.

    Attributes:
        name: Its name among several; empty for the only one.
        rows: Loops by depth, the cores, networks, copies, host.
        curve: The memory; None if it is unknown.
        available: Memory that a program may use.
    """

    name: str
    rows: list[TimelineRow]
    curve: MemoryCurve | None
    available: str


@dataclass(frozen=True)
class TimelineDrawing:
    """Drawing of steps below each other over folded time, each with its memory.

    Attributes:
        steps: The steps.
        ticks: Percents of the width with their times.
        keys: Names of the resources in the drawing, by CSS class.
    """

    steps: list[DrawnStep]
    ticks: list[tuple[float, str]]
    keys: Mapping[str, str]

    template = "timeline.html"


def draw_timelines(reports: Mapping[str, PreflightFields]) -> TimelineDrawing | None:
    """Return the drawing of steps on one scale of time and of memory.

    Args:
        reports: The reports by their names in the drawing.

    Returns:
        The drawing; None if a report has no schedule.
    """
    timelines = [report.time.timeline for report in reports.values()]
    folded = [FoldedTimeline(timeline) for timeline in timelines if timeline is not None]
    if len(folded) < len(timelines):
        return None
    whole = max(each.seconds for each in folded) or 1.0
    light_key = make_light_key(*[report.time for report in reports.values()])
    top = _find_memory_top(reports.values())
    steps, keys = [], {}
    for (name, report), each in zip(reports.items(), folded, strict=True):
        rows = _list_rows(report, each, whole, light_key)
        curve = _draw_memory(each, whole, top, report.memory)
        steps.append(DrawnStep(name, rows, curve, in_bytes(report.memory.available_bytes)))
        used = {span.resource for block in each.timeline.blocks for span in block.spans}
        keys |= {n: words for n, words in words_of(report.topology).shares.items() if n in used}
    ticks = [(20.0 * n, in_seconds(whole * n / 5)) for n in range(5)]
    return TimelineDrawing(steps, ticks, keys) if all(step.rows for step in steps) else None


type _LightKey = Callable[[LineTime | CollectiveReport], str]


def _list_rows(
    report: PreflightFields, folded: FoldedTimeline, whole: float, light_key: _LightKey
) -> list[TimelineRow]:
    """Return the rows: loops by depth, the cores, networks, copies, host."""
    time, shares = report.time, words_of(report.topology).shares
    tracks: dict[str, list[FoldedSpan]] = defaultdict(list)
    for each in sorted(folded.spans(), key=lambda each: each.start):
        is_loop = each.span.block >= 0
        tracks[f"{_LOOPS} {each.depth}" if is_loop else each.span.track].append(each)
    rows = []
    for track in sorted(tracks, key=_track_order):
        lanes = list(_assign_lanes([(e.start, e.start + e.seconds) for e in tracks[track]]))
        spans = [
            DrawnSpan(
                x=100 * each.start / whole,
                width=100 * each.seconds / whole,
                y=LANE * min(lane, _MOST_LANES - 1),
                kind=each.span.resource,
                text=_text(each, time) if 100 * each.seconds / whole >= _LEAST_TEXT else "",
                title=_title(each.span, each.runs, time, shares),
                light_key=light_key(time.lines[each.span.line]) if each.span.line >= 0 else "",
            )
            for each, lane in zip(tracks[track], lanes, strict=True)
        ]
        height = LANE * min(max(lanes) + 1, _MOST_LANES)
        rows.append(TimelineRow(_LOOPS if track.startswith(_LOOPS) else track, height, spans))
    return rows


def make_light_key(*times: TimeEstimate) -> _LightKey:
    """Return a function from lines and collectives to the key of their bars and rows."""
    lines = chain.from_iterable(time.lines for time in times)
    numbers = {(each.kind, each.op_name): str(n) for n, each in enumerate(lines)}

    def light_key(row: LineTime | CollectiveReport) -> str:
        return numbers.get((row.kind, row.op_name), "")

    return light_key


def _track_order(track: str) -> tuple[int, str]:
    """Return the key that sorts tracks: loops, the cores, networks, copies, host."""
    places = {CORES: 1, "HBM copies": 3, "host": 4, "asynchronous": 5}
    return 0 if track.startswith(_LOOPS) else places.get(track, 2), track


def _assign_lanes(intervals: Iterable[tuple[float, float]]) -> Iterator[int]:
    """Yield a lane for each interval, in order of their starts, so that none overlap in a lane.

    Example:
        >>> list(_assign_lanes([(0, 4), (1, 2), (2, 3), (4, 5)]))
        [0, 1, 1, 0]
    """
    ends: list[float] = []
    for start, end in intervals:
        lane = next((n for n, last in enumerate(ends) if last <= start + _ROUNDING), len(ends))
        ends[lane:] = [end, *ends[lane + 1 :]]
        yield lane


def _text(each: FoldedSpan, time: TimeEstimate) -> str:
    span = each.span
    if span.block >= 0:
        return f"× {span.times:,}: {in_seconds(span.seconds)}"
    return operation_text(time.lines[span.line].op_name) if span.line >= 0 else span.name


def _title(span: TimelineSpan, runs: int, time: TimeEstimate, shares: Mapping[str, str]) -> str:
    """Return the description of an operation.

    Args:
        span: The operation.
        runs: Number of its runs in a step.
        time: Time of the step.
        shares: Names of the units.
    """
    if span.block >= 0:
        name = time.timeline.blocks[span.block].name if time.timeline is not None else ""
        return f"{span.name} runs {name} {span.times:,} ×: {in_seconds(span.seconds)}"
    parts = [span.name]
    if span.line >= 0:
        line = time.lines[span.line]
        parts += [line.kind, operation_text(line.op_name)] if line.op_name else [line.kind]
        parts.append(line_text(line.source))
    parts.append(in_seconds(span.seconds) + (f", {runs:,} ×" if runs > 1 else ""))
    parts.append(shares.get(span.resource, span.resource) if span.track == CORES else span.track)
    return " · ".join(part for part in parts if part)


def _find_memory_top(reports: Iterable[PreflightFields]) -> float:
    """Return the bytes at the top of the curves: the peak, and available bytes that lie near."""
    top = 0
    for report in reports:
        points = report.time.timeline.memory if report.time.timeline is not None else ()
        peak = max((nbytes for _, nbytes in points), default=0)
        available = report.memory.available_bytes
        top = max(top, peak, available if available < 2 * peak else 0)
    return top * 1.05


def _draw_memory(
    folded: FoldedTimeline, whole: float, top: float, memory: MemoryBreakdown
) -> MemoryCurve | None:
    """Return the curve of the memory; None if it is unknown.

    Args:
        folded: The step, with its memory.
        whole: Seconds of the drawing.
        top: Bytes at the top of the curve.
        memory: Memory of the device.
    """
    points, end = folded.timeline.memory, folded.seconds
    if not points:
        return None
    place, peak = max(points, key=lambda point: point[1])
    least = min(nbytes for _, nbytes in points)

    def corner(seconds: float, nbytes: float) -> str:
        x, y = _WIDTH * seconds / whole, _HEIGHT * (1 - nbytes / top)
        return f"{x:.2f},{y:.2f}"

    corners = [corner(0.0, 0), corner(0.0, points[0][1])]
    corners += [corner(seconds, nbytes) for seconds, nbytes in points]
    corners += [corner(end, points[-1][1]), corner(end, 0)]
    limit = _HEIGHT * (1 - memory.available_bytes / top)
    words = f"between {in_bytes(least)} and {in_bytes(peak)}, at its most after {in_seconds(place)}"
    return MemoryCurve(" ".join(corners), limit if limit >= 0 else None, words)


MOST_EVENTS = 300_000
"""Most operations of a trace; beyond, only the first iteration of loops is written."""


def trace_of(report: PreflightFields) -> dict[str, Any]:
    """Return a step as trace events, with a track per resource.

    Each iteration of a loop has its own events, unless they are more than `MOST_EVENTS`: then the
    rest of each loop after its first iteration is one event.

    Args:
        report: The report.

    Raises:
        ArgumentError: If the report has no schedule.

    Returns:
        Object of the JSON Trace Event Format; `json.dumps` makes a file that ui.perfetto.dev and
        chrome://tracing open.
    """
    timeline = report.time.timeline
    if timeline is None:
        raise ArgumentError(
            f"the report of {report.name} has no schedule: make it again with this version"
        )
    writer = _Writer(report, timeline, repeats=_count(timeline) <= MOST_EVENTS)
    writer.block(0, 0.0, timeline.blocks[0].seconds)
    title = f"{report.heading}, predicted: a device of {topology_text(report.topology)}"
    events = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": title}},
        *writer.events(),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _count(timeline: Timeline) -> int:
    """Return the number of events with every iteration."""
    counts: dict[int, int] = {}

    def count(number: int) -> int:
        if number not in counts:
            spans = timeline.blocks[number].spans
            inner = sum(s.times * count(s.block) for s in spans if s.block >= 0)
            counts[number] = len(spans) + inner
        return counts[number]

    return count(0)


@dataclass
class _Writer:
    """Operations of a trace, by track."""

    report: PreflightFields
    timeline: Timeline
    repeats: bool
    tracks: dict[str, list[tuple[int, int, str, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def block(self, number: int, begin: float, limit: float) -> None:
        """Add a run of a computation, which ends at a limit."""
        for span in self.timeline.blocks[number].spans:
            start = min(begin + span.start, limit)
            end = min(start + span.seconds, limit)
            self._add(span.track, start, end, _name(span, self.timeline), self._facts(span))
            if span.block < 0:
                continue
            length = self.timeline.blocks[span.block].seconds
            for iteration in range(span.times if self.repeats else 1):
                self.block(span.block, start + iteration * length, end)
            if not self.repeats and span.times > 1:
                rest = {"iterations": span.times - 1}
                self._add(span.track, start + length, end, "other iterations", rest)

    def _add(self, track: str, start: float, end: float, name: str, facts: dict[str, Any]) -> None:
        # Whole nanoseconds, so that events nest.
        self.tracks[track].append((round(start * 1e9), round(end * 1e9), name, facts))

    def _facts(self, span: TimelineSpan) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "bound": words_of(self.report.topology).shares.get(span.resource, span.resource)
        }
        if span.line >= 0:
            line = self.report.time.lines[span.line]
            facts |= {"kind": line.kind, "op_name": line.op_name}
            if line.source is not None:
                facts["source"] = f"{line.source.file}:{line.source.line}"
        return facts

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Yield the names of the tracks, and their events."""
        tid = 0
        for track in sorted(self.tracks, key=_track_order):
            spans = sorted(self.tracks[track], key=lambda span: (span[0], -span[1]))
            # Only loops and the operations inside of them nest.
            is_nested = any(span[3].get("bound") == "loop" for span in spans)
            lanes = [0] * len(spans) if is_nested else list(_assign_lanes([s[:2] for s in spans]))
            names = [track, *(f"{track} {n}" for n in range(2, max(lanes) + 2))]
            for number, name in enumerate(names, tid + 1):
                common = {"ph": "M", "pid": 0, "tid": number}
                yield {**common, "name": "thread_name", "args": {"name": name}}
                yield {**common, "name": "thread_sort_index", "args": {"sort_index": number}}
            for (start, end, name, facts), lane in zip(spans, lanes, strict=True):
                yield {
                    "ph": "X",
                    "pid": 0,
                    "tid": tid + 1 + lane,
                    "ts": start / 1e3,
                    "dur": (end - start) / 1e3,
                    "name": name,
                    "args": facts,
                }
            tid += len(names)


def _name(span: TimelineSpan, timeline: Timeline) -> str:
    if span.block < 0:
        return span.name
    return f"{span.name}: {timeline.blocks[span.block].name} × {span.times:,}"
