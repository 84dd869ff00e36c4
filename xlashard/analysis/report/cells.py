"""Cells of reports: spans of text of a style, and the value that a table sorts by."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.analysis.report.excerpts import Excerpt, list_places
from xlashard.analysis.report.texts import line_text, near_text, operation_text, relative_path
from xlashard.support.formatting import FORMATTERS, Unit

type Style = Literal[
    "",
    "name",
    "path",
    "code",
    "line",
    "operation",
    "kind",
    "strong",
    "quiet",
    "tag",
    "good",
    "bad",
    "warn",
    "bar",
    "note",
    "choice",
    "block",
    "link",
    "source",
]
"""Style of a span: words of a report; a name, a path, or code of the user's program; a source line;
an operation; a kind of operation; emphasis; what is good, bad, or to look at; a bar of a share; a
link to an id. On pages only: a mark, a remark below the cell, a block of code, and a button that
filters a table, and excerpts of source files.
"""

PAGE_ONLY = frozenset({"note", "tag", "choice", "block", "source"})
"""Styles that a terminal lacks."""


class Span(NamedTuple):
    """Text of one style.

    Attributes:
        text: The text.
        style: Its style.
        tip: Tooltip on a page; of a link its target, of a button the value that it filters by.
        share: Filled part of a bar, from 0 to 1.
    """

    text: str
    style: Style = ""
    tip: str = ""
    share: float = 0.0


@dataclass(frozen=True)
class TableCell:
    """Content of a cell.

    Attributes:
        spans: Its text.
        key: Value to sort by; None for its text.
    """

    spans: tuple[Span, ...] = ()
    key: float | str | None = None

    @property
    def text(self) -> str:
        """Its text, as a terminal has it."""
        return "".join(span.text for span in self.spans if span.style not in PAGE_ONLY)

    def __bool__(self) -> bool:
        return any(span.text or span.style == "bar" for span in self.spans)


type Content = TableCell | Span | str | None
"""Part of a cell; None adds nothing."""


def join_cell(*parts: Content, key: float | str | None = None) -> TableCell:
    """Return one cell of several parts, in order."""
    return TableCell(tuple(span for part in parts for span in _spans(part)), key)


def _spans(part: Content) -> Iterable[Span]:
    if isinstance(part, TableCell):
        return part.spans
    if isinstance(part, Span):
        return (part,)
    return (Span(part),) if part else ()


type CellStyle = Style | Unit | Literal["words"] | Callable[[float], str]
"""Style of a cell: the unit of a number, or its formatter, or the style of a text; words may hold
names.
"""


def find_formatter(style: CellStyle) -> Callable[[float], str] | None:
    """Return the formatter of a number; None for the style of a text."""
    return {**FORMATTERS}.get(style) if isinstance(style, str) else style


def read_value[T](row: T, value: Callable[[T], Any] | str) -> Any:
    """Return a value of a row.

    Args:
        row: The row.
        value: Function of the row, or attributes such as `memory.total_bytes`, of which all but
            the last may be None.
    """
    if not isinstance(value, str):
        return value(row)
    read: Any = row
    for name in value.split("."):
        read = None if read is None else getattr(read, name)
    return read


def format_cell(value: Any, style: CellStyle = "words") -> TableCell:
    """Return a value as a cell.

    Args:
        value: A number, a text, a `SourceLine`, or a cell; None for an empty cell. In place of a
            number, a text stands as it is.
        style: Unit or formatter of a number, or style of a text.
    """
    if isinstance(value, TableCell):
        return value
    if isinstance(value, Span):
        return TableCell((value,))
    if value is None or value == "":
        return TableCell()
    if isinstance(value, SourceLine):
        return line_cell(value)
    formatter = find_formatter(style)
    if formatter is not None:
        is_number = not isinstance(value, str)
        return TableCell(
            (Span(formatter(value) if is_number else value),), value if is_number else None
        )
    text_style: Any = "name" if style == "words" else style
    return TableCell((Span(str(value), text_style),), value)


def line_cell(source: SourceLine | None) -> TableCell:
    """Return a source line; its tooltip has the whole path and the function."""
    if source is None:
        return TableCell()
    function = f" in {source.function}" if source.function else ""
    tip = f"{relative_path(source.file)}:{source.line}{function}"
    style: Style = "line" if source.in_user_file else "code"
    return TableCell((Span(line_text(source), style, tip),))


def source_cell(source: SourceLine | None, excerpts: Iterable[Excerpt] = ()) -> TableCell:
    """Return a source line; a page has an excerpt of the file, and that of its caller."""
    if source is None:
        return TableCell()
    texts = {(each.file, each.line): each.text for each in excerpts}
    shown = [f"{near_text(*p)}\n{texts[p]}" for p in list_places(source) if p in texts]
    return join_cell(line_cell(source), Span("\nfrom ".join(shown), "source") if shown else None)


def operation_cell(op_name: str, otherwise: str = "") -> TableCell:
    """Return an operation by its JAX name, or another text for one without."""
    text = operation_text(op_name) if op_name else otherwise
    return TableCell((Span(text, "operation", op_name),)) if text else TableCell()


def bar_cell(share: float, style: Style = "") -> TableCell:
    """Return a bar that is filled in part; its tooltip is its colour, of a style."""
    return TableCell((Span("", "bar", style, share),), share)
