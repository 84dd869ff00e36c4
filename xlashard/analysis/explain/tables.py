"""Printed reports: their tables and headings, fitted to the console, and the text of cells."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from xlashard.analysis.explain.model import CollectiveReport, InnerValueReport, ValueReport
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.hlo.collectives import is_rematerialized
from xlashard.support.documents import ReportFormat, Schema, report_schema
from xlashard.support.formatting import Escaped, in_bytes, plain_text, typed
from xlashard.support.tracebacks import short_tracebacks

_LONGEST_FILE = 28
"""Longer paths of files are cut to their last two parts; in characters."""


def line_text(source: SourceLine) -> str:
    """Format a line as `model.py:12`, or `layers.py:7 from model.py:12` where that is ambiguous."""
    frames = (source, *(source.callers[i] for i in source.distinct))
    return " from ".join([near_text(frame.file, frame.line) for frame in frames])


def near_text(file: str, line: int) -> str:
    """Format a line with its path relative to the working folder, or the end of a long path."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if len(path.parts) > 2 and (path.is_absolute() or len(str(path)) > _LONGEST_FILE):
        path = Path(*path.parts[-2:])
    return f"{path}:{line}"


def operation_text(op_name: str) -> str:
    """Return the operation at the end of its JAX name.

    Example:
        >>> operation_text("step/transpose(jvp())/while/body/bd,df->bf/dot_general")
        'bd,df->bf, backward'
        >>> operation_text("step/jvp()/(reduce_sum:dot_general:dot_general)")
        'reduce_sum and 2 more'
        >>> operation_text("step/transpose(jvp())/checkpoint/rematted_computation/sin")
        'sin, rematerialized'
    """
    backward = ", backward" if "transpose(jvp" in op_name else ""
    backward = ", rematerialized" if is_rematerialized(op_name) else backward
    start = _group(op_name)
    if start is None:
        return _last(op_name) + backward
    first, *others = op_name[start + 1 : -1].split(":")
    return f"{_last(first)} and {len(others)} more{backward}"


def _group(op_name: str) -> int | None:
    """Return the start of a final `(a:b:c)`, the operations that XLA merged into one."""
    depth = 0
    for place in reversed(range(len(op_name))):
        depth += {")": 1, "(": -1}.get(op_name[place], 0)
        if depth == 0:
            is_part = op_name[place] == "(" and op_name[:place].endswith("/")
            return place if is_part and ":" in op_name[place:] else None
    return None


def _last(op_name: str) -> str:
    """Return the last part of a name, or the subscripts of an einsum."""
    *outer, last = op_name.split("/")
    scope = re.sub(r"^(?:\w+\()*|\)*$", "", outer[-1]) if outer else ""
    return scope if "->" in scope else last


def groups_text(collective: CollectiveReport) -> str:
    """Format the axes, or the groups with the first one: `4 groups of 2 devices: 0,3 …`."""
    groups = collective.groups
    if not groups:
        return collective.along
    first = ",".join(map(str, groups[0][:4])) + (",…" if len(groups[0]) > 4 else "")
    return f"{collective.along}: {first}{' …' if len(groups) > 1 else ''}"


def types_text(collective: CollectiveReport) -> str:
    """Format types of operands and results: `f32[8,16] → f32[16,16]`."""
    one, other = map(_types, (collective.operands, collective.results))
    return one if one == other else f"{one} → {other}"


def _types(types: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(types))
    if len(distinct) == 1:
        return distinct[0] if len(types) == 1 else f"{len(types)} × {distinct[0]}"
    return f"{distinct[0]} and {len(types) - 1} more"


_LETTERS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_type(value: ValueReport | InnerValueReport) -> str:
    """Format a type as in a jaxpr: `f32[8,16]`."""
    letters = re.match(r"[a-z]*", value.dtype)
    word = letters[0] if letters else ""
    dtype = _LETTERS.get(word, word) + value.dtype[len(word) :]
    return typed(dtype, value.shape)


