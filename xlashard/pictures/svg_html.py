"""Draw a picture as SVG, as an HTML fragment for notebooks, and as a page.

The text of the SVG can be selected, each tile has a tooltip, and any background suits it.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from itertools import pairwise

from xlashard.pictures.picture_plan import INK, THICK, Borders, Cell, Panel, Picture
from xlashard.pictures.picture_text import (
    devices_text,
    facts,
    hosts_text,
    index_text,
    panel_text,
    placed_text,
    title_text,
)

_LETTER = 7.25
"""Width of a character of the font, in pixels."""

_LINE = 17
_GAP = 24
_MARGIN = 8
_WIDEST = 1400
"""Panels stand side by side up to this width."""

_LONGEST_CELL = 24
_LONGEST_LINE = 110
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

# A page provides the background; a file brings its own, because viewers differ.
_PAPER = (
    "<style>.xlashard-picture{{color:#1f2328}}.xlashard-picture .paper{{fill:#fff}}"
    "@media(prefers-color-scheme:dark){{.xlashard-picture{{color:#e6edf3}}"
    ".xlashard-picture .paper{{fill:#0d1117}}}}</style>"
    '<rect class="paper" width="{width:.0f}" height="{height:.0f}" rx="6"/>'
)


def svg_text(picture: Picture, *, alone: bool) -> str:
    """Return the picture as an SVG element, without ids, scripts or anything from elsewhere.

    Args:
        picture: The picture.
        alone: For a file of its own: with the words above the grid, and colours for a light and a
            dark background. In a page the words are the page's.
    """
    sheet = _Sheet(picture)
    title = title_text(picture.subject)
    sentences = [f"{word}: {sentence}" for word, sentence in facts(picture)]
    top = _MARGIN
    head: list[str] = []
    width = sheet.size[0]
    if alone:
        rows = [title, *(f"{word:<9}{sentence}" for word, sentence in facts(picture))]
        short = [
            row if len(row) <= _LONGEST_LINE else row[: _LONGEST_LINE - 1] + "…" for row in rows
        ]
        for number, row in enumerate(short):
            top += _LINE
            weight = "" if number else ' font-weight="bold"'
            head.append(_text(_MARGIN, top - 4, row, f'{weight} xml:space="preserve"'))
        top += 10
        width = max(width, max(map(len, short)) * _LETTER)
    width, height = width + 2 * _MARGIN, top + sheet.size[1] + _MARGIN
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="xlashard-picture" role="img" '
            f'aria-label="{escape(title)}" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" style="max-width:100%;height:auto" '
            f'font-family="{_FONT}" font-size="12" fill="currentColor">',
            f"<title>{escape(title)}</title><desc>{escape('; '.join(sentences))}</desc>",
            _PAPER.format(width=width, height=height) if alone else "",
            *head,
            f'<g transform="translate({_MARGIN} {top})">',
            *sheet.panels(),
            "</g></svg>",
        ]
    )


class _Sheet:
    """Coordinates of the picture, in pixels."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture

    @cached_property
    def cell(self) -> tuple[float, float]:
        """Width and height of a tile."""
        picture = self.picture
        words = [w for cell in picture.cells for w in self._words(cell)]
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
        above = _LINE * (bool(self.picture.panel_dims) + (self.picture.column_dim is not None))
        return _edges(above + 2, self.cell[1], _LINE + 4, list(self.picture.rows))

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
                x, y = 0.0, y + _LINE + _GAP
                continue
            if x >= width * self.across:
                x, y = 0.0, y + height
            places.append((x, y))
            x += width
        return places

    @cached_property
    def size(self) -> tuple[float, float]:
        """Width and height of all panels together."""
        right = max(x for x, _ in self.places) + self.columns[-1]
        return right, self.places[-1][1] + self.rows[-1]

    def panels(self) -> Iterator[str]:
        """Return the elements of each panel."""
        for number, (panel, (x, y)) in enumerate(
            zip(self.picture.panels, self.places, strict=True)
        ):
            yield f'<g transform="translate({x:g} {y:g})">'
            if panel is None:
                rest = f"… {self.picture.panel_numbers.left_out:,} more panels …"
                yield _text(self.label, _LINE, rest, ' opacity="0.7"')
            else:
                yield from self._panel(number, panel)
            yield "</g>"

    def _panel(self, number: int, panel: Panel) -> Iterator[str]:
        picture = self.picture
        if picture.panel_dims:
            yield _text(self.label + 2, 11, panel_text(picture, number), ' font-weight="bold"')
        yield from self._names()
        # Common attributes are written once: there may be hundreds of cells.
        yield f'<g fill="{INK}" text-anchor="middle">'
        for row, cells in enumerate(panel.cells):
            for column, cell in enumerate(cells):
                yield self._tile(cell, row, column)
        yield "</g>"
        if picture.has_hosts:
            yield self._host_lines(panel.cells)

    def _names(self) -> Iterator[str]:
        """Return the ranges above the columns and left of the rows."""
        picture = self.picture
        style = ' text-anchor="middle" opacity="0.8"'
        for name, (left, right) in zip(picture.column_names, pairwise(self.columns), strict=False):
            yield _text((left + right) / 2, self.rows[0] - 6, name, style)
        style = ' text-anchor="end" opacity="0.8"'
        for name, (top, bottom) in zip(picture.row_names, pairwise(self.rows), strict=False):
            yield _text(self.label - 7, (top + bottom) / 2 + 4, name, style)

    def _tile(self, cell: Cell | None, row: int, column: int) -> str:
        left, right = self.columns[column : column + 2]
        top, bottom = self.rows[row : row + 2]
        middle, centre = (left + right) / 2, (top + bottom) / 2 + 4
        if cell is None:
            return _text(middle, centre, "…", ' fill="currentColor" opacity="0.7"')
        words = self._words(cell)
        first = centre - 7.5 * (len(words) - 1)
        lines = (
            _text(middle, first + 15 * n, word, ' font-weight="bold"' if not n else "")
            for n, word in enumerate(words)
        )
        tip = f"{index_text(self.picture, cell)} on {placed_text(self.picture, cell)}"
        return (
            f'<g class="tile"><title>{escape(tip)}</title>'
            f'<rect x="{left + 1.5:g}" y="{top + 1.5:g}" width="{right - left - 3:g}" '
            f'height="{bottom - top - 3:g}" rx="3" fill="{cell.colour}"/>'
            f"{''.join(lines)}</g>"
        )

    def _host_lines(self, cells: Sequence[Sequence[Cell | None]]) -> str:
        """Return the lines between hosts, and around all of them."""
        borders = Borders.of(cells, has_hosts=True)
        drawn = []
        for row, weights in enumerate(borders.across):
            for (left, right), weight in zip(pairwise(self.columns), weights, strict=True):
                if weight == THICK:
                    drawn.append(f"M{left:g} {self.rows[row]:g}H{right:g}")
        for weights, (top, bottom) in zip(borders.down, pairwise(self.rows), strict=True):
            for left, weight in zip(self.columns, weights, strict=True):
                if weight == THICK:
                    drawn.append(f"M{left:g} {top:g}V{bottom:g}")
        return (
            '<path class="hosts" fill="none" stroke="currentColor" stroke-width="2" '
            f'stroke-linecap="square" d="{"".join(drawn)}"/>'
        )

    def _words(self, cell: Cell) -> list[str]:
        words = [devices_text(self.picture, cell, _LONGEST_CELL)]
        if self.picture.has_hosts:
            words.append(hosts_text(cell, _LONGEST_CELL))
        return words


