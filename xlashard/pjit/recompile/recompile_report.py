"""Report of `explain_recompile`: cache misses of a pjit-ed function and their reasons."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xlashard.errors import counted
from xlashard.lazily import dataclass
from xlashard.pjit.recompile.derived_programs import DerivedProgram
from xlashard.pjit.recompile.explanation import Explanation
from xlashard.wording import in_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


@dataclass(frozen=True)
class RecompileReport:
    """Cache misses of one function since it was made or its cache cleared.

    Rich prints the report as a table.

    Attributes:
        function: The function's name.
        explanations: The stages and reason of each cache miss, in order.
        derived_programs: The programs that transformations derived from its calls.
        dropped: Number of earlier cache misses that are no longer recorded.
        hints: Changes that avoid further compilations.
    """

    function: str
    explanations: tuple[Explanation, ...]
    derived_programs: tuple[DerivedProgram, ...]
    dropped: int
    hints: tuple[str, ...]

    @property
    def compilations(self) -> tuple[Explanation, ...]:
        """Explanations of calls that compiled, or read the persistent cache."""
        return tuple(e for e in self.explanations if e.kind == "compilation")

    @property
    def seconds(self) -> float:
        """Total duration."""
        return sum(made.seconds for made in (*self.explanations, *self.derived_programs))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def headline(self) -> str:
        """Counts and total duration in one line."""
        if not self.explanations:
            return f"{self.function} has not been traced or compiled yet"
        done = len(self.compilations)
        rest = len(self.explanations) - done
        others = f" and {counted(rest, 'call')} only traced or lowered" if rest else ""
        if self.derived_programs:
            others += f", {counted(len(self.derived_programs), 'derived program')}"
        cost = in_seconds(self.seconds)
        return f"{self.function}: {counted(done, 'compilation')}{others}, {cost} in all"

    def __str__(self) -> str:
        lines = [self.headline]
        if self.dropped:
            dropped = counted(self.dropped, "earlier cache miss", "earlier cache misses")
            lines.append(f"  ({dropped} no longer recorded)")
        lines += [f"  {explanation.text(self.function)}" for explanation in self.explanations]
        lines += [f"  {derived}" for derived in self.derived_programs]
        lines += [f"  hint: {hint}" for hint in self.hints]
        return "\n".join(lines)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text  # slow to import, and rarely needed

        yield Text(self.headline, style="bold")
        if self.explanations:
            yield self._table()
        for derived in self.derived_programs:
            yield Text(str(derived))
        for hint in self.hints:
            yield Text(f"hint: {hint}", style="green")

    def _table(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table("", "stage", "called at", "tracing", "lowering", "compiling", "reason")
        for e in self.explanations:
            parts = (e.trace_seconds, e.lower_seconds, e.compile_seconds)
            times = ("" if part is None else in_seconds(part) for part in parts)
            table.add_row(str(e.number), e.kind, e.place, *times, Text(e.because))
        return table