def short_path(path: str, most: int) -> str:
    """Shorten a path to a maximum length if possible, by omitting keys in the middle.

    Example:
        >>> short_path("state['optimizer'][1][0].mu['layers']['mlp']['down']", 32)
        "state…['layers']['mlp']['down']"
    """
    if len(path) <= most:
        return path
    first, *steps = re.findall(r"^[^\[.]+|\[[^\]]*\]|\.\w+", path) or [path]
    kept = ""
    for step in reversed(steps):
        if len(first) + 1 + len(step) + len(kept) > most:
            break
        kept = step + kept
    return f"{first}…{kept}" if kept else path


def sharding_text(value: ValueReport) -> str:
    """Format a sharding with the copies of each shard: `P('data') ×4`."""
    if not value.used:
        return "not used"
    return f"{value.spec} ×{value.copies}" if value.copies > 1 else value.spec


_DECIDED = {
    "caller": "you",
    "auto": "AUTO",
    "argument": "the argument",
    "default": "default",
    "partitioner": "the partitioner",
    "function": "the function",
    "unknown": "",
}


def decided_text(value: ValueReport) -> str:
    """Format the origin of a value's sharding; empty if unknown."""
    return _DECIDED[value.decided_by] if value.used else ""


SHOWN = 8
"""Rows of a table that a short report shows."""

WIDE = 100
"""Minimum width for redundant columns."""


