"""Draw a picture as SVG, as an HTML fragment for notebooks, and as a page, by templates.

The text of the SVG can be selected, each tile has a tooltip, and any background suits it.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import Environment

from xlashard.analysis.pictures.picture_plan import INK, THICK, Borders, Cell, Panel, Picture
from xlashard.analysis.pictures.picture_text import (
    devices_text,
    facts,
    hosts_text,
    index_text,
    panel_text,
    placed_text,
    title_text,
)
from xlashard.analysis.report.templating import make_environment
from xlashard.support.formatting import elided, shape_text

_LETTER = 7.25
"""Width of a character of the font, in pixels."""

_GAP = 24
_WIDEST = 1400
"""Panels stand side by side up to this width."""

_LONGEST_CELL = 24
_LONGEST_LINE = 110


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = make_environment(__package__ or "")
    environment.globals["INK"] = INK
    environment.filters.update(
        index_text=index_text,
        panel_text=panel_text,
        placed_text=placed_text,
        shape_text=shape_text,
        short="{:g}".format,
    )
    return environment


def render(template: str, **values: Any) -> str:
    """Return a template filled with values, which are escaped."""
    return _environment().get_template(template).render(values)


def svg_text(picture: Picture) -> str:
    """Return the picture as an SVG file, with its words and a light and a dark background."""
    title, sentences = title_text(picture.subject), list(facts(picture))
    rows = [title, *(f"{word:<9}{sentence}" for word, sentence in sentences)]
    sheet = _PixelGrid(picture, [elided(row, _LONGEST_LINE) for row in rows])
    return render("file.svg", title=title, facts=sentences, sheet=sheet)


def fragment(picture: Picture, value: str = "") -> str:
    """Return the picture and its words as one element that can stand anywhere in a page.

    Args:
        picture: The picture.
        value: A text of the array's value, to stand first.
    """
    return render(
        "fragment.html",
        title=title_text(picture.subject),
        facts=list(facts(picture)),
        sheet=_PixelGrid(picture),
        value=value,
    )


def page(picture: Picture) -> str:
    """Return a page with the picture and a table of its tiles."""
    cells = list(picture.cells)
    parts = (picture.rows, picture.columns, picture.panel_numbers)
    some = f" of {picture.num_tiles:,}" if any(part.left_out for part in parts) else ""
    return render(
        "page.html",
        title=title_text(picture.subject),
        body=fragment(picture),
        caption=f"{len(cells):,}{some} tiles",
        cells=cells,
        picture=picture,
    )


class _PixelGrid:
    """Coordinates of the picture, in pixels.

    Args:
        picture: The picture.
        head: Lines above the picture.
    """

    line, margin = 17, 8

    def __init__(self, picture: Picture, head: Sequence[str] = ()) -> None:
        self.picture = picture
        self.top = self.margin + (self.line * len(head) + 10 if head else 0)
        self.head = [(self.margin + self.line * n - 4, text) for n, text in enumerate(head, 1)]

    @property
    def width(self) -> float:
        """Width of the picture with its margins."""
        right = max(x for x, _ in self.places) + self.columns[-1]
        widths = (len(text) * _LETTER for _, text in self.head)
        return max(right, *widths, 0) + 2 * self.margin

    @property
    def height(self) -> float:
        """Height of the picture with its margins."""
        return self.top + self.places[-1][1] + self.rows[-1] + self.margin

    @cached_property
    def cell(self) -> tuple[float, float]:
        """Width and height of a tile."""
        picture = self.picture
        words = [w for cell in picture.cells for w in self.words(cell)]
        pairs = zip(picture.columns, picture.column_names, strict=False)
        words += [name for number, name in pairs if number is not None]
        return max(map(len, words)) * _LETTER + 18, 42 if picture.has_hosts else 32

    @cached_property
    def label(self) -> float:
        """Width of what stands left of the tiles."""
        if self.picture.row_dim is None:
            return 0
        return max(map(len, self.picture.row_names)) * _LETTER + 10

    @cached_property
    def columns(self) -> list[float]:
        """Left edges of the columns, and the right edge of the last one."""
        gap = len(self.picture.columns.left_out_text) * _LETTER + 12
        return _edges(self.label, self.cell[0], gap, list(self.picture.columns))

    @cached_property
    def rows(self) -> list[float]:
        """Top edges of the rows, and the bottom edge of the last one."""
        above = self.line * (bool(self.picture.panel_dims) + (self.picture.column_dim is not None))
        return _edges(above + 2, self.cell[1], self.line + 4, list(self.picture.rows))

    @cached_property
    def across(self) -> int:
        """Number of panels per line."""
        return self.picture.panels_across(int((_WIDEST + _GAP) // (self.columns[-1] + _GAP)))

    @cached_property
    def places(self) -> list[tuple[float, float]]:
        """Position of each panel; after omitted panels a new line starts."""
        width, height = self.columns[-1] + _GAP, self.rows[-1] + _GAP
        places = []
        x = y = 0.0
        for panel in self.picture.panels:
            if panel is None:
                y += height if x else 0
                places.append((0.0, y))
                x, y = 0.0, y + self.line + _GAP
                continue
            if x >= width * self.across:
                x, y = 0.0, y + height
            places.append((x, y))
            x += width
        return places

    @property
    def column_labels(self) -> list[tuple[float, float, str]]:
        """Range above each column, with its position."""
        pairs = zip(self.picture.column_names, pairwise(self.columns), strict=False)
        return [((left + right) / 2, self.rows[0] - 6, name) for name, (left, right) in pairs]

    @property
    def row_labels(self) -> list[tuple[float, float, str]]:
        """Range left of each row, with its position."""
        pairs = zip(self.picture.row_names, pairwise(self.rows), strict=False)
        return [(self.label - 7, (top + bottom) / 2 + 4, name) for name, (top, bottom) in pairs]

    def host_lines(self, panel: Panel) -> str:
        """Return the path between hosts, and around all of them."""
        borders = Borders.of(panel.cells, has_hosts=True)
        drawn = []
        for row, weights in enumerate(borders.across):
            for (left, right), weight in zip(pairwise(self.columns), weights, strict=True):
                if weight == THICK:
                    drawn.append(f"M{left:g} {self.rows[row]:g}H{right:g}")
        for weights, (top, bottom) in zip(borders.down, pairwise(self.rows), strict=True):
            for left, weight in zip(self.columns, weights, strict=True):
                if weight == THICK:
                    drawn.append(f"M{left:g} {top:g}V{bottom:g}")
        return "".join(drawn)

    def words(self, cell: Cell) -> list[str]:
        """Return the lines in a tile."""
        words = [devices_text(self.picture, cell, _LONGEST_CELL)]
        if self.picture.has_hosts:
            words.append(hosts_text(cell, _LONGEST_CELL))
        return words


def _edges(start: float, size: float, gap: float, row: Sequence[int | None]) -> list[float]:
    edges = [start]
    for number in row:
        edges.append(edges[-1] + (gap if number is None else size))
    return edges
