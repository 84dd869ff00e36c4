"""Pictures in a terminal: as many tiles as its width allows, legible without colours too.

`Printable` is the base class of all pictures: printing, notebook display, and saving.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from xlashard.analysis.pictures.picture_plan import (
    BLANK,
    COLOURS,
    INK,
    Borders,
    Cell,
    Picture,
    line,
    plan_picture,
)
from xlashard.analysis.pictures.picture_text import (
    devices_text,
    facts,
    hosts_text,
    panel_text,
    title_text,
)
from xlashard.analysis.pictures.subject import PictureSubject
from xlashard.errors import ArgumentError
from xlashard.support.documents import write_whole
from xlashard.support.formatting import in_ascii, plain_text

# With sixteen colours, the nearest to ours would be only four.
_NAMES = (
    "bright_blue bright_red yellow bright_magenta green bright_yellow bright_cyan magenta white"
)
_OF_SIXTEEN: dict[str, str] = dict(zip((*COLOURS, BLANK), _NAMES.split(), strict=True))


class TerminalCapabilities(NamedTuple):
    """A terminal.

    Attributes:
        width: Characters in a line.
        ascii_only: Whether the terminal is limited to ASCII.
        few_colours: Whether the terminal has at most sixteen colours.
    """

    width: int
    ascii_only: bool
    few_colours: bool

    @classmethod
    def of(cls, console: Console, options: ConsoleOptions) -> "TerminalCapabilities":
        """Return the capabilities that rich detects."""
        few = console.color_system in ("standard", "windows")
        return cls(options.max_width, options.ascii_only, few)

    def encoded(self, text: str) -> str:
        """Return a text in the characters of the terminal."""
        return in_ascii(text) if self.ascii_only else text

    def style(self, cell: Cell | None) -> Style:
        """Return the colours of a tile, or of what stands for those that are left out."""
        if cell is None:
            return Style(dim=True)
        if self.few_colours:
            return Style(color="black", bgcolor=_OF_SIXTEEN[cell.colour])
        return Style(color=INK, bgcolor=cell.colour)


_LONGEST = 28
"""Maximum length of a cell's text."""

_BETWEEN = 3
"""Spaces between panels that stand side by side."""


def terminal_lines(
    subject: PictureSubject, most: int, screen: TerminalCapabilities
) -> Iterator[RenderableType]:
    """Yield an array's title, facts and tiles for rich to print, `most` tiles along a dimension."""
    sheet = _fitting(subject, most, screen)
    yield Text(screen.encoded(title_text(subject)), style="bold")
    known = Table.grid(padding=(0, 2))
    for word, sentence in facts(sheet.picture):
        known.add_row(Text(word, "dim"), Text(screen.encoded(sentence)))
    yield Padding(known, (0, 0, 1, 2))
    for text in sheet.lines():
        text.no_wrap = True
        text.overflow = "ellipsis"
        yield text


