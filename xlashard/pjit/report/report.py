"""The report of a program: a frozen value that prints itself and travels as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from xlashard.pjit.report.kept import KeptReport
from xlashard.pjit.report.parts import CollectiveReport, ReportFields
from xlashard.pjit.report.records import Record
from xlashard.pjit.report.text import ReportText
from xlashard.program import CollectiveTotal
from xlashard.program.collectives import CollectiveKind

FORMAT = 1
"""Number of the JSON format. It grows when a field changes its meaning or goes away."""


@dataclass(frozen=True, repr=False)
class ProgramReport(KeptReport, ReportFields):
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

    _record = Record("program report", FORMAT, "xlashard.explain(f, ...).to_json()")

    @property
    def totals(self) -> tuple[CollectiveTotal, ...]:
        """Its collectives by kind and mesh axes, those first that send most bytes."""
        alike: dict[tuple[CollectiveKind, str], list[CollectiveReport]] = {}
        for report in self.collectives:
            alike.setdefault((report.kind, report.along), []).append(report)
        totals = [_total(*key, found) for key, found in alike.items()]
        return tuple(sorted(totals, key=lambda t: -t.sent_bytes))

    def _shown(self, *, full: bool) -> ReportText:
        return ReportText(self, full=full)

    def __repr__(self) -> str:
        counts = (
            (self.place.num_devices, "device"),
            (len(self.inputs), "input"),
            (len(self.outputs), "output"),
            (sum(c.count for c in self.collectives), "collective"),
        )
        devices, *others = (f"{n} {word}{'s' if n != 1 else ''}" for n, word in counts)
        return f"<ProgramReport of {self.name} on {devices}: {', '.join(others)}; print it>"


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
