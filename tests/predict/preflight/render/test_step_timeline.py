"""Traces of a step for Perfetto."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from tests.predict.preflight.examples import FITTING, SECONDS
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.render import step_timeline
from xlashard.predict.preflight.render.step_timeline import trace_of


def test_trace_has_events_of_every_iteration() -> None:
    events = json.loads(FITTING.to_trace())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["cores", "along tensor", "HBM copies"]
    spans: dict[str, list[dict]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[tracks[event["tid"]]].append(event)
    assert {name: len(found) for name, found in spans.items()} == {
        "cores": 3 + 3 * 32,
        "along tensor": 32,
        "HBM copies": 32,
    }
    last = spans["along tensor"][-1]
    assert last["ts"] + last["dur"] == pytest.approx(SECONDS * 0.95 * 1e6)
    assert last["args"]["source"].endswith("model.py:134")
    assert last["args"]["kind"] == "all-reduce"
    assert_nested(spans["cores"])


def assert_nested(events: list[dict]) -> None:
    """Assert that each event ends within those that are open when it starts, to the nanosecond."""
    open_until: list[int] = []
    for event in events:
        start, end = (round(1e3 * t) for t in (event["ts"], event["ts"] + event["dur"]))
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1]
        open_until.append(end)


def test_long_trace_shows_one_iteration_and_summarizes_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_timeline, "MOST_EVENTS", 50)
    events = [e for e in trace_of(FITTING)["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 3 + 5 + 1
    (rest,) = [e for e in events if e["name"] == "other iterations"]
    assert rest["args"] == {"iterations": 31}


def test_a_report_without_a_schedule_is_refused() -> None:
    with pytest.raises(ArgumentError, match="train_step has no schedule"):
        trace_of(replace(FITTING, time=replace(FITTING.time, timeline=None)))
