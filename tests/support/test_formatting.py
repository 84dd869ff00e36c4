"""Lines of files and of notebooks, as people read them."""

import sys
from pathlib import Path

import pytest

from xlashard.hlo.module import Frame
from xlashard.support.formatting import near_line


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
