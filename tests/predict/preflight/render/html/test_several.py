"""The page of several reports in a real Chromium: side by side, with changes."""

from pathlib import Path

import pytest

from tests.browser import Browser
from tests.predict.preflight.examples import ALL, FITTING, OUT_OF_MEMORY, SMALL
from tests.predict.preflight.render.html.reading import column
from xlashard.predict.preflight.render.html import page
from xlashard.predict.preflight.report.comparison import compare
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
        tab.until("!document.getElementById('report-2').hidden")
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
        assert [float(n) for n in column(tab, ".overview", 4)] == [r.time.seconds for r in reports]
        tab.click(".overview th:nth-child(5) button")
        seconds = sorted((r.time.seconds for r in reports), reverse=True)
        assert [float(n) for n in column(tab, ".overview", 4)] == seconds
        tab.click(".overview th:nth-child(7) button")
        assert column(tab, ".overview", 6)[-1] == "", "what has no number comes last"
        tab.focus(".tabs a:nth-child(3)")
        tab.press("Enter")
        tab.until("document.getElementById('report-0').hidden")
        assert len(tab.texts(".panel")) == 1
        assert tab.text(".verdict .badge") == "✕ Out of memory"
        assert tab.run("document.querySelector('.tabs [aria-current=true]').hash") == "#report-2"
        tab.run("history.back()")
        tab.until("!document.getElementById('report-0').hidden")
        assert tab.text("h2") == "5 reports side by side"


def test_changes_are_shown_before_the_reports(browser: Browser) -> None:
    changes = compare(FITTING, OUT_OF_MEMORY)
    with browser.page(page([FITTING, OUT_OF_MEMORY], changes)) as tab:
        assert tab.complaints() == []
        assert tab.text(".changes h2") == f"What changed in {changes.new}"
        place = ".changes > div:nth-of-type(1)"
        differing = [a for a in changes.amounts if a.old != a.new]
        assert column(tab, place, 0) == [a.name for a in differing]
        assert [float(n) if n else None for n in column(tab, place, 2)] == [
            a.new for a in differing
        ]
        used = ".changes table:has(caption:nth-child(1)) tr:has(.tag)"
        assert any("log_softmax" in text and "grown" in text for text in tab.texts(used))
    same = page([FITTING, FITTING], compare(FITTING, FITTING))
    assert "No differences." in same
    assert "What changed" not in page([FITTING, FITTING])
