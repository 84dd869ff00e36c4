"""Tables and headings of a report, in as much room as there is."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from xlashard.pjit.report.words import short_path
from xlashard.wording import in_bytes

SHOWN = 8
"""Rows of a table that are shown where not all are asked for."""

WIDE = 100
"""From this width on there is room for columns that say no more than others do."""


class Page:
    """How much there is room for.

    Args:
        width: Columns.
        full: Whether every row is shown.
        more: What to write to see every row.
    """

    def __init__(self, width: int, full: bool, more: str = "report.print(all=True)") -> None:
        self.width = width
        self.is_full = full
        self._more = more

    def rows[T](self, values: Sequence[T]) -> Sequence[T]:
        """Those to show."""
        return values if self.is_full else values[:SHOWN]

    def rest[T](self, values: Sequence[T], nbytes: Callable[[T], int]) -> str:
        """What the others come to."""
        left = values[len(self.rows(values)) :]
        return self.left(len(left), f"more, {in_bytes(sum(map(nbytes, left)))}")

    def left(self, count: int, what: str = "more") -> str:
        """That so many others are left out, and how to see them; empty for none."""
        return f"and {count} {what}: {self._more}" if count else ""

    def path(self, path: str) -> Text:
        """A path as the room of half a line allows."""
        most = max(24, self.width // 2 - 12)
        return Text(path if self.is_full else short_path(path, most), style="green")

    def paths(self, paths: Sequence[str], columns: Sequence[Sequence[str]]) -> list[Text] | None:
        """Paths beside other columns, or None if they could not be told apart in that room."""
        taken = sum(max(map(len, column)) + 2 for column in columns)
        room = max(20, self.width - taken - 4)
        short = paths if self.is_full else [short_path(path, room) for path in paths]
        if len(set(short)) < len(set(paths)):
            return None
        return [Text(path, style="green") for path in short]


def table(columns: Sequence[str], rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    """A table; a column whose name begins with `>` is set to the right and never broken."""
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
    """What is reported on, where it runs, and the facts that matter most."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for word, fact in facts:
        grid.add_row(word, fact)
    title = Text.assemble((name, "bold"), "  ", (" · ".join(where), "dim"))
    return Group(title, Padding(grid, (0, 0, 0, 2)))


def section(title: str, note: str, body: RenderableType | None, rest: str = "") -> RenderableType:
    """A heading, what stands under it, and what the rows that are left out come to."""
    heading = Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))
    parts: list[RenderableType] = [heading]
    if body is not None:
        parts.append(body)
    if rest:
        parts.append(Text(f"  {rest}", style="dim"))
    return Group(*parts)
