"""Files of figures: what is read from them, and which mistakes are found in them."""

from pathlib import Path

import pytest

from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.figures import read_chips

TABLE = """
[sources]
site = "https://example.com"
page = "{site}/c1"

[c1]
title = "Chip 1"
device_kind = ["C1", "{page}"]
devices_per_chip = [2, "{page}"]
hbm_bytes = [17_179_869_184, "{page}: 16 GiB"]
available_bytes = [8_000_000_000, "measured"]
hbm_bandwidth = [1_228e9, "{page}"]
peak_flops = [[["bfloat16", 275e12], ["float32", 19.5e12]], "{page}"]
host_bandwidth = [12.5e9, "{page}"]
"""


def read(text: str, folder: Path) -> tuple[Chip, ...]:
    path = folder / "chips.toml"
    path.write_text(text, "utf-8")
    return read_chips(path, Chip)


def test_chips_have_the_figures_and_sources_of_their_file(tmp_path: Path) -> None:
    (chip,) = read(TABLE, tmp_path)
    assert (chip.name, chip.title, chip.device_kind) == ("c1", "Chip 1", "C1")
    assert dict(chip.sources)["hbm_bytes"] == "https://example.com/c1: 16 GiB"
    assert chip.peak_flops == (("bfloat16", 275 * 10**12), ("float32", 19.5 * 10**12))
    assert hash(chip)


def test_numbers_are_integers_unless_they_have_a_decimal_point(tmp_path: Path) -> None:
    (chip,) = read(TABLE, tmp_path)
    assert repr(chip.hbm_bandwidth) == "1228000000000"
    assert repr(chip.host_bandwidth) == "12500000000.0"


MISTAKES = {
    "unknown key": ("title", "colour = ['red', '{page}']\ntitle", r"colour is unknown"),
    "missing figure": ("hbm_bytes", "# hbm_bytes", r"hbm_bytes is missing"),
    "missing title": ("title", "# title", r"title is missing"),
    "no source": ('[2, "{page}"]', "2", r"devices_per_chip is 2: expected \[value, source\]"),
    "a list without source": (', "{page}: 16 GiB"]', "]", r"hbm_bytes is \(17179869184,\)"),
    "an empty source": ('"measured"', "1", r"available_bytes is \(8000000000, 1\)"),
    "unknown source": ('"measured"', '"{mine}"', r"available_bytes has .* source 'mine'"),
}


@pytest.mark.parametrize(("old", "new", "problem"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_reported_with_its_table_and_key(
    old: str, new: str, problem: str, tmp_path: Path
) -> None:
    assert old in TABLE
    with pytest.raises(ValueError, match=rf"^c1\.{problem}"):
        read(TABLE.replace(old, new, 1), tmp_path)
