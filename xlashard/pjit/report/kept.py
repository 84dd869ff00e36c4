"""What reports have in common: they print themselves, and travel as JSON."""

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.pjit.report.records import Record
from xlashard.wording import Escaped, plain_text


class PrintedReport(ABC):
    """A report that `print`, rich's `print` and its own `print` show."""

    @abstractmethod
    def _shown(self, *, full: bool) -> RenderableType:
        """What rich is to print."""

    def print(self, *, all: bool = False, console: Console | None = None) -> None:
        """Prints it.

        Args:
            all: Show every row, where otherwise the first few stand for the rest.
            console: Where to; standard output if None.
        """
        (console or Console()).print(Escaped(self._shown(full=all)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Escaped(self._shown(full=False))

    def __str__(self) -> str:
        return plain_text(Escaped(self._shown(full=False)))


class KeptReport(PrintedReport):
    """One that is a dataclass and can be written as JSON, and read again."""

    _record: ClassVar[Record]

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, with the number of the format."""
        return self._record.to_dict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON, with the number of the format.

        Args:
            indent: Spaces per level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Args:
            text: The JSON.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape.
        """
        with short_tracebacks:
            return cls._record.read(cls, text)
