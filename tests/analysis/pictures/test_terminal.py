"""Pictures in a terminal."""

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import xlashard
from tests.analysis.pictures.cases import PICTURES
from tests.analysis.pictures.pods import Pod, PodDevice, pod
from tests.analysis.pictures.specs import specs
from tests.goldens import check_golden, join_sections
from xlashard import AbstractMesh, NamedSharding, P
from xlashard.analysis.pictures.picture_plan import BLANK, COLOURS, INK, THICK, THIN, Borders
from xlashard.analysis.pictures.picture_text import runs_text
from xlashard.geometry import Runs, Tiling

GOLDENS = Path(__file__).parent / "goldens"


def shown(picture, width, **settings):
    console = Console(file=io.StringIO(), width=width, **settings)
    console.print(picture)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_pictures_as_text(width, update_goldens):
    texts = {name: shown(xlashard.visualize(x, s), width) for name, (x, s) in PICTURES.items()}
    check_golden(GOLDENS / f"{width}.txt", join_sections(texts), update=update_goldens)


def test_pictures_in_ascii(update_goldens):
    class OldTerminal(io.StringIO):
        encoding = "latin-1"

    def in_ascii(x, sharding):
        console = Console(file=OldTerminal(), width=80)
        console.print(xlashard.visualize(x, sharding))
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    texts = {name: in_ascii(x, s) for name, (x, s) in PICTURES.items()}
    assert all(text.isascii() for text in texts.values())
    kept = ("rows and columns", "hosts", "copies across hosts", "65,536 devices")
    some = {name: texts[name] for name in kept}
    check_golden(GOLDENS / "ascii.txt", join_sections(some), update=update_goldens)


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("width", [60, 80, 133, 200])
def test_no_line_is_wider_than_the_terminal(name, width):
    text = shown(xlashard.visualize(*PICTURES[name]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [10, 20, 40])
def test_a_terminal_too_narrow_cuts_lines_off(width):
    text = shown(xlashard.visualize(*PICTURES["65,536 devices"]), width)
    assert max(map(len, text.splitlines())) <= width


def test_a_wider_terminal_shows_more():
    picture = xlashard.visualize(*PICTURES["65,536 devices"])
    few, many = (shown(picture, width).count("#") for width in (60, 200))
    assert few < many


@pytest.mark.slow
@settings(max_examples=40)
@given(specs(), st.integers(60, 160), st.integers(2, 12), st.integers(1, 64))
def test_any_tiling_of_any_rank_is_drawn(case, width, most, per_host):
    grid, spec, ndim = case
    tiling = Tiling.from_spec(grid, spec, ndim)
    devices = [PodDevice(i, i // per_host) for i in range(grid.size)]
    picture = xlashard.visualize((24,) * ndim, Pod(devices, tiling), max_tiles=most)
    text = shown(picture, width)
    assert max(map(len, text.splitlines())) <= width
    assert len(list(ElementTree.fromstring(picture.to_svg()).iter())) > 4
    assert "TPU 0" in text or " 0" in text


def test_every_tile_has_its_background_colour():
    picture = xlashard.visualize(*PICTURES["rows and columns"])
    text = shown(picture, 80, force_terminal=True, color_system="truecolor")
    found = set(re.findall(r"48;2;(\d+);(\d+);(\d+)", text))
    assert {"#" + "".join(f"{int(n):02x}" for n in rgb) for rgb in found} == set(COLOURS)


def test_sixteen_colours_are_enough_for_eight_tiles():
    picture = xlashard.visualize(*PICTURES["rows and columns"])
    text = shown(picture, 80, force_terminal=True, color_system="standard")
    assert len(set(re.findall(r"\x1b\[30;(\d+)m", text))) == 8


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_no_color_and_dumb_terminals_disable_colour(variable, monkeypatch):
    monkeypatch.setenv(variable, {"NO_COLOR": "1", "TERM": "dumb"}[variable])
    picture = xlashard.visualize(*PICTURES["copies across hosts"])
    text = shown(picture, 80, force_terminal=True)
    assert not re.search(r"\x1b\[[0-9;]*[34]8?[;m]\d", text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    # Words and lines show replicas and hosts.
    assert "TPU 0, 4, 8, 12" in plain and "hosts 0–3" in plain and "┃" in plain


def test_hosts_are_separated_by_lines_without_colour():
    text = shown(xlashard.visualize(*PICTURES["hosts side by side"]), 80)
    rows = [line for line in text.splitlines() if "TPU" in line and "┃" in line]
    assert len(rows) == 4
    # Each column is another host: four cells, five thick lines, no thin lines.
    assert all(line.count("┃") == 5 and "│" not in line for line in rows)


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colour", [*COLOURS, BLANK])
def test_text_on_every_colour_has_contrast(colour):
    """At least 7, as the WCAG require at their highest level."""
    assert (luminance(colour) + 0.05) / (luminance(INK) + 0.05) >= 7


@pytest.mark.parametrize(
    ("weights", "character"),
    [((1, 1, 1, 1), "┼"), ((2, 2, 2, 2), "╋"), ((2, 1, 2, 1), "╂"), ((1, 2, 1, 2), "┿")],
)
def test_lines_meet_in_the_right_character(weights, character):
    up, right, down, left = weights
    borders = Borders(across=((1, 1), (left, right), (1, 1)), down=((1, up, 1), (1, down, 1)))
    assert borders.crossing(1, 1) == character
    assert borders.crossing(1, 1, ascii_only=True) == ("#" if THICK in weights else "+")


def test_corners():
    borders = Borders.of([[None]], has_hosts=False)
    assert borders.across == ((THIN,), (THIN,))
    corners = [borders.crossing(row, column) for row in (0, 1) for column in (0, 1)]
    assert corners == list("┌┐└┘")
    thick = Borders.of([[None]], has_hosts=True)
    assert [thick.crossing(row, column) for row in (0, 1) for column in (0, 1)] == list("┏┓┗┛")


def test_two_panel_dimensions_make_a_grid_of_panels():
    text = shown(xlashard.visualize(*PICTURES["four dimensions"]), 200)
    headings = [re.findall(r"\[\d.*?\]", line) for line in text.splitlines() if ", :, :]" in line]
    assert headings == [
        ["[0:4, 0:4, :, :]", "[0:4, 4:8, :, :]"],
        ["[4:8, 0:4, :, :]", "[4:8, 4:8, :, :]"],
    ]


def test_brackets_are_not_markup():
    mesh = AbstractMesh((2,), ("[red]",))
    assert "[red]" in shown(xlashard.visualize((2,), NamedSharding(mesh, P("[red]"))), 80)


def test_narrow_cells_name_fewer_devices():
    sharding = pod({"a": 64, "b": 8}, ("b",), 1, per_host=8)
    text = shown(xlashard.visualize((8,), sharding), 80)
    assert "│ 1, 9 … 505  │" in text
    assert "TPU 1, 9 … 505" in shown(xlashard.visualize((8,), sharding), 250)


@pytest.mark.parametrize(
    ("numbers", "most", "text"),
    [
        ([3], 9, "3"),
        ([3, 4], 9, "3, 4"),
        ([3, 4, 5, 9], 9, "3–5, 9"),
        ([0, 8, 16, 24], 20, "0, 8, 16, 24"),
        ([0, 8, 16, 24, 32], 20, "0, 8 … 32"),
        ([0, 1, 2, 8, 9, 10, 16, 17, 18], 20, "0–2, 8–10, 16–18"),
        ([0, 2, 3, 7, 11, 13], 20, "0, 2, 3, 7, 11, 13"),
        ([0, 2, 3, 7, 11, 13], 14, "0, 2, 3 … 13"),
        ([0, 2, 3, 7, 11, 13], 4, "0 +5"),
        ([], 4, ""),
    ],
)
def test_numbers_in_words(numbers, most, text):
    assert runs_text(Runs.of(numbers), most) == text
