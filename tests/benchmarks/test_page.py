"""The page of figures: rendered from JSON and a template, and up to date with the template."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _page, truth
from benchmarks._measure import Measurement, Report
from tests.benchmarks.test_measure import growth_lines, quiet_report

ROOT = Path(__file__).resolve().parents[2]


ACCURACY = re.compile(
    r"median error (of )?[0-9]|an error of [0-9]|[0-9.]+ ?% (of|within)[^.]{0,30}published runs"
    r"|[0-9]+ to [0-9]+ % too (slow|fast)|bar\s+holds [0-9]"
)
"""Statements about the error of predicted steps."""


def test_one_page_of_each_target_states_how_accurate_steps_are() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    stating = {
        str(page.relative_to(ROOT)) for page in pages if ACCURACY.search(page.read_text("utf-8"))
    }
    assert stating == {"docs/tpu/step_times.md", "docs/gpu/step_times.md"}
    for page in stating:
        target = Path(page).parts[1]
        found = [one for one in truth.read_kept().values() if one.run.target == target]
        assert truth.summary(found) in (ROOT / page).read_text("utf-8")


def made_up() -> dict[str, Any]:
    """Results of a benchmark of two tables."""
    report: Report = quiet_report("demo")
    times = {"theirs": (4.0, 8.0), "ours": (2.0, 2.0), "copy": (1.0, 1.0)}
    measured = {name: Measurement(name, 1, samples) for name, samples in times.items()}
    report.add("move, 1 MB", measured, baseline="theirs", floor="copy", goals={"ours": 0.5})
    report.add("turn", measured, baseline="theirs", goals={"ours": 0.1})
    return json.loads(json.dumps(report.as_json()))


def test_tables_show_medians_ratios_and_goals() -> None:
    lines = _page.render("{{tables demo}}", {"demo": made_up()}).splitlines()
    assert lines == [
        "| move, 1 MB | median | × theirs | × copy | goal | met |",
        "| --- | ---: | ---: | ---: | --- | --- |",
        "| theirs | 6.000 s |  | 6.00 |  |  |",
        "| ours | 2.000 s | 0.38 | 2.00 | ≤ 0.50 × | yes |",
        "| copy | 1.000 s | 0.19 |  |  |  |",
        "",
        "| turn | median | × theirs | goal | met |",
        "| --- | ---: | ---: | --- | --- |",
        "| theirs | 6.000 s |  |  |  |",
        "| ours | 2.000 s | 0.38 | ≤ 0.10 × | **no** |",
        "| copy | 1.000 s | 0.19 |  |  |",
    ]


def test_growth_tables_show_sizes_and_exponents() -> None:
    report = quiet_report("demo")
    report.add_growth("calls", growth_lines("repeat call", (0.5, 0.8)))
    results = _page.figures({"demo": json.loads(json.dumps(report.as_json()))})
    lines = _page.render("{{tables demo}}", results).splitlines()
    assert lines == [
        "| calls | size | jax | xlashard | ratio | growth | jax's | goal | met |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
        "| repeat call | 1 leaf | 1 ms | 900 µs | 0.90 |  |  | ≤ 1.10 × | yes |",
        "|  | 10 leaves | 3.162 ms | 5.679 ms | 1.80 |  |  | ≤ 1.10 × | **no** |",
        "|  | 100 leaves | 10 ms | 35.83 ms | 3.58 | 0.80 | 0.50 | ≤ 1.10 × | **no** |",
    ]
    text = "{{demo: calls: repeat call, 10 leaves: ratio}}"
    assert _page.render(text, results) == "1.80 ×"
    results["demo"]["tables"][0]["rows"][1]["floor_ratio"] = 1.75
    heading, _, first, second, _ = _page.render("{{tables demo}}", results).splitlines()
    assert (
        heading == "| calls | size | jax | xlashard | ratio | floor | growth | jax's | goal | met |"
    )
    assert first == "| repeat call | 1 leaf | 1 ms | 900 µs | 0.90 |  |  |  | ≤ 1.10 × | yes |"
    assert "| 1.80 | 1.75 |" in second


def test_template_markers_are_replaced_by_single_figures() -> None:
    results = {"demo": made_up()}
    text = "a {{demo: move, 1 MB: ours: floor_ratio}} b {{demo: turn: ours: ratio}}."
    assert _page.render(text, results) == "a 2.00 × b 0.38 ×."
    assert _page.render("{{demo: turn: ours: floor_ratio}}", results) == "(not measured)"
    assert _page.render("{{demo: gone: ours: ratio}}", results) == "(not measured)"
    assert _page.render("{{gone: turn: ours: ratio}} {{tables gone}}", results) == (
        "(not measured) (not measured)"
    )


def test_page_describes_the_machine() -> None:
    text = _page.render("on {{environment}}", {"demo": made_up(), "other": made_up()})
    assert text.startswith("on jax ") and text.count("Python") == 1
    assert _page.render("{{environment}}", {}) == "not measured"


def test_unknown_template_marker_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\{\{table demo\}\}.*\{\{tables NAME\}\}"):
        _page.render("{{table demo}}", {})


def test_results_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "any.json").write_text(json.dumps(made_up()), encoding="utf-8")
    assert list(_page.read_results(tmp_path)) == ["demo"]


@pytest.mark.parametrize(("ratio", "text"), [(0.0123, "0.012"), (0.5, "0.50"), (1234.5, "1,234")])
def test_ratios_are_rounded_to_significant_digits(ratio: float, text: str) -> None:
    assert _page.factor(ratio) == text


def test_every_benchmark_is_on_the_page() -> None:
    # `truth` and `operations` are on docs/tpu/step_times.md; `auto` runs for an hour;
    # `advice` and `resharding` compare predictions with compiled programs.
    programs = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    programs -= {"truth", "operations", "auto", "advice", "resharding"}
    assert programs <= set(_page.marked(_page.PAGE.read_text(encoding="utf-8")))


def test_every_figure_of_the_page_was_measured() -> None:
    page = _page.render(_page.PAGE.read_text(encoding="utf-8"), _page.read_figures())
    assert "{{" not in page
    assert _page.NOT_MEASURED not in page


def test_figures_round_trip_through_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "FIGURES", tmp_path / "figures.json")
    results = {"demo": made_up()}
    _page.write_figures(_page.figures(results))
    assert _page.render("{{tables demo}}", _page.read_figures()) == _page.render(
        "{{tables demo}}", results
    )
