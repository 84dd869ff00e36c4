"""Tables and headings of a report, fitted to the width of the console."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from xlashard.pjit.report.cell_formatting import short_path
from xlashard.wording import in_bytes

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

    def rest[T](self, values: Sequence[T], nbytes: Callable[[T], int]) -> str:
        """Format the number and bytes of the omitted values."""
        left = values[len(self.rows(values)) :]
        return self.left(len(left), f"more, {in_bytes(sum(map(nbytes, left)))}")

    def left(self, count: int, what: str = "more") -> str:
        """Format the number of omitted rows with the code that shows them; empty for 0."""
        return f"and {count} {what}: {self._more}" if count else ""

    def path(self, path: str) -> Text:
        """Format a path in half a line."""
        most = max(24, self.width // 2 - 12)
        return Text(path if self.is_full else short_path(path, most), style="green")

    def paths(self, paths: Sequence[str], columns: Sequence[Sequence[str]]) -> list[Text] | None:
        """Format paths beside other columns; return None if shortened paths would be ambiguous."""
        taken = sum(max(map(len, column)) + 2 for column in columns)
        room = max(20, self.width - taken - 4)
        short = paths if self.is_full else [short_path(path, room) for path in paths]
        if len(set(short)) < len(set(paths)):
            return None
        return [Text(path, style="green") for path in short]


def table(columns: Sequence[str], rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    """Return a table; a column whose name begins with `>` is right-aligned and not wrapped."""
    table = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
        pad_edge=False,
        show_header=any(column.strip(">") for column in columns),
    )
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, 2))


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
