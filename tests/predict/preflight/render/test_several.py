"""The page of several reports in a real Chromium: side by side, with changes."""

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
