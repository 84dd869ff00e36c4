"""Base of all pictures: printing, notebook display, and saving."""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from xlashard.errors import ArgumentError

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
        console = Console(file=io.StringIO(), color_system=None, width=width, force_jupyter=False)
        return _plain(self, console)

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
        path.write_text(writers[path.suffix]() + "\n", encoding="utf-8")

    def _writers(self) -> Mapping[str, Callable[[], str]]:
        return {".html": self.to_html, ".txt": self.to_text}

    def __str__(self) -> str:
        return _plain(self, Console(color_system=None, force_jupyter=False))

    def __repr__(self) -> str:
        return str(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Display the picture in IPython, with colours in a terminal only."""
        console = Console(force_jupyter=False)
        printer.text(_captured(self, console) if console.is_terminal else str(self))


def _plain(picture: Printable, console: Console) -> str:
    return "\n".join(line.rstrip() for line in _captured(picture, console).splitlines())


def _captured(picture: Printable, console: Console) -> str:
    with console.capture() as shown:
        console.print(picture)
    return shown.get().rstrip("\n")
