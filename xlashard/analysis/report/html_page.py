"""View of reports as HTML: self-contained pages, and cards for notebooks.

The content security policy of a page blocks every request, and every script but its own.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from xlashard.analysis.report.cells import Content, Span, TableCell, join_cell
from xlashard.analysis.report.markdown import format_markdown
from xlashard.analysis.report.parts import (
    Column,
    Head,
    PagePanel,
    Section,
    distinct_names,
    list_ids,
    make_id,
)
from xlashard.analysis.report.templating import make_environment
from xlashard.errors import ArgumentError
from xlashard.support.formatting import in_bytes, in_seconds, printable

MOST_ROWS = 1000
"""Maximum number of table rows, which keeps browsers responsive."""

_SEARCHED = 8
"""Rows beyond which a table has a field to search in it."""

_LONGEST_LINE = 64
"""Longer source lines break; in characters."""

_BREAKS = re.compile(r"(?<=.)[/,×](?=.)|\](?=\[)|[^/,\[\]\s]{40}(?=[^/,\[\]\s])", re.DOTALL)
"""Positions where a line may break: after separators, and within a name that no column holds."""


@dataclass(frozen=True)
class _Placed:
    """PagePanel with the start of the ids in it.

    Attributes:
        id: Its id.
        panel: The panel.
        prefix: Start of the ids of its sections.
    """

    id: str
    panel: PagePanel
    prefix: str

    @property
    def parts(self) -> Iterator[tuple[str, Head | Section[Any]]]:
        """Yield the parts that a page shows, with their ids."""
        shown = [
            part
            for part in self.panel.parts
            if isinstance(part, Head)
            or (isinstance(part, Section) and part.view != "terminal" and part.is_shown)
        ]
        ids = ("summary" if isinstance(part, Head) else part.id for part in shown)
        for id, part in zip(distinct_names(ids), shown, strict=True):
            yield f"{self.prefix}{id}", part

    @property
    def markdown(self) -> str:
        """Return the head and the main sections as Markdown: those that the page doesn't fold."""
        parts = self.panel.parts
        return format_markdown(p for p in parts if isinstance(p, Head) or not p.is_folded)


def render_page(panels: Sequence[PagePanel], kind: str, footer: str = "", title: str = "") -> str:
    """Return a page of reports, to be written in UTF-8.

    The page is self-contained, makes no requests, and follows the light or dark theme of the
    system. Without scripts its tables neither sort nor filter.

    Args:
        panels: The reports.
        kind: Kind of the reports.
        footer: Words at its bottom.
        title: Title of the page; empty for the name of the first panel.

    Raises:
        ArgumentError: If there is no panel.
    """
    if not panels:
        raise ArgumentError("reports is empty: write page(report)")
    script = _asset("page.js")
    ids = list_ids(panel.name for panel in panels)
    several = len(panels) > 1
    placed = [
        _Placed(id, panel, f"{id}." if several else "")
        for id, panel in zip(ids, panels, strict=True)
    ]
    return (
        make_page_environment()
        .get_template("page.html")
        .render(
            title=title or panels[0].name,
            kind=kind,
            footer=footer,
            digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=_asset("shared.css") + _asset("page.css"),
            script=script,
            panels=placed,
            data=[
                (p.id, _file_name(p.panel.name), _json(p.panel.data))
                for p in placed
                if p.panel.data
            ],
            summaries=[(p.id, _json(p.markdown)) for p in placed],
        )
    )


def render_card(parts: Iterable[Head | Section[Any]]) -> str:
    """Return the head of a report as an element for notebooks; without key figures its tables too.

    Args:
        parts: Heads and sections.
    """
    parts = list(parts)
    heads = [part for part in parts if isinstance(part, Head)]
    tables = [part for part in parts if isinstance(part, Section) and part.short_rows]
    if any(head.figures for head in heads):
        tables = []
    shown = [table for table in tables if table.view in ("all", "terminal")]
    style = _asset("notebook.css") + _asset("shared.css")
    return (
        make_page_environment()
        .get_template("card.html")
        .render(heads=heads, tables=shown, style=style)
    )


@lru_cache(maxsize=16)
def _asset(name: str) -> Markup:
    return Markup(files(__package__).joinpath("assets", name).read_text(encoding="utf-8"))


def _json(data: Any) -> Markup:
    """Return JSON, escaped so that no text ends its script element."""
    return Markup(json.dumps(data).replace("<", "\\u003c"))


def _file_name(name: str) -> str:
    return f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)}.json"


