"""Pictures as SVG and as HTML."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import xlashard
from tests.analysis.pictures.cases import PICTURES
from tests.goldens import check_golden, check_no_others
from xlashard import AbstractMesh, NamedSharding, P
from xlashard.analysis.pictures.picture_plan import COLOURS

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).resolve().parents[3] / "docs" / "pictures"
IN_DOCS = {"copies.svg": "copies across hosts", "panels.svg": "three dimensions"}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Nesting(HTMLParser):
    """Checker that every element is closed in order, which collects their contents."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)


def parsed(html):
    parser = Nesting()
    parser.feed(html)
    parser.close()
    assert not parser.open
    return parser


@pytest.mark.parametrize("name", PICTURES)
def test_svg_has_every_label(name):
    picture = xlashard.visualize(*PICTURES[name])
    root = ElementTree.fromstring(picture.to_svg())
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    width, height = map(float, root.get("viewBox").split()[2:])
    cells = list(picture.plan.cells)
    tiles = [g for g in root.iter(f"{SVG}g") if g.get("class") == "tile"]
    assert len(tiles) == len(cells)
    for tile, cell in zip(tiles, cells, strict=True):
        assert tile.find(f"{SVG}rect").get("fill") == cell.colour
        tip = tile.find(f"{SVG}title").text
        ranges = [f"{c.start}:{c.stop}" for c in cell.index]
        assert all(r in tip or n in picture.plan.whole_dims for n, r in enumerate(ranges))
        assert str(cell.ids.first[0].start) in tip
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= width and float(text.get("y")) <= height
    title = root.find(f"{SVG}title").text
    assert title == root.get("aria-label") and title.startswith(str(picture).split("\n")[0][:20])


@pytest.mark.parametrize("name", PICTURES)
def test_svg_has_no_external_references(name):
    picture = xlashard.visualize(*PICTURES[name])
    for text in (picture.to_svg(), picture.to_html(), picture._repr_html_()):
        without_namespace = text.replace("http://www.w3.org/2000/svg", "")
        for word in ("http", "url(", "<script", "@import", "src=", "href=", " id="):
            assert word not in without_namespace


def test_files_set_a_colour_scheme_and_fragments_inherit_it():
    picture = xlashard.visualize(*PICTURES["rows and columns"])
    assert "prefers-color-scheme:dark" in picture.to_svg()
    fragment = picture._repr_html_()
    assert "<style" not in fragment and 'fill="currentColor"' in fragment
    assert "color-scheme: light dark" in picture.to_html()


@pytest.mark.parametrize("name", PICTURES)
def test_html_is_well_formed(name):
    picture = xlashard.visualize(*PICTURES[name])
    fragment = parsed(picture._repr_html_())
    assert fragment.tags[0] == "div" and fragment.tags.count("svg") == 1
    page = parsed(picture.to_html())
    cells = list(picture.plan.cells)
    assert page.tags[:2] == ["html", "head"]
    colours = [v for n, v in page.attributes if n == "style" and v.startswith("background:#")]
    assert colours == [f"background:{cell.colour}" for cell in cells]


def test_the_page_maps_devices_to_hosts():
    words = parsed(xlashard.visualize(*PICTURES["copies across hosts"]).to_html()).words
    assert "TPU 0 on host 0; 4 on host 1; 8 on host 2; 12 on host 3" in words
    assert "4 tiles" in words
    huge = parsed(xlashard.visualize(*PICTURES["65,536 devices"]).to_html()).words
    assert "64 of 65,536 tiles" in huge


def test_names_are_escaped():
    mesh = AbstractMesh((2,), ("<b>&\"'",))
    picture = xlashard.visualize((2,), NamedSharding(mesh, P("<b>&\"'")))
    assert "<b>&" in ElementTree.fromstring(picture.to_svg()).find(f"{SVG}title").text
    for html in (picture._repr_html_(), picture.to_html()):
        assert "b" not in parsed(html).tags


def test_a_fragment_is_small():
    html = xlashard.visualize(*PICTURES["rows and columns"])._repr_html_()
    assert len(html) < 6_000
    assert len(xlashard.visualize(*PICTURES["65,536 devices"])._repr_html_()) < 40_000


def test_host_lines_stand_between_hosts_only():
    one_host = xlashard.visualize(*PICTURES["rows and columns"]).to_svg()
    assert 'class="hosts"' not in one_host
    root = ElementTree.fromstring(xlashard.visualize(*PICTURES["hosts side by side"]).to_svg())
    (lines,) = [p for p in root.iter(f"{SVG}path") if p.get("class") == "hosts"]
    upright = re.findall(r"M([\d.]+) [\d.]+V", lines.get("d"))
    assert len(set(upright)) == 5 and len(upright) == 20


@pytest.mark.parametrize("file", IN_DOCS)
def test_pictures_in_the_documents_are_up_to_date(file, update_goldens):
    svg = xlashard.visualize(*PICTURES[IN_DOCS[file]]).to_svg()
    check_golden(DOCS / file, svg, update=update_goldens)


def test_the_documents_have_no_other_pictures(update_goldens):
    # Pages of preflights and of step times have tests of their own.
    steps = {f"step_times_{target}.svg" for target in ("gpu", "tpu")}
    check_no_others(DOCS, {*IN_DOCS, *steps, "preflight.png"}, update=update_goldens)


def test_the_palette_is_distinguishable():
    assert len(set(COLOURS)) == 8
