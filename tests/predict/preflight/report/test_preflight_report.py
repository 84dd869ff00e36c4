"""A preflight report as JSON, and back."""

import json
from dataclasses import replace

import pytest

from tests.message_patterns import naming
from tests.predict.preflight.examples import ALL, FITTING
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.report.preflight_model import FORMAT
from xlashard.predict.preflight.report.preflight_report import PreflightReport


@pytest.mark.parametrize("name", ALL)
def test_report_round_trips_through_json(name: str) -> None:
    report = ALL[name]
    assert PreflightReport.from_json(report.to_json()) == report
    assert PreflightReport.from_json(report.to_json(indent=None)) == report
    assert report.to_dict() == json.loads(report.to_json())
    assert report.to_dict()["format"] == FORMAT


@pytest.mark.parametrize("name", ALL)
def test_example_reports_are_consistent(name: str) -> None:
    report = ALL[name]
    assert report.fits == report.memory.fits
    assert {v.copies for v in report.inputs} <= set(range(1, report.topology.devices + 1))
    longest = {
        "compute": report.time.compute_seconds,
        "hbm": report.time.hbm_seconds,
        "ici": report.time.ici_seconds,
        "dcn": report.time.dcn_seconds,
    }
    assert max(longest, key=lambda bound: longest[bound]) == report.time.bound


def test_warnings_of_the_compiler_are_shown() -> None:
    report = replace(FITTING, warnings=("a sort lacks <its> scratch size",))
    assert "a sort lacks <its> scratch size" in " ".join(str(report).split())
    assert "a sort lacks &lt;its&gt; scratch size" in report.to_html()
    assert PreflightReport.from_json(report.to_json()) == report


def test_json_with_unknown_or_missing_fields_is_read() -> None:
    found = FITTING.to_dict()
    found["news"] = 1
    found["memory"]["news"] = {}
    del found["memory"]["host_bytes"]
    assert PreflightReport.from_json(json.dumps(found)) == FITTING


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"format": 5}, ("format 5", "format 4")),
        ({"topology": []}, ("topology", "[]", "object")),
        ({"mesh": {}}, ("mesh", "{}", "list")),
        ({"mesh": [{"name": "x", "size": True}]}, ("mesh[0].along", "missing")),
        ({"outcome": "maybe"}, ("outcome", '"maybe"', "fits, out of memory")),
        ({"compile_seconds": "long"}, ("compile_seconds", '"long"', "number")),
        ({"compile_seconds": True}, ("compile_seconds", "true", "number")),
        ({"replicated_above": 1.5}, ("replicated_above", "1.5", "integer")),
        ({"partitioner": None}, ("partitioner", "null", "string")),
    ],
)
def test_invalid_reports_are_located(change: dict[str, object], facts: tuple[str, ...]) -> None:
    text = json.dumps({**FITTING.to_dict(), **change})
    with pytest.raises(ArgumentError, match=naming(*facts)):
        PreflightReport.from_json(text)
