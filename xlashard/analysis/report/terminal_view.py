"""View of reports in a terminal: tables, fitted to its width, by rich."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from string import Formatter
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from xlashard.analysis.report.cells import PAGE_ONLY, Content, Span, TableCell, join_cell
from xlashard.analysis.report.parts import WIDE, Head, Section
from xlashard.analysis.report.texts import short_path
from xlashard.support.formatting import plain_text

_STYLES: Mapping[str, str] = {
    "path": "green",
    "line": "bold",
    "operation": "dim",
    "kind": "cyan",
    "strong": "bold",
    "quiet": "dim",
    "good": "green",
    "bad": "red",
    "warn": "yellow",
}


@dataclass(frozen=True)
class PrintedPage:
    """Width and detail of a printed report.

    Attributes:
        width: Columns.
        is_full: Whether every row is shown.
        more: Code that shows every row.
    """

    width: int
    is_full: bool = False
    more: str = "report.print(all=True)"

    def text(self, cell: Content, longest_path: int | None = None) -> Text:
        """Return a cell; paths are shortened, by default to half a line."""
        most = longest_path or max(24, self.width // 2 - 12)
        text = Text()
        for span in join_cell(cell).spans:
            if span.style == "bar":
                text.append_text(self._bar(span))
            elif span.style == "path" and not self.is_full:
                text.append(short_path(span.text, most), "green")
            elif span.style not in PAGE_ONLY:
                text.append(span.text, _STYLES.get(span.style, ""))
        return text

    def _bar(self, span: Span) -> Text:
        width = 24 if self.width >= WIDE else 12
        filled = min(width, round(span.share * width))
        filled = max(filled, 1) if span.share > 0 else 0
        style = _STYLES.get(span.tip, "cyan")
        return Text.assemble(("█" * filled, style), ("░" * (width - filled), "dim"))


def render_parts(
    parts: Iterable[Head | Section[Any]], page: PrintedPage
) -> Iterator[RenderableType]:
    """Yield the parts of a report that a terminal shows."""
    is_below_table = False
    for part in parts:
        if isinstance(part, Head):
            if is_below_table:
                yield Text()
            yield render_head(part, page)
            is_below_table = False
        elif (section := render_section(part, page)) is not None:
            yield section
            is_below_table = True


def render_head(head: Head, page: PrintedPage) -> RenderableType:
    """Return the subject of a report, its devices and main facts."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    facts = [*head.sentences]
    if head.worth:
        style = "warn" if head.severity == "costly" else ""
        facts.append(("advice", join_cell("most worth doing: ", Span(head.worth, style))))
    for word, fact in (*facts, *head.notes):
        grid.add_row(word, page.text(fact))
    if not grid.rows and head.headline:
        grid.add_row(head.headline)
    title = Text.assemble((head.title, "bold"), "  ", (" · ".join(head.place), "dim"))
    return Group(title, Padding(grid, (0, 0, 0, 2))) if grid.rows else title


def render_section(section: Section[Any], page: PrintedPage) -> RenderableType | None:
    """Return a section; None if it has nothing to show."""
    if section.view == "page" or (section.view == "full" and not page.is_full):
        return None
    rows = section.rows if page.is_full else section.short_rows
    if not rows and not section.is_kept:
        return None
    shown = rows if page.is_full else rows[: section.most]
    note = f"  {section.note}" if section.note else ""
    parts: list[RenderableType] = [Text.assemble("\n", (section.title, "bold"), (note, "dim"))]
    if not section.title:
        return Text("\n" + "\n".join(section.rest), style="dim")
    if shown:
        parts.append(Padding(_fit_table(section, shown, page), (0, 0, 0, 2)))
    left = rows[len(shown) :]
    rest = list(section.rest)
    if left:
        total = section.format_total(left)
        rest.insert(
            0, f"and {len(left):,} {section.more_words}{total and f', {total}'}: {page.more}"
        )
    for sentence in rest:
        parts.append(Padding(Text(sentence, style="dim"), (0, 0, 0, 2), expand=False))
    return Group(*parts)


def _fit_table(section: Section[Any], rows: Sequence[Any], page: PrintedPage) -> "_Table":
    """Return the table of a section, without the columns for which the page is too narrow."""
    columns = _printed_cells(section, rows)
    room = 10**6 if page.is_full and page.width >= WIDE else page.width
    fitting = {n: c for n, c in columns.items() if section.widths.get(n, 0) <= room}
    name = section.whole_paths
    if name not in columns:
        return _Table(list(fitting), _texts(fitting, page))
    # The column of the width goes before paths become ambiguous.
    narrow = {n: c for n, c in columns.items() if n not in section.widths}
    for chosen in (fitting, narrow):
        others = {n: c for n, c in chosen.items() if n != name}
        used = sum(max(map(len, (n, *(cell.text for cell in c)))) + 2 for n, c in others.items())
        room = max(20, page.width - used - 4)
        short = [page.text(cell, room).plain for cell in columns[name]]
        if len(set(short)) == len({cell.text for cell in columns[name]}):
            return _Table(list(chosen), _texts(chosen, page, room))
    return _Table(list(narrow), _texts(narrow, page, 10**6))


