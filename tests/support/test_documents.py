"""JSON and TOML of any content: a value, or a ValueError, soon and in bounded memory."""

import errno
import os
import random
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from tests.grouped_cases import Together
from tests.message_patterns import naming
from xlashard.support.documents import parse_json, parse_toml, read_text, read_toml, write_whole
from xlashard.support.formatting import Escaped, plain_text, printable
from xlashard.train.config.settings import load_settings
from xlashard.train.errors import SettingsError

BAD_TOML = {
    "deep array": f"a={'[' * 3000}{']' * 3000}",
    "deep inline table": f"a={'{a=' * 3000}1{'}' * 3000}",
    "long key": f"{'.'.join('a' * 100_000)}=1",
    "long quoted key": f"{'.'.join(['"a"'] * 100_000)}=1",
    "long table name": f"[{'.'.join('a' * 100_000)}]",
    "integer of 5,000 digits": f"a={'9' * 5000}",
    "integer of 5,000 hexadecimal digits": f"a=0x{'f' * 5000}",
    "integer past 64 bits": f"a={2**63}",
    "cut off": 'a="',
}

BAD_JSON = {
    "deep array": "[" * 100_000,
    "deep array that is closed": "[" * 500 + "]" * 500,
    "deep object": '{"a":' * 100_000,
    "integer of 5,000 digits": "9" * 5000,
    "integer past all floats": "9" * 400,
    "cut off": '{"a"',
}


def test_bad_documents_are_refused_soon() -> None:
    readers: list[tuple[Callable[[str], Any], dict[str, str]]] = [
        (parse_toml, BAD_TOML),
        (parse_json, BAD_JSON),
    ]
    with Together() as together:
        for parse, texts in readers:
            for name, text in texts.items():
                with together.case(f"{parse.__name__}: {name}"):
                    began = time.process_time()
                    with pytest.raises(ValueError) as error:
                        parse(text)
                    assert len(str(error.value)) < 200
                    assert time.process_time() - began < 10, "linear in the text's length"


def test_documents_of_a_usual_depth_are_read() -> None:
    assert parse_json("[" * 90 + "1" + "]" * 90)
    assert parse_json("1") == 1
    assert parse_json('{"flop": 3e30, "count": 20000000000000000000000}')["flop"] == 3e30
    keys = ".".join(["a"] * 90)
    assert parse_toml(f'{keys} = {2**63 - 1}\ntext = "{"1.5, " * 1000}"\n')


def test_endless_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1.0 KiB"):
        read_text("/dev/zero", 1 << 10)
    with pytest.raises(SettingsError, match=naming("/dev/zero", "TOML", "longer than 1")):
        load_settings("/dev/zero")
    file = tmp_path / "settings.toml"
    file.write_text("a = 1")
    assert read_toml(file) == {"a": 1}


@pytest.mark.slow
def test_random_settings_files_are_read_or_refused(tmp_path: Path) -> None:
    """Settings of random bytes, and good ones with random changes."""
    rng = random.Random(0)
    good = Path("configs/tiny.toml").read_bytes()
    values = ["{}", "[]", "''", '"\\u0000"', '"\\u001b"', "nan", "-inf", "1979-05-27", "true", "-1"]
    values += [str(2**63 - 1), "[[['a']]]", "{a = {a = 1}}", "1e308", "0x7fffffffffffffff"]
    file = tmp_path / "settings.toml"
    with Together() as together:
        for number in range(600):
            data = bytearray(good)
            if number % 3 == 0:
                data = bytearray(rng.randbytes(rng.randrange(200)))
            elif number % 3 == 1:
                for _ in range(rng.randrange(1, 5)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            else:
                lines = good.decode().splitlines()
                places = [n for n, line in enumerate(lines) if "=" in line and "#" not in line]
                place = rng.choice(places)
                lines[place] = f"{lines[place].partition('=')[0]}= {rng.choice(values)}"
                data = bytearray("\n".join(lines).encode())
            with together.case(repr(bytes(data))):
                file.write_bytes(data)
                try:
                    load_settings(str(file))
                except SettingsError as error:
                    assert str(error) and error.__cause__ is None


def test_a_renderable_is_printed_with_escapes() -> None:
    assert plain_text(Escaped(Text("run \x1b[31mred\u202e"))) == "run \\x1b[31mred\\u202e"


def test_control_characters_are_printed_as_escapes() -> None:
    assert printable("a\x1b[31mb\0\x9b2J\r\n\tc\udcff\u202e") == (
        "a\\x1b[31mb\\x00\\x9b2J\\r\n\tc\\udcff\\u202e"
    )
    assert printable("Größe × 8 µs 漢字 🙂") == "Größe × 8 µs 漢字 🙂"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, "é")
    assert file.read_bytes() == "é".encode()
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "\ud800")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError):
        write_whole(folder, "a folder is in its place")
    assert file.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_written_file_keeps_its_link_and_mode_and_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = [], os.fsync

    def fsync(opened: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(opened).st_mode))
        sync(opened)

    monkeypatch.setattr(os, "fsync", fsync)
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    # The file, then its folder.
    assert synced == [False, True]
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "a file that is mounted")

    monkeypatch.setattr(Path, "replace", refuse)
    write_whole(file, "in place")
    assert file.read_text() == "in place"
    with pytest.raises(OSError, match="mounted"):
        write_whole(tmp_path / "other", "")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "pipe"}
