"""The page about reports shows the output of its program."""

from pathlib import Path

import pytest

from tests.documents import program, read_blocks

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "explain.md"


def stable(text, partitioner):
    """Return the text without parts that differ between processors."""
    lines = text.replace(partitioner, "PARTITIONER").splitlines()
    return [line for line in lines if not line.startswith(("  holds", "  computes"))]


@pytest.mark.slow
def test_guide_shows_the_output_of_its_program(monkeypatch, update_goldens):
    monkeypatch.setenv("COLUMNS", "100")
    text = PAGE.read_text()
    (shown,) = ("\n".join(b.code) for b in read_blocks(text) if b.info == "text")
    names = {"__name__": "__main__"}
    exec(compile(program(text), "docs/guides/explain.md", "exec"), names)
    report = names["report"]
    new, old = stable(str(report), report.place.partitioner), stable(shown, "shardy")
    if update_goldens and new != old:
        PAGE.write_text(text.replace(shown, str(report).rstrip()), encoding="utf-8")
        return
    assert new == old, "make goldens"