def _printed_cells(section: Section[Any], rows: Sequence[Any]) -> dict[str, list[TableCell]]:
    """Return the cells of the columns of a terminal by heading, without the empty ones."""
    cells = {column.name: [column.cell(row) for row in rows] for column in section.columns}
    columns = cells
    if section.printed:
        by_name = {name.removeprefix(">"): column for name, column in cells.items()}
        columns = {
            heading: [
                _fill(template, {name: column[n] for name, column in by_name.items()})
                for n in range(len(rows))
            ]
            for heading, template in _parse_printed(section.printed)
        }
    return {heading: column for heading, column in columns.items() if any(column)}


def _parse_printed(printed: str) -> Iterator[tuple[str, str]]:
    """Yield headings with the templates of their cells."""
    for entry in printed.split(" | "):
        heading, _, template = entry.partition("=")
        yield heading, template or f"{{{heading.removeprefix('>')}}}"


def _fill(template: str, cells: Mapping[str, TableCell]) -> TableCell:
    """Return a template with a cell in place of each `{name}`; a line is followed by a colon."""
    parts: list[Content] = []
    for text, name, after, _ in Formatter().parse(template):
        cell = cells[name] if name else TableCell()
        is_line = bool(cell) and cell.spans[0].style == "line" and template != f"{{{name}}}"
        parts += [text, cell, after or (": " if is_line else "") if cell else ""]
    return join_cell(*parts)


def _texts(
    columns: Mapping[str, Sequence[TableCell]], page: PrintedPage, longest_path: int | None = None
) -> list[list[Text]]:
    if len(columns) > _MANY:
        page = replace(page, width=page.width * 2 // 3)
    rows = zip(*columns.values(), strict=True)
    return [[page.text(cell, longest_path) for cell in row] for row in rows]


_MANY = 5
"""Columns beyond which paths are shortened more."""

_GAP = 2
"""Columns of the terminal between two columns of a table."""

_LONGEST_WORD = 20
"""Longer words are broken where the terminal is narrow, but for `model.py:12`; in characters."""

_LINE = re.compile(r".+:\d+\W*")


@dataclass(frozen=True, eq=False)
class _Table:
    """Rich renderable of a table; a list where the terminal is too narrow for its columns.

    A column whose name begins with `>` is right-aligned and not wrapped.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        yield self._list() if widths is None else self._table(widths)

    def _widths(self, room: int) -> list[int] | None:
        """Return the width of each column; None if they break words."""
        columns = list(zip(map(Text, self._names()), *self.rows, strict=True))
        widths = [max(cell.cell_len for cell in cells) for cells in columns]
        room -= _GAP * (len(widths) - 1)
        # No word is broken where that fits.
        for longest in (max(room, _LONGEST_WORD), _LONGEST_WORD):
            least = [
                width
                if name.startswith(">")
                else min(width, max(_least_width(cell, longest) for cell in cells))
                for name, width, cells in zip(self.columns, widths, columns, strict=True)
            ]
            if sum(least) <= room:
                break
        else:
            return None
        while sum(widths) > room:
            widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            widths[widest] -= 1
        return widths

    def _names(self) -> list[str]:
        return [column.removeprefix(">") for column in self.columns]

    def _table(self, widths: Sequence[int]) -> Table:
        table = Table(
            box=None,
            padding=0,
            header_style="dim",
            pad_edge=False,
            show_header=any(self._names()),
        )
        for column, name, width in zip(self.columns, self._names(), widths, strict=True):
            if table.columns:
                table.add_column(width=_GAP)  # Releases of rich count padding in different ways.
            right = column.startswith(">")
            table.add_column(
                name,
                justify="right" if right else "left",
                no_wrap=right,
                overflow="fold",
                width=width,
            )
        for first, *others in self.rows:
            table.add_row(first, *chain.from_iterable((None, cell) for cell in others))
        return table

    def _list(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_column()
        grid.add_column(overflow="fold")
        for row in self.rows:
            cells = [
                Text.assemble((f"{name} ", "dim") if name else "", cell)
                for name, cell in zip(self._names(), row, strict=True)
                if cell
            ]
            grid.add_row("–", Text(" · ").join(cells))
        return grid


def _least_width(cell: Text, longest: int) -> int:
    """Return the columns that a cell needs so that no line's name, or shorter word, is broken."""
    words = [(word, cell_len(word)) for word in cell.plain.split()]
    return max(
        (size if _LINE.fullmatch(word) else min(size, longest) for word, size in words), default=0
    )


def section_text(section: Section[Any], width: int) -> str:
    """Return a section as plain text, without its blank line; "" if it has nothing to show."""
    shown = render_section(section, PrintedPage(width))
    return "" if shown is None else plain_text(shown, width).strip("\n")
