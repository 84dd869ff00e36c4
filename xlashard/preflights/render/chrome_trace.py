"""The schedule of a step as a trace in Chrome's JSON format, for Perfetto."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from xlashard.errors import ArgumentError
from xlashard.preflights.render.html.timeline_drawing import lanes_of, track_order
from xlashard.preflights.render.report_text import topology_text, words_of
from xlashard.preflights.report.preflight_model import PreflightFields
from xlashard.preflights.report.step_model import Timeline, TimelineSpan

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
    events = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": _title(report)}},
        *writer.events(),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _title(report: PreflightFields) -> str:
    return f"{report.title or report.name}, predicted: a device of {topology_text(report.topology)}"


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
    """Collects the operations of each track."""

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
        for track in sorted(self.tracks, key=track_order):
            spans = sorted(self.tracks[track], key=lambda span: (span[0], -span[1]))
            # Only loops and the operations inside of them nest.
            is_nested = any(span[3].get("bound") == "loop" for span in spans)
            lanes = [0] * len(spans) if is_nested else list(lanes_of([s[:2] for s in spans]))
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
