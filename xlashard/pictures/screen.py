"""What a terminal can show: its width, its characters, its colours."""

from typing import NamedTuple

from rich.console import Console, ConsoleOptions
from rich.style import Style

from xlashard.pictures.palette import BLANK, COLOURS, INK
from xlashard.pictures.plan import Cell
from xlashard.pictures.words import in_ascii

# Where there are sixteen colours only, the nearest to ours would be four.
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


class Screen(NamedTuple):
    """A terminal.

    Attributes:
        width: Characters in a line.
        ascii_only: Whether it knows no other characters.
        few_colours: Whether it has no more than sixteen.
    """

    width: int
    ascii_only: bool
    few_colours: bool

    @classmethod
    def of(cls, console: Console, options: ConsoleOptions) -> "Screen":
        """What rich knows of a terminal."""
        few = console.color_system in ("standard", "windows")
        return cls(options.max_width, options.ascii_only, few)

    def say(self, text: str) -> str:
        """A text in characters that it knows."""
        return in_ascii(text) if self.ascii_only else text

    def style(self, cell: Cell | None) -> Style:
        """The colours of a tile, or of what stands for those that are left out."""
        if cell is None:
            return Style(dim=True)
        if self.few_colours:
            return Style(color="black", bgcolor=_OF_SIXTEEN[cell.colour])
        return Style(color=INK, bgcolor=cell.colour)
