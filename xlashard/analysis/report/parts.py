"""Sections of a report: its head, and tables that are described once for every view."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from xlashard.analysis.report.cells import (
    CellStyle,
    Content,
    TableCell,
    find_formatter,
    format_cell,
    join_cell,
    read_value,
)
from xlashard.support.formatting import printable

type Severity = Literal["", "fits", "costly", "not"]
"""Colour of a report or section: none; all is well; something is wasted; it doesn't work."""

WIDE = 100
"""Minimum width of a terminal for redundant columns."""


@dataclass(frozen=True)
class Column[T]:
    """Column of a table.

    Attributes:
        name: Its name, with ">" before that of a number.
        value: Returns the value of a row, to show, to sort and to search by, or its cell; or the
            name of an attribute of rows, or of their attributes: `memory.total_bytes`.
        style: Style of its cells.
        tip: Tooltip of its head on a page.
        on_page: False for a column that only `printed` of its section uses.
    """

    name: str
    value: Callable[[T], Any] | str
    style: CellStyle = "words"
    tip: str = ""
    on_page: bool = True

    @property
    def label(self) -> str:
        """Its name on a page, where each column has one: its tooltip for want of a name."""
        return self.name.removeprefix(">").strip() or self.tip

    def cell(self, row: T) -> TableCell:
        """Return the cell of a row."""
        return format_cell(read_value(row, self.value), self.style)


@dataclass(frozen=True)
class Section[T]:
    """Section of a report: a heading, and a table or a figure.

    Attributes:
        id: Name of the section in links to it, unique in a report.
        title: Its title.
        note: Words beside the title.
        summary: Words above the table on a page, with `{count}` and `{total}` of the rows in a
            text; a cell is shown without rows, too.
        columns: Columns of the table; those that are empty in all rows are left out. The first one
            of an amount is summed up.
        rows: Rows of the table. A section without rows is left out, unless it has a figure or is
            kept.
        printed: Columns of the table in a terminal: names of `columns` between bars, or headings
            with the cell, as in `a | b | of={line: }{operation}`, where `{name}` stands for a
            column, and `{name:text}` adds a text to it where it is not empty; empty for all.
        widths: Minimum width of the terminal for some columns, by heading.
        merged: Merges or omits rows for short views: a terminal, and Markdown.
        row_name: Returns the name of a row in links to it; by default its first text.
        is_marked: Returns whether a row is worth a look.
        light_key: Returns a key of a row: a page lights everything of the key that one points at.
        filters: Values of a row that a page filters by, by their name.
        whole_paths: Heading of the column whose paths get the room that others leave, and are
            written whole where they would be ambiguous.
        most: Rows that a short view shows.
        more_words: Words for the others.
        rest: Sentences below the table.
        figure: Drawing on a page; `template` names its template.
        severity: Its colour on a page.
        view: The views that show it; `full` for pages and terminals that show every row.
        is_folded: Whether a page folds the table.
        is_narrow: Whether half of the width of a page does.
        is_kept: Whether the heading is shown without rows.
    """

    id: str
    title: str
    note: str = ""
    summary: str | TableCell = ""
    columns: tuple[Column[T], ...] = ()
    rows: Sequence[T] = ()
    printed: str = ""
    widths: Mapping[str, int] = field(default_factory=dict)
    merged: Callable[[Sequence[T]], Sequence[T]] | None = None
    row_name: Callable[[T], str] | None = None
    is_marked: Callable[[T], bool] = lambda row: False
    light_key: Callable[[T], str] = lambda row: ""
    filters: Mapping[str, Callable[[T], Iterable[str]]] = field(default_factory=dict)
    whole_paths: str = ""
    most: int = 8
    more_words: str = "more"
    rest: Sequence[str] = ()
    figure: Any = None
    severity: Severity = ""
    view: Literal["all", "page", "terminal", "full"] = "all"
    is_folded: bool = False
    is_narrow: bool = False
    is_kept: bool = False

    def with_rows(self, rows: Sequence[T]) -> Self:
        """Return the section with rows."""
        return replace(self, rows=rows)

    @property
    def short_rows(self) -> Sequence[T]:
        """Rows of a short view, merged."""
        return self.rows if self.merged is None else self.merged(self.rows)

    @property
    def is_shown(self) -> bool:
        """True if a page has something to show: rows, a figure, or a sentence of its own."""
        return bool(self.rows or self.figure or self.is_kept or isinstance(self.summary, TableCell))

    @property
    def page_columns(self) -> list[Column[T]]:
        """Columns of a table that has room for all, but for the empty ones."""
        return [
            column for column in self.columns if column.on_page and any(map(column.cell, self.rows))
        ]

    @property
    def total_column(self) -> Column[T] | None:
        """Column that is summed up: the first one of bytes or seconds."""
        return next((c for c in self.columns if c.style in ("bytes", "seconds", "flop")), None)

    def format_total(self, rows: Sequence[T]) -> str:
        """Return the sum of the rows; empty without a column to sum up."""
        column = self.total_column
        formatter = None if column is None else find_formatter(column.style)
        if column is None or formatter is None:
            return ""
        return formatter(sum(float(column.cell(row).key or 0) for row in rows))

    @property
    def lead(self) -> TableCell:
        """Words above the table on a page."""
        if isinstance(self.summary, TableCell):
            return self.summary
        count, total = f"{len(self.rows):,}", self.format_total(self.rows)
        return join_cell(self.summary.format(count=count, total=total))