class _CellGrid(NamedTuple):
    """Widths of the parts of a picture, in characters.

    Attributes:
        picture: The picture.
        screen: Capabilities of the terminal.
        cell: Characters in a cell.
        label: Characters left of the cells.
        platform: Whether cells name the platform of the devices.
    """

    picture: Picture
    screen: TerminalCapabilities
    cell: int
    label: int
    platform: bool

    @property
    def width(self) -> int:
        """Width of a panel."""
        return self.label + 1 + sum(self.column_width(c) + 1 for c in self.picture.columns)

    def column_width(self, column: int | None) -> int:
        """Return the width of a column."""
        if column is not None:
            return self.cell
        return len(self.screen.encoded(self.picture.columns.left_out_text)) + 2

    def lines(self) -> list[Text]:
        """Return the lines of the panels, as many side by side as fit."""
        picture = self.picture
        if not picture.panel_dims:
            return self._panel(0)[:-1]
        across = picture.panels_across((self.screen.width + _BETWEEN) // (self.width + _BETWEEN))
        drawn: list[Text] = []
        together: list[list[Text]] = []
        for number, panel in enumerate(picture.panels):
            if panel is None or len(together) == across:
                drawn += _side_by_side(together, self.width)
                together = []
            if panel is None:
                rest = f"{picture.panel_numbers.left_out:,} more panels"
                text = self.screen.encoded(f"{' ' * self.label} … {rest} …")
                drawn += [Text(text, "dim"), Text("")]
            else:
                together.append(self._panel(number))
        drawn += _side_by_side(together, self.width)
        return drawn[:-1]

    def _panel(self, number: int) -> list[Text]:
        """Return a panel with its heading, ranges, and a blank line."""
        picture = self.picture
        panel = picture.panels[number]
        assert panel is not None
        borders = Borders.of(panel.cells, has_hosts=picture.has_hosts)
        drawn = []
        if picture.panel_dims:
            drawn.append(Text(f"{' ' * self.label} {panel_text(picture, number)}", "bold"))
        if picture.column_dim is not None:
            drawn.append(self._column_names())
        for row, cells in enumerate(panel.cells):
            drawn.append(self._border(borders, row))
            drawn += self._row(borders, row, cells)
        drawn += [self._border(borders, len(panel.cells)), Text("")]
        return drawn

    def _column_names(self) -> Text:
        text = " " * (self.label + 1)
        for column, name in zip(self.picture.columns, self.picture.column_names, strict=True):
            text += f"{self.screen.encoded(name):^{self.column_width(column)}} "
        return Text(text.rstrip(), style="cyan")

    def _border(self, borders: Borders, row: int) -> Text:
        ascii_only = self.screen.ascii_only
        text = " " * self.label
        for column, number in enumerate(self.picture.columns):
            text += borders.crossing(row, column, ascii_only=ascii_only)
            dash = line(borders.across[row][column], down=False, ascii_only=ascii_only)
            text += dash * self.column_width(number)
        return Text(text + borders.crossing(row, len(self.picture.columns), ascii_only=ascii_only))

    def _row(self, borders: Borders, row: int, cells: Sequence[Cell | None]) -> list[Text]:
        bar = partial(line, down=True, ascii_only=self.screen.ascii_only)
        height = 2 if self.picture.has_hosts and any(cells) else 1
        drawn = []
        for n in range(height):
            text = Text(self._row_name(row) if n == 0 else " " * self.label, style="")
            text.stylize("cyan")
            for column, (number, cell) in enumerate(zip(self.picture.columns, cells, strict=True)):
                text.append(bar(borders.down[row][column]), "default")
                width = self.column_width(number)
                text.append(f"{self._label(cell, n):^{width}}", self.screen.style(cell))
            text.append(bar(borders.down[row][-1]), "default")
            drawn.append(text)
        return drawn

    def _row_name(self, row: int) -> str:
        if self.picture.row_dim is None:
            return " " * self.label
        return f"{self.screen.encoded(self.picture.row_names[row]):>{self.label - 1}} "

    def _label(self, cell: Cell | None, number: int) -> str:
        room = self.cell - 2
        if cell is None:
            text = "" if number else "…"
        elif number:
            text = hosts_text(cell, room)
        else:
            text = devices_text(self.picture, cell, room, platform=self.platform)
        return self.screen.encoded(text)


def _fitting(subject: PictureSubject, most: int, screen: TerminalCapabilities) -> _CellGrid:
    """Return the picture with most columns, and then with the longest texts, that fits."""
    columns = most
    while True:
        picture = plan_picture(subject, most, columns)
        sheets = [_sized(picture, screen, longest) for longest in (_LONGEST, 14, 7)]
        fitting = (s for s in sheets if s.width <= screen.width)
        fitting_sheet = next(fitting, None)
        if fitting_sheet is not None:
            return fitting_sheet
        if columns <= 2 or len(picture.columns) <= 2:
            return sheets[-1]
        columns = min(columns, len(picture.columns)) - 1


def _sized(picture: Picture, screen: TerminalCapabilities, longest: int) -> _CellGrid:
    """Return a sheet whose cells fit their text, up to a maximum length."""
    platform = longest > 7
    words = [
        text
        for cell in picture.cells
        for text in (
            devices_text(picture, cell, longest, platform=platform),
            hosts_text(cell, longest) if picture.has_hosts else "",
        )
    ]
    pairs = zip(picture.columns, picture.column_names, strict=False)
    words += [name for number, name in pairs if number is not None]
    names = [len(screen.encoded(name)) for name in picture.row_names]
    cell = max(len(screen.encoded(word)) for word in words) + 2
    return _CellGrid(picture, screen, cell, max(names) + 3 if names else 2, platform)


def _side_by_side(panels: Sequence[list[Text]], width: int) -> list[Text]:
    joined = []
    for parts in zip(*panels, strict=True):
        text = Text()
        for n, part in enumerate(parts):
            if n:
                text.append(" " * _BETWEEN)
            text.append_text(part)
            if n < len(parts) - 1:
                text.append(" " * (width - part.cell_len))
        joined.append(text)
    return joined


_FILE_WIDTH = 100


class Printable(ABC):
    """Something to look at in a terminal, a notebook or a file."""

    @abstractmethod
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult: ...

    @abstractmethod
    def _repr_html_(self) -> str: ...

    @abstractmethod
    def to_html(self) -> str:
        """Return a self-contained page."""

    def to_text(self, width: int = _FILE_WIDTH) -> str:
        """Return the picture as plain text.

        Args:
            width: Characters in a line.
        """
        return plain_text(self, width)

    def print(self, *, console: Console | None = None) -> None:
        """Print it in colours, where the terminal has them.

        Args:
            console: Console; standard output if None.
        """
        (console or Console()).print(self)

    def save(self, path: str | Path) -> None:
        """Write it to a file.

        Args:
            path: File; its suffix determines the format.

        Raises:
            ArgumentError: If the suffix is unknown.
        """
        path = Path(path)
        writers = self._writers()
        if path.suffix not in writers:
            *others, last = writers
            raise ArgumentError(
                f"path is {str(path)!r}, but this picture is written as {', '.join(others)} or "
                f"{last}: write picture.save({str(path.with_suffix('.html'))!r})"
            )
        write_whole(path, writers[path.suffix]() + "\n")

    def _writers(self) -> Mapping[str, Callable[[], str]]:
        return {".html": self.to_html, ".txt": self.to_text}

    def __str__(self) -> str:
        console = Console(color_system=None, force_jupyter=False)
        return "\n".join(line.rstrip() for line in _captured(self, console).splitlines())

    def __repr__(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Display the picture in IPython, with colours in a terminal only."""
        console = Console(force_jupyter=False)
        printer.text(_captured(self, console) if console.is_terminal else str(self))


def _captured(picture: Printable, console: Console) -> str:
    with console.capture() as shown:
        console.print(picture)
    return shown.get().rstrip("\n")
