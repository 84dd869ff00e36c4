"""Reports of `explain` as pages, comparisons and budgets."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import xlashard
from tests.accessibility import find_violations
from tests.analysis.explain.test_text import collective, printed, report
from tests.browser import started
from tests.core.pjit.helpers import make_mesh
from tests.predict.preflight.examples import FITTING
from xlashard import NamedSharding, P
from xlashard.analysis.explain.comparison import (
    PROGRAM_KEYS,
    compare_programs,
    find_breaches,
    read_program_budget,
)
from xlashard.analysis.explain.model import MoveReport
from xlashard.analysis.explain.script_report import (
    OmittedPrograms,
    ScriptProgram,
    ScriptReport,
    compare_scripts,
)
from xlashard.analysis.explain.sections import FINDINGS, MOVES
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.errors import ArgumentError

NOTHING_LEFT_OUT = OmittedPrograms(0, 0, "", 0)


def explained(function, **options):
    rows = NamedSharding(make_mesh((8,), ("data",)), P("data"))
    x = jax.ShapeDtypeStruct((64, 16), "float32", sharding=rows)
    return xlashard.explain(jax.jit(function, **options), x)


@pytest.fixture(scope="module")
def quiet():
    return explained(lambda x: x * 2, donate_argnums=0)


@pytest.fixture(scope="module")
def talking():
    return explained(lambda x: (x * 2) / x.sum())


def test_comparison_lists_regressions(quiet, talking):
    changes = compare_programs(quiet, talking)
    assert not changes.is_same and compare_programs(quiet, quiet).is_same
    (added,) = changes.traffic
    assert (added.change, added.old_bytes) == ("added", 0)
    assert added.new_bytes == talking.collectives[0].sent_bytes > 0
    worse = changes.regressions
    assert sum("all-reduce along data" in line for line in worse) == 1
    assert sum("no longer donated" in line for line in worse) == 1
    assert compare_programs(talking, quiet).regressions == ()
    assert compare_programs(quiet, quiet).regressions == ()


def test_equal_total_bytes_are_not_a_regression(talking):
    other = explained(lambda x: (x * 2) / x.max())
    changes = compare_programs(talking, other)
    assert {u.change for u in changes.traffic} == {"added", "removed"}
    assert not [line for line in changes.regressions if "sends" in line]


def test_comparison_budget_and_table_name_one_cause_of_a_gather():
    own, consumer = (SourceLine("model.py", line, "layer", True) for line in (3, 12))
    gather = collective(op_name="step/add", source=own, needed_by="step/mul")
    gather = replace(gather, needed_by_source=consumer)
    old, new = report(collectives=()), report(collectives=(gather,))
    (use,) = compare_programs(old, new).traffic
    (breach,) = find_breaches(new, read_program_budget(["collective_bytes=0"]), PROGRAM_KEYS)
    (row,) = [line for line in printed(new).splitlines() if "all-gather" in line]
    for text in (f"{use.what} {use.where}", *breach.lines, row):
        assert "model.py:12" in text and "mul" in text
        assert "model.py:3" not in text and "add" not in text


def test_markdown_for_a_pull_request(quiet, talking):
    text = compare_programs(quiet, talking).to_markdown()
    assert text.startswith("### \\<lambda\\>\n\n**Some figures became worse.**\n\n- **worse**")
    rows = [line for line in text.splitlines() if line.startswith("| all-reduce")]
    assert len(rows) == 1 and rows[0].count(" | ") == 5
    assert "Nothing changed." in compare_programs(quiet, quiet).to_markdown()
    of_script = compare_scripts(quiet, talking).to_markdown().splitlines()
    headings = [line for line in of_script if line.startswith("#")]
    assert headings[:2] == ["## Programs of \\<lambda\\>", "### \\<lambda\\>"]
    assert all(line.startswith("#### ") for line in headings[2:])


@pytest.mark.parametrize(
    ("word", "broken"),
    [
        ("all_reduce_bytes=0B", True),
        ("collectives=0", True),
        ("collective_bytes=1MB", False),
        ("memory=1B", True),
        ("all-gather-bytes=0", False),
        ("flops=1TFLOP", False),
        ("unmet=0", False),
    ],
)
def test_budgets(talking, word, broken):
    breaches = find_breaches(talking, read_program_budget([word]), PROGRAM_KEYS)
    assert bool(breaches) == broken
    if broken:
        assert word in str(breaches[0]) and breaches[0].value > breaches[0].limit.value


def test_budget_of_requests_that_are_not_done():
    report = explained(lambda x: x.sum(), donate_argnums=0)
    (breach,) = find_breaches(report, read_program_budget(["unmet=0"]), PROGRAM_KEYS)
    assert breach.value == len(report.unmet) == 1
    assert breach.lines == ("512 B x: donated, not reused",)


@pytest.mark.parametrize("word", ["hbm=90%", "memory", "memory=90%", "all_reduce_bytes=3s"])
def test_invalid_budgets(word):
    with pytest.raises(ArgumentError):
        read_program_budget([word])


@pytest.mark.slow
def test_findings_are_printed_and_on_the_page(quiet):
    found = {findings.id: getattr(FITTING, findings.id) for findings in FINDINGS}
    moves = (MoveReport("x['w']", "host", "P('data',)", 0, 2**20),)
    report = replace(quiet, **found, moves=moves)
    printed = str(report)
    page = html.unescape(report.to_html()).replace("<wbr>", "")
    for findings in (*FINDINGS, MOVES):
        section = findings.with_rows(getattr(report, findings.id))
        assert section.rows and section.title in printed and section.lead.text in page
        for column in section.page_columns:
            name, cell = column.name.removeprefix(">"), column.cell(section.rows[0])
            shown = cell.text if cell.key is None else cell.key
            assert f'data-label="{name}" data-value="{shown if cell else ""}"' in page


def test_findings_have_cards_of_their_own(quiet):
    wasteful = replace(quiet, repeated=FITTING.repeated).to_html()
    for html_page in (wasteful, FITTING.to_html()):
        assert html_page.count('<section class="card card-repeated costly wide"') == 1
    assert "card-repeated" not in quiet.to_html()


@pytest.mark.slow
def test_page_shows_reports_comparison_and_json_in_a_browser(quiet, talking):
    places = "train.py:3", "train.py:9", 1
    programs = (ScriptProgram("<old>", *places, quiet), ScriptProgram("new", *places, talking))
    script = ScriptReport("train.py", "finished", "", programs, NOTHING_LEFT_OUT)
    page = script.make_page(compare_programs(quiet, talking))
    with started() as browser, browser.page(page) as tab:
        assert not tab.complaints()
        assert find_violations(tab) == []
        assert tab.run("document.querySelectorAll('.panel').length") == 3
        assert tab.run("document.querySelector('.panel:not([hidden])').id") == "All"
        assert tab.run("document.querySelector('.tabs a:nth-child(3)').textContent") == "<old>"
        tab.run("location.hash = '#new'")
        rows = "document.querySelectorAll('#new .card-collectives tbody tr').length"
        assert tab.run(rows) == len(talking.collectives)
        data = tab.run("document.getElementById('json-1').textContent")
    assert json.loads(data) == talking.to_dict()


def test_page_of_a_script_has_the_costliest_program_first(quiet, talking):
    places = (f"{Path.cwd()}/train.py:3", "train.py:9")
    called = [
        ScriptProgram("quiet", *places, calls=2, report=quiet),
        ScriptProgram("odd", *places, calls=1, report=None, error="the reason"),
        ScriptProgram("talking", *places, calls=50, report=talking),
    ]
    script = ScriptReport("train.py --steps 9", "finished", "", tuple(called), NOTHING_LEFT_OUT)
    page = script.to_html()
    assert "<title>train.py --steps 9</title>" in page
    assert [panel.name for panel in script.panels()] == ["All", "talking", "quiet"]
    shown = html.unescape(page).replace("<wbr>", "")
    rows = re.findall('id="All.programs.(\\w+)"', page)
    assert rows == ["talking", "quiet", "odd"]
    assert "defined at train.py:3, 50 calls from train.py:9" in shown
    assert str(script).index("▶ quiet") < str(script).index("▶ talking")


def test_a_notebook_shows_the_key_figures(talking):
    shown = talking._repr_html_()
    assert "each device sends" in shown.lower() and "<script" not in shown
    assert talking.to_html().count("<!DOCTYPE html>") == 1
    with pytest.raises(ArgumentError):
        ScriptReport("train.py", "finished", "", (), NOTHING_LEFT_OUT).to_html()
