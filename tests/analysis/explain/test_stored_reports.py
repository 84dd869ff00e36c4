"""Stored reports are read, compared and drawn, also where JAX is absent."""

from pathlib import Path

import pytest

from tests.analysis.explain.test_text import MIB, collective, printed, report, words
from xlashard import ProgramReport
from xlashard.cli.main import main


@pytest.fixture
def stored(tmp_path: Path) -> tuple[str, str]:
    """Return the files of a report, and of one with more communication."""
    reports = {"old": report(), "new": report(collectives=(collective(sent=9 * MIB),))}
    for name, each in reports.items():
        (tmp_path / f"{name}.json").write_text(each.to_json())
    return str(tmp_path / "old.json"), str(tmp_path / "new.json")


def test_a_stored_report_is_printed_like_the_report_itself(
    stored, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # A pipe is wider.
    old, _ = stored
    assert printed(ProgramReport.from_json(Path(old).read_text())) == printed(report())
    assert main(["explain", old]) == 0
    assert words(capsys.readouterr().out) == words(printed(report(), width=80))


def test_stored_reports_are_compared(stored, tmp_path: Path, capsys) -> None:
    old, new = stored
    page, text = tmp_path / "changes.html", tmp_path / "changes.md"
    files = ["--html", str(page), "--markdown", str(text)]
    assert main(["explain", new, "--compare", old, *files]) == 1
    shown = capsys.readouterr()
    assert "sent 3.0 MiB → 9.0 MiB" in words(shown.out)
    assert "all-gather along fsdp" in shown.err
    assert "all-gather" in page.read_text() and "all-gather" in text.read_text()
    assert main(["explain", old, "--compare", old]) == 0


def test_a_stored_report_is_checked_against_a_budget(stored, capsys) -> None:
    _, new = stored
    assert main(["explain", new, "--budget", "all_gather_bytes=1MiB"]) == 1
    assert "all_gather_bytes" in capsys.readouterr().err
