"""`source_files`: what stays of a source file that is replaced, and what is refused."""

import contextlib
import os
import stat
from pathlib import Path

import pytest

from xlashard.cli.commands.source_files import read_source, write_source
from xlashard.errors import ArgumentError

OLD, NEW = "import jax\nx = 1\n", "import jax\nx = 2\n"
OTHER_USER = 12345, 23456


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "old.py"
    path.write_text(OLD)
    return path


def replace(path: Path, text: str = NEW) -> None:
    write_source(read_source(str(path)), text)


def test_hard_links_owner_mode_and_long_names_stay(program: Path) -> None:
    # 255 bytes: the longest name of most file systems.
    long = program.with_name("x" * 252 + ".py")
    long.write_text(OLD)
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(long, *OTHER_USER)
    long.chmod(0o4750)
    hard, symbolic = program.with_name("hard.py"), program.with_name("symbolic.py")
    hard.hardlink_to(program)
    symbolic.symlink_to(program)
    before = long.stat()
    replace(symbolic)
    replace(long)
    assert hard.read_text() == long.read_text() == NEW
    assert hard.samefile(program) and symbolic.is_symlink()
    after = long.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (
        *(OTHER_USER if is_root else (before.st_uid, before.st_gid)),
        before.st_mode,
    )
    assert sorted(program.parent.iterdir()) == sorted([program, hard, symbolic, long])


@pytest.mark.parametrize("is_owned", [True, False])
@pytest.mark.parametrize("number", range(4))
def test_interrupted_write_loses_no_text(
    number: int, is_owned: bool, program: Path, monkeypatch
) -> None:
    calls = iter(range(10))
    sync = os.fsync

    def interrupt(descriptor: int) -> None:
        sync(descriptor)
        if next(calls) == number:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                # A part of the bytes has reached the disk.
                os.ftruncate(descriptor, 7)
            raise KeyboardInterrupt

    def refuse(*_) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fsync", interrupt)
    if not is_owned:
        monkeypatch.setattr(os, "chown", refuse)
    with contextlib.suppress(KeyboardInterrupt):
        replace(program)
    assert {OLD, NEW} & {path.read_text() for path in program.parent.iterdir()}
    if program.read_text() not in (OLD, NEW):
        with pytest.raises(ArgumentError, match="restore it by cp"):
            read_source(str(program))


@pytest.mark.parametrize(
    "encoding", ["unicode_escape", "rot13", "hex", "base64", "undefined", "utf-7", "nonsense"]
)
def test_encoding_that_does_not_restore_the_bytes_is_refused(encoding: str, program: Path) -> None:
    program.write_text(f"# coding: {encoding}\nx = '~'\n")
    with pytest.raises(ArgumentError, match="save it as UTF-8"):
        read_source(str(program))


def test_what_the_file_cannot_take_is_refused(program: Path) -> None:
    program.write_text(f"# coding: latin-1\n{OLD}")
    source = read_source(str(program))
    with pytest.raises(ArgumentError, match="encoding iso-8859-1"):
        write_source(source, "\N{SNOWMAN}")
    program.write_text("# Edited meanwhile.\n")
    with pytest.raises(ArgumentError, match="has changed since it was read"):
        write_source(source, NEW)
    with pytest.raises(ArgumentError, match="can't be read"):
        read_source("a\0b.py")
    assert program.read_text() == "# Edited meanwhile.\n"
