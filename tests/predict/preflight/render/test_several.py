"""The page of several reports in a real Chromium: side by side, with changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.predict.preflight.examples import ALL, FITTING, OUT_OF_MEMORY, SMALL
from tests.predict.preflight.render.reading import column, press
from xlashard.predict.preflight.report.comparison import compare, page
from xlashard.predict.preflight.report.preflight_report import PreflightReport

pytestmark = pytest.mark.slow


def test_the_json_can_be_downloaded(browser: Browser, tmp_path: Path) -> None:
    with browser.page(page([SMALL, FITTING])) as tab:
        browser.call(
            "Browser.setDownloadBehavior",
            behavior="allow",
            downloadPath=str(tmp_path),
            eventsEnabled=True,
        )
        tab.click(".tabs a:nth-child(3)")
        tab.until("!document.querySelectorAll('.panel')[2].hidden")
        tab.click(".download")
        browser.wait_for("Browser.downloadProgress", state="completed")
        assert tab.complaints() == []
    (found,) = tmp_path.iterdir()
    assert found.name == "configs_8b_v5p.toml.json"
    assert PreflightReport.from_json(found.read_text(encoding="utf-8")) == FITTING


def test_reports_are_compared_in_a_sortable_table(browser: Browser) -> None:
    reports = list(ALL.values())
    with browser.page(page(reports)) as tab:
        assert tab.complaints() == []
        assert len(tab.texts(".panel")) == 1
        assert [float(n) for n in column(tab, ".card-reports", "takes")] == [
            r.time.seconds for r in reports
        ]
        press(tab, ".card-reports", "takes")
        seconds = sorted((r.time.seconds for r in reports), reverse=True)
        assert [float(n) for n in column(tab, ".card-reports", "takes")] == seconds
        press(tab, ".card-reports", "tokens/s")
        assert column(tab, ".card-reports", "tokens/s")[-1] == "", "what has no number comes last"
        tab.focus(".tabs a:nth-child(3)")
        tab.press("Enter")
        tab.until("document.getElementById('All').hidden")
        second = "document.querySelectorAll('.panel')[2].id"
        assert len(tab.texts(".panel")) == 1
        assert tab.text(".verdict .badge") == "✗ Out of memory"
        assert (
            tab.run("document.querySelector('.tabs [aria-current=true]').hash")
            == f"#{tab.run(second)}"
        )
        tab.run("history.back()")
        tab.until("!document.getElementById('All').hidden")
        assert tab.text("h3") == "5 reports"


def test_address_keeps_the_report_and_its_filters(browser: Browser) -> None:
    def seen() -> list[str]:
        return column(tab, ".card-collectives", "along")

    with browser.page(page([SMALL, FITTING])) as tab:
        tab.click(".tabs a:nth-child(3)")
        tab.until("!document.querySelectorAll('.panel')[2].hidden")
        tab.click(".panel:not([hidden]) .contents a[href$=collectives]")
        tab.until("document.querySelector('.pointed')")
        tab.focus(".panel:not([hidden]) .card-collectives input")
        tab.type("all-gather & fsdp=")
        tab.run("document.activeElement.select()")
        tab.type("all-gather state")
        assert seen() == ["fsdp"] and tab.run("history.length") <= 4
        address = tab.run("location.href")
        tab.click(".tabs a:nth-child(2)")
        tab.until("document.querySelectorAll('.panel')[2].hidden")
        assert "all-gather" in tab.run("location.hash")
        tab.run("history.back()")
        tab.until("!document.querySelectorAll('.panel')[2].hidden")
        assert seen() == ["fsdp"] and tab.run("location.href") == address
        tab.go()
        assert seen() == ["fsdp"], "after a reload"
        tab.run("location.hash = location.hash.split('&')[0]")
        tab.until("!document.querySelector('.panel:not([hidden]) .card-collectives input').value")
        assert len(seen()) == len(FITTING.traffic)
        assert tab.requests() == [] and tab.complaints() == []


def test_summary_is_copied_as_markdown(browser: Browser) -> None:
    with browser.page(page([SMALL, FITTING])) as tab:
        tab.run("navigator.clipboard.writeText = (text) => { window.copied = text; }")
        tab.run("location.hash = document.querySelectorAll('.panel')[2].id")
        tab.until("document.querySelectorAll('.panel')[1].hidden")
        tab.click(".copies")
        tab.until("window.copied")
        assert tab.text(".copies") == "Copied"
        copied = tab.run("window.copied")
    assert FITTING.to_markdown().startswith(copied.split("####")[0])
    assert "#### Memory" in copied and "#### Collectives" in copied


def test_all_reports_are_printed(browser: Browser) -> None:
    with browser.page(page([SMALL, FITTING]), print=True) as tab:
        assert len(tab.texts(".panel")) == 3 and tab.texts(".contents, .tabs") == []


def test_changes_are_shown_before_the_reports(browser: Browser) -> None:
    changes = compare(FITTING, OUT_OF_MEMORY)
    with browser.page(page([FITTING, OUT_OF_MEMORY], changes)) as tab:
        assert tab.complaints() == []
        assert changes.new in tab.text("#All .verdict")
        numbers = ".card-numbers"
        assert column(tab, numbers, "number") == [a.name for a in changes.amounts]
        assert [float(n) if n else None for n in column(tab, numbers, "after")] == [
            a.new for a in changes.amounts
        ]
        rows = tab.texts(".card-memory tbody tr")
        assert any("log_softmax" in text and "grown" in text for text in rows)
    same = page([FITTING, FITTING], compare(FITTING, FITTING))
    assert "Nothing changed." in same
    assert "Nothing changed." not in page([FITTING, FITTING])


def test_both_timelines_share_one_scale(browser: Browser) -> None:
    ends = (
        "[...document.querySelectorAll('#All .row[data-track=cores]')].map(row => "
        "Math.max(...[...row.querySelectorAll('.span')].map(s => s.getBoundingClientRect().right))"
        " - row.getBoundingClientRect().left).map((end, n, all) => end / Math.max(...all))"
    )
    assert FITTING.time.timeline is not None
    blocks = [
        replace(
            block,
            seconds=block.seconds / 2,
            spans=tuple(replace(s, start=s.start / 2, seconds=s.seconds / 2) for s in block.spans),
        )
        for block in FITTING.time.timeline.blocks
    ]
    timeline = replace(FITTING.time.timeline, blocks=tuple(blocks), memory=())
    fast = replace(FITTING, time=replace(FITTING.time, timeline=timeline))
    with browser.page(page([FITTING, fast], compare(FITTING, fast))) as tab:
        assert tab.complaints() == []
        assert tab.run(ends) == pytest.approx([1, 0.5], abs=0.01)
        assert tab.texts("#All .labels .step") == ["before", "after"]
        tab.point_at("#All .row .span.matrix")
        assert tab.run("document.querySelectorAll('#All .span.lit').length") == 2
    assert "timeline" not in compare(FITTING, fast).to_json()
    assert "Both timelines" in compare(FITTING, fast).to_html()
    assert "Both timelines" not in compare(FITTING, SMALL).to_html(), "which has no schedule"
