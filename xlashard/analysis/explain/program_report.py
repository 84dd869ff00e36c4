"""Report of a compiled program, and its tables in a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from xlashard.analysis.explain.model import (
    CollectiveReport,
    ConstantReport,
    CostReport,
    DonationReport,
    InnerValueReport,
    MemoryReport,
    MoveReport,
    PlaceReport,
    RepeatedReport,
    UnmetRequest,
    ValueReport,
)
from xlashard.analysis.explain.sections import (
    INNER_VALUES,
    MOVES,
    collective_sums,
    donations_section,
    findings_of,
    list_remedies,
    merged_collectives,
    values_section,
)
from xlashard.analysis.explain.tables import (
    Page,
    SerializableReport,
    cause_text,
    groups_text,
    head,
    listing,
    runs_text,
    types_text,
)
from xlashard.errors import counted
from xlashard.hlo.collective_kinds import CollectiveKind
from xlashard.hlo.collectives import CollectiveTotal
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import in_bytes, in_flop, numbered, plain_text, sizes_text
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.analysis.explain import html
else:
    html = deferred("xlashard.analysis.explain.html")

FORMAT = 2
"""Version of the JSON format. It grows when a field changes its meaning or is removed."""


@dataclass(frozen=True, repr=False)
class ProgramReport(SerializableReport):
    """Inputs, outputs, collectives and memory of a compiled program. Made by `xlashard.explain`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` serializes it.

    Attributes:
        name: The function's name.
        place: Devices, mesh, partitioner, versions.
        cost: FLOP and bytes accessed; None if the compiler does not report them.
        memory: Bytes per device; None if the compiler does not report them.
        inputs: The arguments, and the arrays that the function closes over.
        outputs: The results.
        collectives: Communication between devices, most sent bytes first.
        moves: Arguments that are resharded before the program can run, the largest first.
        donations: Arguments that were donated, and arguments that could be.
        unmet: Requests that the program does not follow, and values that each device holds whole
            without a request, most bytes first.
        not_understood: What the analysis of the compiled program could not take into account, with
            its number: loops of unknown trip count, which count as one run, unknown operations.
        forgotten: The facts that an explained stage does not keep, and that the report therefore
            lacks, as one clause; empty for a function.
        repeated: Work that every device repeats, the largest share first.
        constants: Closed-over arrays that are constants of each device's program, largest first.
        values: Values inside that match the pattern of `explain(..., values=...)`, most bytes
            first.

    Example:
        >>> import numpy as np
        >>> from xlashard import explain, pjit
        >>> report = explain(pjit(lambda x: x.sum()), np.ones((4, 8), np.float32))
        >>> report.inputs[0].type, report.memory.argument_bytes
        ('float32[4,8]', 128)
    """

    _format = ReportFormat("program report", FORMAT, "xlashard.explain(f, ...).to_json()")

    name: str
    place: PlaceReport
    cost: CostReport | None
    memory: MemoryReport | None
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    collectives: tuple[CollectiveReport, ...]
    moves: tuple[MoveReport, ...]
    donations: tuple[DonationReport, ...]
    unmet: tuple[UnmetRequest, ...]
    forgotten: str = ""
    repeated: tuple[RepeatedReport, ...] = ()
    constants: tuple[ConstantReport, ...] = ()
    not_understood: tuple[tuple[str, int], ...] = ()
    values: tuple[InnerValueReport, ...] = ()

    @property
    def totals(self) -> tuple[CollectiveTotal, ...]:
        """Return the sums of its collectives by kind and mesh axes, most sent bytes first."""
        alike: dict[tuple[CollectiveKind, str], list[CollectiveReport]] = {}
        for report in self.collectives:
            alike.setdefault((report.kind, report.along), []).append(report)
        totals = [
            CollectiveTotal(*key, **collective_sums(reports)) for key, reports in alike.items()
        ]
        return tuple(sorted(totals, key=lambda t: -t.sent_bytes))

    def _sections(self, page: Page) -> Iterator[RenderableType | None]:
        yield _head(self)
        for findings, rows in findings_of(self):
            yield findings.section(rows, page)
        yield INNER_VALUES.section(self.values, page)
        yield _collectives(self.collectives, page)
        yield MOVES.section(self.moves, page)
        yield values_section("Arguments", self.inputs, page)
        yield values_section("Results", self.outputs, page)
        yield donations_section(self.donations, page)

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page, to be written in UTF-8."""
        return html.program_page(self)

    def _repr_html_(self) -> str:
        return html.program_fragment(self)

    def __repr__(self) -> str:
        counts = (
            (self.place.num_devices, "device"),
            (len(self.inputs), "input"),
            (len(self.outputs), "output"),
            (sum(c.count for c in self.collectives), "collective"),
        )
        devices, *others = (counted(number, noun) for number, noun in counts)
        return f"<ProgramReport of {self.name} on {devices}: {', '.join(others)}; print it>"


_MESSAGE_WIDTH = 110


def _message_page() -> Page:
    return Page(_MESSAGE_WIDTH, False)


def collectives_text(collectives: Sequence[CollectiveReport]) -> str:
    """Format the table of collectives for a message; "" if there are none."""
    return _section_text(_collectives(collectives, _message_page()))


def moves_text(moves: Sequence[MoveReport]) -> str:
    """Format the table of moved arguments for a message."""
    return _section_text(MOVES.section(moves, _message_page()))


def values_text(title: str, values: Sequence[ValueReport]) -> str:
    """Format the table of the largest arguments or results for a message."""
    return _section_text(values_section(title, values, _message_page()))


def _section_text(section: RenderableType | None) -> str:
    return "" if section is None else plain_text(section, _MESSAGE_WIDTH).strip("\n")


def _head(report: ProgramReport) -> RenderableType:
    place = report.place
    devices = counted(place.num_devices, "device")
    kind = place.device_kind if place.device_kind != place.platform else ""
    where = [f"{devices} ({' '.join(filter(None, (place.platform, kind)))})"]
    if place.num_processes > 1:
        where.append(f"{place.num_processes} processes")
    if place.mesh:
        where.append(sizes_text(place.mesh))
    where.append(place.partitioner)
    return head(report.name, where, _facts(report))


def _facts(report: ProgramReport) -> Iterator[tuple[str, str]]:
    """Yield the bytes that one device sends and holds, and its FLOP."""
    if report.place.num_devices > 1:
        yield "sends", _sent(report.collectives)
    if report.memory is not None:
        m = report.memory
        parts = [
            f"{in_bytes(m.argument_bytes)} arguments",
            f"{in_bytes(m.result_bytes - m.alias_bytes)} {'other ' * bool(m.alias_bytes)}results",
            f"{in_bytes(m.temporary_bytes)} temporary",
        ]
        parts += [f"{in_bytes(m.code_bytes)} code"] if m.code_bytes else []
        parts += [f"{in_bytes(m.host_bytes)} of the host"] if m.host_bytes else []
        yield "holds", " + ".join(parts)
    if report.cost is not None:
        flop, moved = in_flop(report.cost.flops), in_bytes(report.cost.bytes_accessed)
        loops = any(c.times > c.count or not c.times_known for c in report.collectives)
        note = "; XLA counts the body of a loop once" if loops else ""
        yield "computes", f"{flop}, {moved} of memory read or written{note}"
    if remedies := list(list_remedies(report)):
        yield "advice", f"most worth doing: {max(remedies)[1]}"
    if report.not_understood:
        yield "lacks", numbered(report.not_understood)
    if report.forgotten:
        yield "unknown", report.forgotten


def _sent(collectives: Sequence[CollectiveReport]) -> str:
    if not collectives:
        return "nothing to other devices"
    count, times = sum(c.count for c in collectives), sum(c.times for c in collectives)
    text = f"{in_bytes(sum(c.sent_bytes for c in collectives))} in "
    text += counted(count, "collective")
    text += f", run {times} times" if times != count else ""
    along: dict[str, int] = {}
    for c in collectives:
        along[c.along] = along.get(c.along, 0) + c.sent_bytes
    biggest = sorted(along.items(), key=lambda item: -item[1])
    text += ": " + ", ".join(f"{in_bytes(sent)} along {name}" for name, sent in biggest)
    if any(not c.times_known for c in collectives):
        text += "; a loop with unknown trip count counts as one run"
    if any(c.conditional for c in collectives):
        text += "; every branch counts as taken"
    return text


def _collectives(collectives: Sequence[CollectiveReport], page: Page) -> RenderableType | None:
    if not page.is_full:
        collectives = merged_collectives(collectives)
    return listing(
        page,
        ("Collectives", "what each device sends in one call"),
        (">sends", "what", "along", "of", "for"),
        collectives,
        lambda c: (
            in_bytes(c.sent_bytes),
            Text.assemble((c.kind, "cyan"), runs_text(c)),
            groups_text(c),
            types_text(c),
            cause_text(c, page),
        ),
        lambda c: c.sent_bytes,
    )