class Page:
    """Width and detail of a printed report.

    Args:
        width: Columns.
        full: Whether every row is shown.
        more: Code that shows every row.
    """

    def __init__(self, width: int, full: bool, more: str = "report.print(all=True)") -> None:
        self.width = width
        self.is_full = full
        self._more = more

    def rows[T](self, values: Sequence[T]) -> Sequence[T]:
        """Return the values to show."""
        return values if self.is_full else values[:SHOWN]

    def rest[T](
        self,
        values: Sequence[T],
        amount: Callable[[T], int],
        shown: Callable[[float], str] = in_bytes,
    ) -> str:
        """Format the number and bytes of the omitted values."""
        left = values[len(self.rows(values)) :]
        return self.left(len(left), f"more, {shown(sum(map(amount, left)))}")

    def left(self, count: int, what: str = "more") -> str:
        """Format the number of omitted rows with the code that shows them; empty for 0."""
        return f"and {count} {what}: {self._more}" if count else ""

    def path(self, path: str) -> Text:
        """Format a path in half a line."""
        most = max(24, self.width // 2 - 12)
        return Text(path if self.is_full else short_path(path, most), style="green")

    def paths(self, paths: Sequence[str], columns: Sequence[Sequence[str]]) -> list[Text] | None:
        """Format paths beside other columns; return None if shortened paths would be ambiguous."""
        used = sum(max(map(len, column)) + 2 for column in columns)
        room = max(20, self.width - used - 4)
        short = paths if self.is_full else [short_path(path, room) for path in paths]
        if len(set(short)) < len(set(paths)):
            return None
        return [Text(path, style="green") for path in short]


def runs_text(c: CollectiveReport) -> str:
    """Format the number of executions, if it is not a certain 1."""
    times = f" ×{c.times}" if c.times > 1 else ""
    return f"{times}{'' if c.times_known else ' ×?'}{' in a branch' if c.conditional else ''}"


def cause_text(c: CollectiveReport, page: Page) -> Text:
    """Format the line and operation of a collective, or of the consumer of a gather."""
    name, source = cause_of(c)
    if c.argument:
        return Text.assemble(place_text(source), page.path(c.argument))
    return Text.assemble(place_text(source), (operation_text(name) or "unknown to XLA", "dim"))


def cause_of(c: CollectiveReport) -> tuple[str, SourceLine | None]:
    """Return the operation of a collective and its line; for an all-gather its consumer."""
    gathers = c.kind == "all-gather" and not c.op_name.endswith("sharding_constraint")
    if c.needed_by and (gathers or c.source is None):
        return c.needed_by, c.needed_by_source
    return c.op_name, c.source


def place_text(source: SourceLine | None) -> Text:
    """Format a line and a space, bold in a file of the user; empty if unknown."""
    if source is None:
        return Text()
    return Text.assemble((line_text(source), "bold" if source.in_user_file else ""), " ")


def table(columns: Sequence[str], rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    """Return a table; a column whose name begins with `>` is right-aligned and not wrapped."""
    texts = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    return Padding(_Table(columns, texts), (0, 0, 0, 2))


_GAP = 2
"""Columns of the terminal between two columns of a table."""

_LONGEST_WORD = 20
"""Longer words are broken where the terminal is narrow, but for `model.py:12`; in characters."""

_LINE = re.compile(r".+:\d+\W*")


@dataclass(frozen=True, eq=False)
class _Table:
    """Rich renderable of a table; a list where the terminal is too narrow for its columns."""

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


def columns_table(columns: Mapping[str, Sequence[RenderableType]]) -> RenderableType:
    """Return a table of columns by their names, without those whose cells are all empty."""
    shown = {name: column for name, column in columns.items() if any(map(str, column))}
    return table(list(shown), list(zip(*shown.values(), strict=True)))


def listing[T](
    page: Page,
    heading: tuple[str, str],
    columns: Sequence[str],
    values: Sequence[T],
    row: Callable[[T], Sequence[RenderableType]],
    amount: Callable[[T], int] | None = None,
    shown: Callable[[float], str] = in_bytes,
) -> RenderableType | None:
    """Return a section with a table of the first values; None without values.

    Args:
        page: The page.
        heading: The title and a note.
        columns: The names of the columns, as for `table`.
        values: The values, in order.
        row: Returns the cells of a value.
        amount: Returns the bytes of a value, of which the omitted ones are summed up; None to
            count them only.
        shown: Formats the sum.
    """
    if not values:
        return None
    rows = [row(value) for value in page.rows(values)]
    if amount is None:
        rest = page.left(len(values) - len(rows))
    else:
        rest = page.rest(values, amount, shown)
    return section(*heading, table(columns, rows), rest)


def head(
    name: str, where: Sequence[str], facts: Iterable[tuple[str, str | Text]]
) -> RenderableType:
    """Return the head of a report: its subject, devices and main facts."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for word, fact in facts:
        grid.add_row(word, fact)
    title = Text.assemble((name, "bold"), "  ", (" · ".join(where), "dim"))
    return Group(title, Padding(grid, (0, 0, 0, 2)))


def section(title: str, note: str, body: RenderableType | None, rest: str = "") -> RenderableType:
    """Return a heading, its body, and a line about the omitted rows."""
    heading = Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))
    parts: list[RenderableType] = [heading]
    if body is not None:
        parts.append(body)
    if rest:
        parts.append(Text(f"  {rest}", style="dim"))
    return Group(*parts)


class PrintableReport(ABC):
    """Report that `print`, rich's `print` and its own `print` show."""

    _print_all: ClassVar[str] = "report.print(all=True)"

    @abstractmethod
    def _sections(self, page: Page) -> Iterable[RenderableType | None]:
        """Yield the sections of the printed report, fitted to a page; None is skipped."""

    def renderable(self, *, all: bool = False, print_all: str = "") -> RenderableType:
        """Return the report as a value that rich prints.

        Args:
            all: Show every row, instead of the first few and a sum of the rest.
            print_all: Code or flag that shows every row; `report.print(all=True)` if empty.
        """
        return Escaped(_Sections(self, all, print_all or self._print_all))

    def print(self, *, all: bool = False, console: Console | None = None) -> None:
        """Print the report.

        Args:
            all: Show every row, instead of the first few and a sum of the rest.
            console: The console; standard output if None.
        """
        (console or Console()).print(self.renderable(all=all))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.renderable()

    def __str__(self) -> str:
        return plain_text(self.renderable())


@dataclass(frozen=True, eq=False)
class _Sections:
    """Rich renderable of a report's sections."""

    report: PrintableReport
    is_full: bool
    print_all: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = Page(options.max_width, self.is_full, self.print_all)
        return (part for part in self.report._sections(page) if part is not None)


class SerializableReport(PrintableReport):
    """Report that is a frozen dataclass with a JSON format."""

    _format: ClassVar[ReportFormat]

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to dicts, lists, strings and numbers, with its format's version."""
        return self._format.to_dict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Write the report as JSON, with its format's version.

        Args:
            indent: Spaces per level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def json_schema(cls) -> Schema:
        """Return the JSON Schema (draft 2020-12) of what `to_json` writes."""
        return report_schema(cls, cls._format.noun, cls._format.version)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a report that `to_json` wrote.

        Args:
            text: The JSON.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape.
        """
        with short_tracebacks:
            return cls._format.read(cls, text)
