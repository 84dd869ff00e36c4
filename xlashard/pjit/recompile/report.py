"""`explain_recompile`: what a pjit-ed function compiled, and why it did so again."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xlashard.errors import counted
from xlashard.lazily import dataclass
from xlashard.pjit.recompile.explanation import Explanation, seconds_text
from xlashard.pjit.recompile.pieces import Piece

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


@dataclass(frozen=True)
class RecompileReport:
    """What one function had to trace, lower and compile since it was made or cleared.

    Printing it in a terminal, or with rich, shows it as a table.

    Attributes:
        function: The function's name.
        explanations: For each call that had something to make, in order, what and why.
        pieces: The programs of pieces that transformations made of its calls.
        forgotten: How many more calls there were, before those.
        hints: What to do about it.
    """

    function: str
    explanations: tuple[Explanation, ...]
    pieces: tuple[Piece, ...]
    forgotten: int
    hints: tuple[str, ...]

    @property
    def compilations(self) -> tuple[Explanation, ...]:
        """Those for which something was compiled, or read from the persistent cache."""
        return tuple(e for e in self.explanations if e.kind == "compilation")

    @property
    def seconds(self) -> float:
        """How long all of it took."""
        return sum(made.seconds for made in (*self.explanations, *self.pieces))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def headline(self) -> str:
        """How many of what, in one line."""
        if not self.explanations:
            return f"{self.function} has traced and compiled nothing yet"
        done = len(self.compilations)
        rest = len(self.explanations) - done
        others = f" and {counted(rest, 'call')} only traced or lowered" if rest else ""
        others += f", {counted(len(self.pieces), 'piece')} of transformed calls" * bool(self.pieces)
        cost = seconds_text(self.seconds)
        return f"{self.function}: {counted(done, 'compilation')}{others}, {cost} in all"

    def __str__(self) -> str:
        lines = [self.headline]
        if self.forgotten:
            lines.append(f"  ({counted(self.forgotten, 'earlier one')} no longer remembered)")
        lines += [f"  {explanation.text(self.function)}" for explanation in self.explanations]
        lines += [f"  {piece}" for piece in self.pieces]
        lines += [f"  hint: {hint}" for hint in self.hints]
        return "\n".join(lines)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text  # takes long to import, and few need it

        yield Text(self.headline, style="bold")
        if self.explanations:
            yield self._table()
        for piece in self.pieces:
            yield Text(str(piece))
        for hint in self.hints:
            yield Text(f"hint: {hint}", style="green")

    def _table(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table("", "made", "called at", "tracing", "lowering", "compiling", "because")
        for e in self.explanations:
            parts = (e.trace_seconds, e.lower_seconds, e.compile_seconds)
            times = ("" if part is None else seconds_text(part) for part in parts)
            table.add_row(str(e.number), e.kind, e.place, *times, Text(e.because))
        return table