def _edges(start: float, size: float, gap: float, row: Sequence[int | None]) -> list[float]:
    edges = [start]
    for number in row:
        edges.append(edges[-1] + (gap if number is None else size))
    return edges


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{style}>{escape(text)}</text>'


# In a notebook nothing may reach beyond the fragment: styles stand on the elements themselves.
_ROW = 'style="background:none"'
_WORD = 'style="text-align:left;font-weight:normal;opacity:.7;padding:0 1em 0 0;border:0"'
_SENTENCE = 'style="text-align:left;padding:0;border:0"'
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }}
table.tiles {{ border-collapse: collapse; margin: 1.5em 0; }}
.tiles caption {{ text-align: left; opacity: .7; }}
.tiles td, .tiles th {{ border-bottom: 1px solid #8884; padding: .2em 1em; text-align: left; }}
.tiles td:first-child {{ font-family: ui-monospace, monospace; color: {ink}; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
_TABLE = """
<table class="tiles">
<caption>{caption}</caption>
<thead><tr><th>tile</th><th>shape</th><th>devices</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>"""


def fragment(picture: Picture, value: str = "") -> str:
    """Return the picture and its words as one element that can stand anywhere in a page.

    Args:
        picture: The picture.
        value: A text of the array's value, to stand first.
    """
    lines = [
        f"<tr {_ROW}><th {_WORD}>{escape(word)}</th><td {_SENTENCE}>{escape(sentence)}</td></tr>"
        for word, sentence in facts(picture)
    ]
    parts = [
        f'<pre style="margin:0 0 .5em;max-height:20em;overflow:auto">{escape(value)}</pre>'
        if value
        else "",
        f"<div><strong>{escape(title_text(picture.subject))}</strong></div>",
        f'<table style="border:0;margin:0;background:none">{"".join(lines)}</table>',
        svg_text(picture, alone=False),
    ]
    return f'<div class="xlashard-picture" style="overflow-x:auto">{"".join(parts)}</div>'


def page(picture: Picture) -> str:
    """Return a page with the picture and a table of its tiles."""
    cells = list(picture.cells)
    caption = f"{len(cells):,} of {picture.num_tiles:,} tiles" if _is_short(picture) else ""
    table = _TABLE.format(
        caption=caption or f"{len(cells):,} tiles", rows="\n".join(_rows(picture, cells))
    )
    return page_of(title_text(picture.subject), fragment(picture) + table)


def page_of(title: str, body: str) -> str:
    """Return a self-contained page.

    Args:
        title: Its title.
        body: The elements in it.
    """
    return _PAGE.format(title=escape(title), body=body, ink=INK)


def _is_short(picture: Picture) -> bool:
    return any(row.left_out for row in (picture.rows, picture.columns, picture.panel_numbers))


def _rows(picture: Picture, cells: list[Cell]) -> Iterator[str]:
    for cell in cells:
        shape = ",".join(str(cut.stop - cut.start) for cut in cell.index)
        yield (
            f'<tr><td style="background:{cell.colour}">{escape(index_text(picture, cell))}</td>'
            f"<td>[{shape}]</td><td>{escape(placed_text(picture, cell))}</td></tr>"
        )
