"""The guide about preflight shows the output of its program."""

from pathlib import Path

import pytest

from tests.documents import program, read_blocks
from xlashard.predict.preflight.report.comparison import KEYS
from xlashard.preflights import PreflightReport

GUIDE = Path(__file__).parents[3] / "docs" / "tpu" / "preflight.md"


def stable(text: str, partitioner: str) -> list[str]:
    """Return the parts that don't differ between libtpu versions: head, headings, values."""
    first, *lines = text.replace(partitioner, "PARTITIONER").splitlines()
    headings = [line.partition("  ")[0] for line in lines if line[:1].isupper() and "  " in line]
    values = lines[[line[:9] for line in lines].index("Arguments") :]
    return [first, *headings, *values[: values.index("") if "" in values else None]]


@pytest.mark.slow
def test_the_guide_shows_the_printed_report(
    monkeypatch: pytest.MonkeyPatch, update_goldens: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = GUIDE.read_text(encoding="utf-8")
    shown = next("\n".join(b.code) for b in read_blocks(text) if b.info == "text")
    names: dict[str, object] = {"__name__": "__main__"}
    first = program(text).partition("print(report)")[0]
    exec(compile(first, "docs/tpu/preflight.md", "exec"), names)
    report = names["report"]
    assert isinstance(report, PreflightReport)
    new, old = stable(str(report), report.partitioner), stable(shown, "shardy")
    if update_goldens and new != old:
        # The last lines name the flags and versions of one process.
        head, tail = str(report).split("\ncompiled in ")[0], shown.split("\ncompiled in ")[1]
        GUIDE.write_text(text.replace(shown, f"{head}\ncompiled in {tail}"), encoding="utf-8")
        return
    assert new == old, "make goldens"


def test_every_key_of_a_budget_is_in_the_guide() -> None:
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    shown = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert shown == list(KEYS)
