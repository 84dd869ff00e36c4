"""Printed text: in the characters of a stream, in the width of a terminal, while work goes on."""

import ast
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.terminals import terminal_for_errors
from tests.waiting import wait_for
from xlashard.support.background import _STOPS
from xlashard.support.consoles import PIPE_WIDTH, make_console, replace_unencodable, show_progress
from xlashard.support.formatting import Escaped, in_ascii, plain_text

PACKAGE = Path(__file__).resolve().parents[2] / "xlashard"


def make_table() -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("what", "a much longer name"):
        table.add_column(name)
    table.add_row("2 × größe…", "b")
    return table


def test_every_character_that_the_package_prints_has_one_of_ascii() -> None:
    left = {
        (letter, str(file.relative_to(PACKAGE)))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for letter in node.value
        if letter.isprintable() and "\\" in in_ascii(letter) and letter != "\\"
    }
    # Letters of names in examples.
    assert {letter for letter, _ in left} <= set("ößΣ")


def test_a_stream_writes_what_it_cannot_encode_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (
        ("ascii", "2 x gr\\xf6\\xdfe -> 1 us ..."),
        ("latin-1", "2 × größe -> 1 µs ..."),
        ("utf-8", "2 × größe → 1 µs …"),
    ):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        replace_unencodable()
        print("2 × größe → 1 µs …", end="", flush=True)
        assert stream.buffer.getvalue().decode(encoding) == expected


def test_reports_are_in_ascii_where_standard_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    Console(file=stream).print(Escaped(make_table()))
    stream.flush()
    assert "2 x gr\\xf6\\xdfe...  b\n" in stream.buffer.getvalue().decode()
    assert "2 x gr\\xf6\\xdfe...  b" in plain_text(make_table())
    # A given width is of a file, which is in UTF-8.
    assert "2 × größe…" in plain_text(make_table(), 80)


def test_lines_end_without_padding() -> None:
    file = io.StringIO()
    Console(file=file, width=60).print(Escaped(make_table()))
    assert file.getvalue().splitlines() == ["what        a much longer name", "2 × größe…  b"]


def test_a_pipe_gets_whole_rows_and_a_terminal_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console(file=io.StringIO()).width == PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "72")
    assert make_console(file=io.StringIO()).width == 72


def test_a_terminal_shows_work_and_its_time_until_it_ends() -> None:
    with terminal_for_errors() as screen:
        with show_progress("compiling [red]f"):
            wait_for(lambda: "compiling [red]f: 0 s" in screen.read(), "elapsed time", 20)
        wait_for(lambda: "\x1b[?25h" in screen.read(), "cursor", 20)
    assert not [t for t in _STOPS if t.name == "progress"]


def test_work_in_other_work_is_not_shown() -> None:
    with terminal_for_errors() as screen:
        with show_progress("choosing"):
            with show_progress("compiling") as hide:
                hide()
            wait_for(lambda: "choosing: 0 s" in screen.read(), "elapsed time", 20)
        with show_progress("trying", spinner=False):
            pass
        assert "compiling" not in screen.read() and "trying" not in screen.read()


def test_a_terminal_in_ascii_gets_a_spinner_of_ascii() -> None:
    with terminal_for_errors() as screen:
        screen.stream.reconfigure(encoding="ascii")
        with show_progress("compiling"):
            wait_for(lambda: "compiling: 0 s" in screen.read(), "elapsed time", 20)
        assert screen.read().isascii()


def test_nothing_is_shown_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress("compiling"):
        pass
    assert capfd.readouterr() == ("", "")
