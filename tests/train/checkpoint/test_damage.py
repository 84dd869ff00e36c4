"""A checkpoint with a damaged file is refused with the file's name."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.checkpoint.states import check_same, restore
from xlashard.train.checkpoint.manifest import _digest
from xlashard.train.errors import CheckpointError


def a_file(folder: Path) -> Path:
    """Return the biggest file of the arrays."""
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


def link_out(folder: Path) -> Path:
    file = a_file(folder)
    elsewhere = folder.parent.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    return file


def link_folder_out(folder: Path) -> Path:
    (folder.parent.parent / "elsewhere").mkdir()
    link = folder / "arrays" / "more"
    link.symlink_to(folder.parent.parent / "elsewhere")
    return link


def link_manifest_out(folder: Path) -> Path:
    file = folder / "checkpoint.json"
    elsewhere = folder.parent.parent / "checkpoint.json"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    return file


def link_in_a_circle(folder: Path) -> Path:
    file = a_file(folder)
    file.unlink()
    file.symlink_to(file)
    return file


def pipe(folder: Path) -> Path:
    file = a_file(folder)
    file.unlink()
    os.mkfifo(file)
    return file


def pipe_for_manifest(folder: Path) -> Path:
    file = folder / "checkpoint.json"
    file.unlink()
    os.mkfifo(file)
    return file


def sign_manifest(change: Callable[[dict], Any]) -> Callable[[Path], Path]:
    """Change a manifest and update its digest."""

    def damage(folder: Path) -> Path:
        file = folder / "checkpoint.json"
        values = json.loads(file.read_text())
        values.pop("sha256")
        change(values)
        values["sha256"] = _digest(values)
        file.write_text(json.dumps(values))
        return file

    return damage


def change_manifest(change: Callable[[dict], None]) -> Callable[[Path], Path]:
    def damage(folder: Path) -> Path:
        file = folder / "checkpoint.json"
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))
        return file

    return damage


def replace_manifest(text: str | None) -> Callable[[Path], Path]:
    def damage(folder: Path) -> Path:
        file = folder / "checkpoint.json"
        file.unlink() if text is None else file.write_text(text)
        return file

    return damage


DAMAGES = {
    "cut off": (cut_off, r"\d,\d{3} .*\d,\d{3} bytes"),
    "altered": (alter, "SHA-256"),
    "longer": (lengthen, r"\d,\d{3} bytes.*\d,\d{3}"),
    "missing": (delete, "missing"),
    "foreign": (add, "foreign"),
    "manifest missing": (replace_manifest(None), "missing"),
    "manifest cut off": (replace_manifest('{"format": 1,'), ""),
    "manifest of another kind": (replace_manifest("[1]"), ""),
    "linked out": (link_out, "symbolic link .*/"),
    "a folder linked out": (link_folder_out, "symbolic link .*/"),
    "linked to itself": (link_in_a_circle, ""),
    "a pipe": (pipe, "regular file"),
    "manifest linked out": (link_manifest_out, "symbolic link .*/"),
    "manifest a pipe": (pipe_for_manifest, "regular file"),
    "manifest nested deep": (replace_manifest("[" * 100_000), ""),
    "manifest without files": (sign_manifest(lambda values: values.pop("files")), ""),
    "manifest with files of no bytes": (
        sign_manifest(lambda values: values["files"].update(a={"bytes": "8", "sha256": ""})),
        "",
    ),
    "manifest with a number of settings": (
        sign_manifest(lambda values: values["about"].update(settings=3)),
        "",
    ),
    "manifest of a negative step": (
        sign_manifest(lambda values: values["about"].update(step=-1)),
        "",
    ),
    "manifest altered": (
        change_manifest(lambda values: values["about"].update(step=21)),
        "SHA-256",
    ),
    "later format": (
        change_manifest(lambda values: values.update(format=2)),
        "format 2.* format 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_error_of_a_damaged_checkpoint_names_the_file(own: Path, damage: str) -> None:
    do, text = DAMAGES[damage]
    file = do(own / "00000020").relative_to(own / "00000020").as_posix()
    match = rf"step 20 .*{own} .*{re.escape(file)} .*{text}"
    with pytest.raises(CheckpointError, match=match) as error:
        restore(own)
    assert (error.value.step, error.value.file) == (20, file)
    advice = f"step 10 .*\n  mv {own}/00000020 {own.parent}/damaged-00000020"
    assert re.search(advice, str(error.value))
    # Run the command of the error.
    os.system(str(error.value).splitlines()[-1])
    check_same(restore(own).state, 10)


@pytest.mark.slow
def test_every_flipped_bit_is_detected(own: Path) -> None:
    """Flip one bit of each file in turn."""
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


def test_error_suggests_no_checkpoint_if_all_are_damaged(own: Path) -> None:
    alter(own / "00000010")
    cut_off(own / "00000020")
    with pytest.raises(CheckpointError, match=r"step 20.*arrays/_METADATA(?!.*\bmv )"):
        restore(own)


def test_renamed_step_folder_is_refused(own: Path) -> None:
    (own / "00000020").rename(own / "00000200")
    with pytest.raises(CheckpointError, match="step 200 .*00000200 .*step 20"):
        restore(own)
