"""A checkpoint with a file that is not as it was written is refused with the file's name."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.checkpoint.states import check_same, restore
from xlashard.train.errors import CheckpointError


def a_file(folder: Path) -> Path:
    """The biggest file of the arrays."""
    return max((p for p in (folder / "arrays").rglob("*") if p.is_file()), key=_size)


def _size(path: Path) -> int:
    return path.stat().st_size


def cut_off(folder: Path) -> Path:
    file = a_file(folder)
    os.truncate(file, _size(file) - 1)
    return file


def alter(folder: Path) -> Path:
    file = a_file(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def lengthen(folder: Path) -> Path:
    file = a_file(folder)
    file.write_bytes(file.read_bytes() + b"\0")
    return file


def delete(folder: Path) -> Path:
    file = a_file(folder)
    file.unlink()
    return file


def add(folder: Path) -> Path:
    file = folder / "arrays" / "d" / "notes"
    file.write_text("mine")
    return file


def change_manifest(change: Callable[[dict], None]) -> Callable[[Path], Path]:
    def damage(folder: Path) -> Path:
        file = folder / "checkpoint.json"
        said = json.loads(file.read_text())
        change(said)
        file.write_text(json.dumps(said))
        return file

    return damage


def replace_manifest(text: str | None) -> Callable[[Path], Path]:
    def damage(folder: Path) -> Path:
        file = folder / "checkpoint.json"
        file.unlink() if text is None else file.write_text(text)
        return file

    return damage


DAMAGES = {
    "cut off": (cut_off, r"is cut off: [\d,]+ of its [\d,]+ bytes"),
    "altered": (alter, "was altered: its SHA-256"),
    "longer": (lengthen, r"was altered: it has [\d,]+ bytes"),
    "missing": (delete, "is missing"),
    "foreign": (add, "is foreign"),
    "manifest missing": (replace_manifest(None), "is missing"),
    "manifest cut off": (replace_manifest('{"format": 1,'), "is cut off, altered"),
    "manifest of another kind": (replace_manifest("[1]"), "is cut off, altered"),
    "manifest altered": (
        change_manifest(lambda said: said["about"].update(step=21)),
        "was altered",
    ),
    "later format": (
        change_manifest(lambda said: said.update(format=2)),
        "has the format 2, .* reads the format 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_its_name(own: Path, damage: str) -> None:
    do, text = DAMAGES[damage]
    file = do(own / "00000020").relative_to(own / "00000020").as_posix()
    match = rf"of step 20 in {own} can't be used: {re.escape(file)} {text}"
    with pytest.raises(CheckpointError, match=match) as error:
        restore(own)
    assert (error.value.step, error.value.file) == (20, file)
    advice = f"The one of step 10 is whole.*\n  mv {own}/00000020 {own.parent}/damaged-00000020"
    assert re.search(advice, str(error.value))
    # Doing as the error says.
    os.system(str(error.value).splitlines()[-1])
    check_same(restore(own).state, 10)


@pytest.mark.slow
def test_every_byte_counts(own: Path) -> None:
    """One bit of each file in turn."""
    for file in [p for p in (own / "00000020").rglob("*") if p.is_file()]:
        data = file.read_bytes()
        for place in {0, len(data) // 2, len(data) - 1}:
            changed = bytearray(data)
            changed[place] ^= 4
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match=re.escape(file.name)):
                restore(own)
        file.write_bytes(data)
    check_same(restore(own).state, 20)


def test_no_earlier_one_is_whole(own: Path) -> None:
    alter(own / "00000010")
    cut_off(own / "00000020")
    with pytest.raises(CheckpointError, match="There is no earlier one that is whole"):
        restore(own)


def test_a_renamed_step(own: Path) -> None:
    (own / "00000020").rename(own / "00000200")
    with pytest.raises(CheckpointError, match="00000200 was renamed: its files are of step 20"):
        restore(own)