@lru_cache(maxsize=1)
def make_page_environment() -> Environment:
    """Return the environment of the templates; text is escaped where it is inserted."""
    environment = make_environment(
        __package__ or "",
        finalize=lambda value: (
            printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )
    environment.globals.update(MOST_ROWS=MOST_ROWS, SEARCHED=_SEARCHED)
    environment.filters.update(
        bytes=in_bytes,
        cell=cell_html,
        is_head=lambda part: isinstance(part, Head),
        pixels=lambda number: f"{number:.2f}".rstrip("0").rstrip("."),
        printable=printable,
        seconds=in_seconds,
        choices=_filter_choices,
        sums=_sums,
        rows=_rows,
        text=user_text,
    )
    return environment


def user_text(text: str, name: str = "bdi", *, whole: bool = False, title: str = "") -> Markup:
    """Return an element for text from the user's program, such as a path.

    The text is isolated from its surroundings for bidirectional text, and may break after
    separators.

    Args:
        text: The text.
        name: Name of the element; elements other than `bdi` get `dir="auto"`.
        whole: Whether line breaks are suppressed.
        title: Tooltip.
    """
    direction = "" if name == "bdi" else ' dir="auto"'
    tip = f' title="{escape(printable(title))}"' if title else ""
    shown = printable(text)
    parts = [shown] if whole else _BREAKS.sub("\\g<0>\0", shown).split("\0")
    return Markup(f"<{name}{direction}{tip}>{Markup('<wbr>').join(parts)}</{name}>")


_ELEMENTS = {
    "kind": "<b>{}</b>",
    "strong": "<b>{}</b>",
    "quiet": '<span class="note">{}</span>',
    "tag": ' <span class="tag">{}</span>',
    "good": '<span class="good">{}</span>',
    "bad": '<span class="bad">{}</span>',
    "warn": '<span class="warns">{}</span>',
    "note": '<div class="note">{}</div>',
    "source": '<details class="source"><summary title="The lines when this report was made">source'
    "</summary><pre><code>{}</code></pre></details>",
    "block": "<pre><code>{}</code></pre>",
    "link": '<a href="#{tip}">{}</a>',
    "choice": '<button type="button" class="shows needs-script" value="{tip}">{}</button>',
}
"""Elements of styles, with the text in place of the braces."""


def cell_html(content: Content) -> Markup:
    """Return the elements of a cell."""
    return Markup("").join(map(_span_html, join_cell(content).spans))


def _span_html(span: Span) -> Markup:
    text, style = span.text, span.style
    match style:
        case "":
            return escape(printable(text))
        case "bar":
            width = f"{min(1.0, max(0.0, span.share)):.1%}"
            return Markup('<i class="mini {}"><i style="width:{}"></i></i>').format(span.tip, width)
        case "name":
            return user_text(text)
        case "path" | "code":
            return user_text(text, "code", title=span.tip)
        case "operation":
            return user_text(text, "span", title=span.tip)
        case "line":
            # A line is whole, unless no column has room for it.
            kind = "line" if len(text) <= _LONGEST_LINE else "path"
            inside, tip = user_text(text), printable(span.tip)
            return Markup('<code class="{}" title="{}">{}</code>').format(kind, tip, inside)
    inside = user_text(text) if style in ("note", "link") else escape(printable(text))
    return Markup(_ELEMENTS[style]).format(inside, tip=printable(span.tip))


def _filter_choices(section: Section[Any]) -> dict[str, list[str]]:
    """Return the values to filter a table by, where they are several."""
    choices = {
        name: sorted({value for row in section.rows for value in values(row)})
        for name, values in section.filters.items()
    }
    return {name: values for name, values in choices.items() if len(values) > 1}


def _sums(section: Section[Any]) -> list[Column[Any]]:
    """Return the columns of which a filtered table shows the sums."""
    return [column for column in section.page_columns if column.style in ("bytes", "seconds")]


def _rows(section: Section[Any], id: str, rows: Sequence[Any]) -> Iterator[Markup]:
    """Yield the rows of a table."""
    columns = section.page_columns
    cells = [[column.cell(row) for column in columns] for row in rows]
    names = [
        section.row_name(row) if section.row_name else _first_text(columns, row_cells)
        for row, row_cells in zip(rows, cells, strict=True)
    ]
    sums = [n for n, column in enumerate(columns) if column.style in ("bytes", "seconds")]
    for row, row_cells, name in zip(rows, cells, distinct_names(map(make_id, names)), strict=True):
        data = {name: "|".join(values(row)) for name, values in section.filters.items()}
        if section.filters:
            data["sums"] = "|".join(str(row_cells[n].key or 0) for n in sums)
        if key := section.light_key(row):
            data["lights"] = key
        data["search"] = _search_text(columns, row_cells)
        attributes = "".join(f' data-{key}="{escape(printable(v))}"' for key, v in data.items())
        marked = ' class="unasked"' if section.is_marked(row) else ""
        inside = Markup("").join(map(_table_cell, columns, row_cells))
        start = f'<tr role="row" id="{id}.{escape(name)}"{marked}{attributes}>'
        yield Markup(start) + inside + Markup("</tr>")


def _first_text(columns: Sequence[Column[Any]], cells: Sequence[TableCell]) -> str:
    texts = (c.text for column, c in zip(columns, cells, strict=True) if column.name[:1] != ">")
    return next(filter(None, texts), "row")


def _search_text(columns: Sequence[Column[Any]], cells: Sequence[TableCell]) -> str:
    words = [
        " ".join(filter(None, (span.text, span.tip)))
        for column, cell in zip(columns, cells, strict=True)
        if not column.name.startswith(">")
        for span in cell.spans
        if span.style != "source"
    ]
    return " ".join(words)


def _table_cell(column: Column[Any], cell: TableCell) -> Markup:
    key = cell.text if cell.key is None else cell.key
    number = ' class="number"' if column.name.startswith(">") else ""
    return Markup(f'<td role="cell"{number} data-label="{{}}" data-value="{{}}">{{}}</td>').format(
        column.label, printable(str(key)) if cell else "", cell_html(cell)
    )
