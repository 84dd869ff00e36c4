"""Lines of files and of notebooks, and unprintable text, as people read them."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlashard.hlo.module import Frame
from xlashard.support.formatting import near_line, printable


def test_lines_of_files_are_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert near_line(str(tmp_path / "train.py"), 41) == "train.py:41"
    assert near_line("/elsewhere/train.py", 41) == "/elsewhere/train.py:41"


def test_lines_of_notebooks_are_named_by_their_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    source_lines = pytest.importorskip("xlashard.analysis.programs.source_lines")
    shell = interactive.InteractiveShell()
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    file = shell.compile.cache("x = 1", 3)
    assert near_line(file, 8) == "cell 3, line 8"
    assert near_line("train.py", 8) == "train.py:8"
    frames = [Frame(file, 2, "inner"), Frame(file, 9, "step"), Frame("run.py", 1, "<module>")]
    line = source_lines.SourceLocator("step", file).line(frames)
    assert (line.file, line.line, line.in_user_file) == ("cell 3", 2, True)
    assert [frame.file for frame in line.callers] == ["cell 3"]


@given(st.text())
def test_every_text_can_be_written_in_utf_8(text: str) -> None:
    assert printable(text + "\udcff").encode("utf-8").endswith(b"\\udcff")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("états/שלום", "états/שלום"),
        ("a\u202eb", r"a\u202eb"),
        ("a\0b\x1b[1m", r"a\x00b\x1b[1m"),
        ("one\ntwo", "one\ntwo"),
        ("no\u00a0break", "no\u00a0break"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