@dataclass(frozen=True)
class KeyFigure:
    """Figure at the head of a page.

    Attributes:
        name: Its name.
        text: The figure.
        value: Its value.
        note: What it is a figure of.
    """

    name: str
    text: str
    value: float | str
    note: str = ""


@dataclass(frozen=True)
class Head:
    """Head of a report.

    Attributes:
        title: What it is a report of.
        place: Its devices, mesh and partitioner.
        facts: Main facts by a word, as sentences, which pages show where there are no key figures;
            without facts, other views show the key figures.
        headline: The main fact, on a page.
        badges: Words of the outcome on a page, each with its colour and tooltip.
        worth: The code change that is most worth doing, with its price; empty without one.
        notes: What limits the report, by a word.
        figures: Key figures of a page.
        figure: Drawing on a page.
        severity: Its colour.
        is_line: Whether it is a line above the report that follows, such as its caller.
        is_outer: Whether the heads that follow are of its parts.
    """

    title: str
    place: Sequence[str] = ()
    facts: Sequence[tuple[str, Content]] = ()
    headline: str = ""
    badges: Sequence[tuple[str, str, str]] = ()
    worth: str = ""
    notes: Sequence[tuple[str, TableCell]] = ()
    figures: Sequence[KeyFigure] = ()
    figure: Any = None
    severity: Severity = ""
    is_line: bool = False
    is_outer: bool = False

    @property
    def sentences(self) -> Sequence[tuple[str, Content]]:
        """Main facts by a word, or the key figures."""
        return self.facts or [(f.name, f"{f.text} {f.note}".rstrip()) for f in self.figures]


@dataclass(frozen=True)
class MemoryBar:
    """Bar of a device's memory.

    Attributes:
        parts: Bytes of what takes it, by name.
        total: Bytes that are used.
        available: Bytes that a program may use; None if they are unknown.
    """

    parts: tuple[tuple[str, int], ...]
    total: int
    available: int | None = None

    template = "memory_bar.html"

    @property
    def width(self) -> int:
        """Bytes of the whole bar."""
        return max(self.total, self.available or 0) or 1

    @property
    def spare(self) -> int:
        """Bytes that are free; negative for those that are missing."""
        return 0 if self.available is None else self.available - self.total


def distinct_names(names: Iterable[str], repeated: str = "{}-{}") -> Iterator[str]:
    """Yield names of which repeated ones end with their number.

    Args:
        names: The names.
        repeated: Format of a name with its number.

    Example:
        >>> list(distinct_names(["step", "loss", "step"]))
        ['step', 'loss', 'step-2']
    """
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else repeated.format(name, seen[name])


@dataclass(frozen=True)
class PagePanel:
    """Part of a page that is shown at once; a page of several has a tab for each.

    Attributes:
        name: Its name.
        parts: Heads and sections.
        data: Plain values that the page offers as JSON; None for nothing.
    """

    name: str
    parts: Sequence[Head | Section[Any]]
    data: Any = None


def make_id(text: str) -> str:
    """Return a text as an id for links.

    Example:
        >>> make_id("state['params']['w']")
        'state-params-w'
    """
    return re.sub(r"[^\w.]+", "-", printable(text))[:80].strip("-")


def list_ids(names: Iterable[str]) -> list[str]:
    """Return distinct ids for names."""
    return list(distinct_names(make_id(name) or "report" for name in names))
