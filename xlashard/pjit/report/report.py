"""The report of a program: a frozen value that prints itself and travels as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.pjit.report.parts import CollectiveReport, ReportFields
from xlashard.pjit.report.records import Record
from xlashard.pjit.report.text import ReportText
from xlashard.program import CollectiveTotal
from xlashard.program.collectives import CollectiveKind
from xlashard.wording import plain_text

FORMAT = 1
"""Number of the JSON format. It grows when a field changes its meaning or goes away."""

_RECORD = Record("program report", FORMAT, "xlashard.explain(f, ...).to_json()")


@dataclass(frozen=True, repr=False)
class ProgramReport(ReportFields):
    """What a compiled program takes, gives, sends and holds. Made by `xlashard.explain`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` keeps it.

    Attributes:
        name: The function's name.
        place: Devices, mesh, partitioner, versions.
        cost: FLOP and bytes accessed; None where the compiler doesn't say.
        memory: Bytes per device; None where the compiler doesn't say.
        inputs: The arguments, and the arrays that the function closes over.
        outputs: The results.
        collectives: What goes between devices, those first that send most bytes.
        moves: Arguments that are moved before the program can run, the biggest first.
        donations: Arguments that were donated, and those that could be.
        replications: Values that are held more often than anyone said.
    """

    @property
    def totals(self) -> tuple[CollectiveTotal, ...]:
        """Its collectives by kind and mesh axes, those first that send most bytes."""
        alike: dict[tuple[CollectiveKind, str], list[CollectiveReport]] = {}
        for report in self.collectives:
            alike.setdefault((report.kind, report.along), []).append(report)
        totals = [_total(*key, found) for key, found in alike.items()]
        return tuple(sorted(totals, key=lambda t: -t.sent_bytes))

    def print(self, *, all: bool = False, console: Console | None = None) -> None:
        """Prints it.

        Args:
            all: Show every value, where otherwise the largest stand for the rest.
            console: Where to; standard output if None.
        """
        (console or Console()).print(ReportText(self, full=all))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield ReportText(self, full=False)

    def __str__(self) -> str:
        return plain_text(ReportText(self, full=False))

    def __repr__(self) -> str:
        counts = (
            (self.place.num_devices, "device"),
            (len(self.inputs), "input"),
            (len(self.outputs), "output"),
            (sum(c.count for c in self.collectives), "collective"),
        )
        devices, *others = (f"{n} {word}{'s' if n != 1 else ''}" for n, word in counts)
        return f"<ProgramReport of {self.name} on {devices}: {', '.join(others)}; print it>"

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, with the number of the format."""
        return _RECORD.to_dict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON, with the number of the format.

        Args:
            indent: Spaces per level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape.
        """
        with short_tracebacks:
            return _RECORD.read(cls, text)


def _total(kind: CollectiveKind, along: str, found: Sequence[CollectiveReport]) -> CollectiveTotal:
    return CollectiveTotal(
        kind=kind,
        along=along,
        count=sum(c.count for c in found),
        times=sum(c.times for c in found),
        operand_bytes=sum(c.operand_bytes for c in found),
        result_bytes=sum(c.result_bytes for c in found),
        payload_bytes=sum(c.payload_bytes for c in found),
        sent_bytes=sum(c.sent_bytes for c in found),
    )
