"""Results of a sweep: ranked, stored, printed, and read again."""

import json
import re
from dataclasses import replace

import pytest

from tests.predict.preflight.examples import FITTING, SMALL
from xlashard.errors import ArgumentError
from xlashard.predict.sweep.sweep_report import SweepReport
from xlashard.predict.sweep.sweep_results import (
    ChipPrice,
    ResultStore,
    SkippedTopology,
    SweepFacts,
    SweepResult,
    ranked,
)

FACTS = SweepFacts.of(FITTING)


def result(key, outcome="fits", seconds=None, **other):
    facts = None if seconds is None else replace(FACTS, seconds=seconds)
    mesh = (("data", 8), ("tensor", 2), ("expert", 1))
    return SweepResult(key, "v5e:4x4", 1, mesh, outcome, facts=facts, **other)


FOUND = (
    result("lost", "failed", reason="its process ended with SIGKILL"),
    result("slow", seconds=0.5),
    result("never", "impossible", reason="8 heads don't divide\ninto 16"),
    result("large", "out of memory", reason="its arguments alone take 99.0 GiB"),
    replace(
        result("larger", "out of memory", seconds=0.1), facts=replace(FACTS, total_bytes=10**13)
    ),
    result("fast", seconds=0.1),
)


def test_fitting_results_rank_first_by_step_time():
    report = SweepReport("steps:make", "sweeps", ranked(FOUND))
    keys = [r.key for r in report.results]
    assert keys == ["fast", "slow", "larger", "large", "never", "lost"]
    assert report.best is report.results[0]
    assert SweepReport("steps:make", "sweeps", ranked(FOUND[:1])).best is None


def test_sweep_facts_equal_values_of_the_report():
    assert FACTS.seconds == FITTING.time.seconds and FACTS.bound == FITTING.time.bound
    assert FACTS.total_bytes == FITTING.memory.total_bytes
    assert FACTS.tokens_per_second == FITTING.throughput.tokens_per_second
    assert SweepFacts.of(SMALL).tokens_per_second is None


def test_sweep_report_shows_ranking_and_reasons_of_rejection():
    prices = (ChipPrice("v5e", 1.2, "USD"), ChipPrice("", 9.0))
    report = SweepReport("steps:make", "sweeps", ranked(FOUND), 2, prices)
    text = str(report)
    for part in (
        *("steps:make", "data=8 tensor=2 on v5e:4x4, 100.0 ms", "2 fit, 2 out of memory"),
        *("2 results from an earlier run", "Fastest first", "tokens/s", "MFU", "a step", "USD"),
        *("10⁶ tokens", "cheapest  data=8 tensor=2 on v5e:4x4"),
        *("Out of memory", "its arguments alone", "Impossible", "8 heads don't divide into 16"),
        *("Failed", "SIGKILL"),
    ):
        assert part in text, part
    assert "price" not in str(replace(report, prices=()))
    assert "tokens/s" not in str(
        replace(report, results=(replace(result("a"), facts=SweepFacts.of(SMALL)),))
    )
    assert repr(report) == "<SweepReport of steps:make: 2 of 6 fit; print it>"


def test_page_of_a_sweep_has_its_title_once():
    page = SweepReport("steps:make", "sweeps", ranked(FOUND)).to_html()
    headings = [re.sub("<[^>]+>", "", text) for text in re.findall(r"<h[12].*?</h[12]>", page)]
    assert headings[:2] == ["steps:make", "2 of 6 meshes fit"]


def test_long_sweep_report_shows_the_first_results():
    many = tuple(result(str(i), seconds=1.0 + i) for i in range(40))
    report = SweepReport("steps:make", "sweeps", many)
    assert "and 28 more that fit: report.print(all=True)" in str(report)


def test_a_topology_without_a_mesh_is_shown_with_the_reason():
    left_out = SkippedTopology("v5e:2x2", 2, "no mesh of data=3 has 8 devices")
    text = str(SweepReport("steps:make", "sweeps", ranked(FOUND), skipped_topologies=(left_out,)))
    assert re.search(r"Without a mesh\n.*\n +2 × v5e:2x2 +no mesh of data=3 has 8 devices", text)
    assert "Without a mesh" not in str(SweepReport("steps:make", "sweeps", ranked(FOUND)))


