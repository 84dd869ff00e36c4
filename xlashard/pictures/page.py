"""A picture as HTML: a fragment for notebooks, and a page of its own."""

from collections.abc import Iterator
from html import escape

from xlashard.pictures.palette import INK
from xlashard.pictures.picture_plan import Cell, Picture
from xlashard.pictures.picture_text import facts, index_text, placed_text, title_text
from xlashard.pictures.svg import svg_text

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
