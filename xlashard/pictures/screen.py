"""Capabilities of a terminal: width, characters, colours."""

from typing import NamedTuple

from rich.console import Console, ConsoleOptions
from rich.style import Style

from xlashard.pictures.palette import BLANK, COLOURS, INK
from xlashard.pictures.picture_plan import Cell
from xlashard.pictures.picture_text import in_ascii

# With sixteen colours, the nearest to ours would be only four.
_NAMES = (
    "bright_blue",
    "bright_red",
    "yellow",
    "bright_magenta",
    "green",
    "bright_yellow",
    "bright_cyan",
    "magenta",
    "white",
)
_OF_SIXTEEN: dict[str, str] = dict(zip((*COLOURS, BLANK), _NAMES, strict=True))


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

    def say(self, text: str) -> str:
        """Return a text in the characters of the terminal."""
        return in_ascii(text) if self.ascii_only else text

    def style(self, cell: Cell | None) -> Style:
        """Return the colours of a tile, or of what stands for those that are left out."""
        if cell is None:
            return Style(dim=True)
        if self.few_colours:
            return Style(color="black", bgcolor=_OF_SIXTEEN[cell.colour])
        return Style(color=INK, bgcolor=cell.colour)