def test_sweep_report_round_trips_through_json():
    prices = (ChipPrice("v5e", 1.2, "USD"),)
    left_out = (SkippedTopology("v5e:2x2", 1, "no mesh of data=3 has 4 devices"),)
    report = SweepReport("steps:make", "sweeps", ranked(FOUND), 2, prices, left_out)
    assert SweepReport.from_json(report.to_json()) == report
    older = {k: v for k, v in report.to_dict().items() if k != "skipped_topologies"}
    assert SweepReport.from_json(json.dumps(older)) == replace(report, skipped_topologies=())
    assert json.loads(report.to_json(indent=None))["results"][0]["outcome"] == "fits"
    with pytest.raises(ArgumentError, match="sweep report"):
        SweepReport.from_json("[]")


def test_price_applies_to_its_chip_generation():
    report = SweepReport("steps:make", "x", FOUND, prices=(ChipPrice("v5p", 4.2), ChipPrice("", 2)))
    fast = FOUND[-1]
    assert report.step_price(fast).step == pytest.approx(2 * FACTS.chips * 0.1 / 3600)
    on_v5p = replace(fast, topology="v5p:4x4x4")
    assert report.price(on_v5p).chip_hour == 4.2
    assert replace(report, prices=()).step_price(fast) is None
    assert report.step_price(FOUND[0]) is None


def test_stored_reports_get_the_price_of_the_sweep(tmp_path):
    place = ResultStore(tmp_path).keep_report("v5e-4x4.data8", FITTING)
    found = result("a", seconds=1.0, report=place)
    report = SweepReport("x", str(tmp_path), (found,))
    assert report.report(found) == FITTING
    priced = replace(report, prices=(ChipPrice("", 7.0, "EUR"),)).report(found)
    assert (priced.price.chip_hour, priced.price.currency) == (7.0, "EUR")
    (tmp_path / place).unlink()
    with pytest.raises(ArgumentError, match=r"can't be read.*again=True"):
        report.report(found)
    with pytest.raises(ArgumentError, match="was not compiled: 8 heads"):
        report.report(FOUND[2])


def test_the_store_drops_only_invalid_results(tmp_path):
    store = ResultStore(tmp_path / "deep" / "sweep")
    assert store.known() == {}
    place = store.keep_report("whole", FITTING)
    kept = (result("a", seconds=1.0, report=place), result("b", "impossible", reason="no"))
    for each in kept:
        store.keep(each)
    store.keep(result("gone", seconds=1.0, report="reports/gone.json"))
    file = store.folder / "results.jsonl"
    with file.open("a") as lines:
        lines.write('{"format": 1, "key": "cut off", "topo')
    store.keep(result("c", seconds=3.0))
    store.keep(result("c", seconds=2.0))
    known = ResultStore(store.folder).known()
    assert set(known) == {"a", "b", "c"} and known["c"].facts.seconds == 2.0
    assert (known["a"], known["b"]) == kept
    with pytest.raises(ArgumentError, match="can't be created: .*specify another one"):
        ResultStore(file / "below")


def test_corrupt_store_lines_are_ignored(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"\xff\xfe\n" + b"[" * 100_000 + b'\n[1]\n{"format": 1}\nnull\n')
    store = ResultStore(tmp_path)
    assert store.known() == {}
    store.keep(result("a", seconds=1.0))
    assert set(store.known()) == {"a"}
    file.unlink()
    file.mkdir()
    with pytest.raises(ArgumentError, match=r"can't be read \(results.jsonl: Is a directory\)"):
        store.known()
    odd = tmp_path / "report.json"
    report = SweepReport("mine", str(tmp_path), (result("b", seconds=1.0, report="report.json"),))
    for content in (b"\xff", b"[" * 100_000, b"{}"):
        odd.write_bytes(content)
        with pytest.raises(ArgumentError):
            report.report(report.results[0])
