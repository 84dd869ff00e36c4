"""Report of a compiled program, and its tables in a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    collectives_section,
    donations_section,
    list_findings,
    list_remedies,
    memory_map_section,
    sent_section,
    sent_text,
    values_section,
)
from xlashard.analysis.report.cells import join_cell
from xlashard.analysis.report.excerpts import Excerpt
from xlashard.analysis.report.parts import Column, Head, KeyFigure, MemoryBar, Section
from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.analysis.report.terminal_view import section_text
from xlashard.errors import counted
from xlashard.hlo.collective_kinds import CollectiveKind
from xlashard.hlo.collectives import CollectiveTotal
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import in_bytes, in_flop, numbered, sizes_text

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
        excerpts: Lines around the source lines of collectives and of their callers.

    Example:
        >>> import numpy as np
        >>> from xlashard import explain, pjit
        >>> report = explain(pjit(lambda x: x.sum()), np.ones((4, 8), np.float32))
        >>> report.inputs[0].type, report.memory.argument_bytes
        ('float32[4,8]', 128)
    """

    _kind = "explain"
    _footer = (
        "Read from the compiled program, before it has run: bytes and FLOP are those of one device "
        "in one call."
    )
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
    excerpts: tuple[Excerpt, ...] = ()

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

    def parts(self) -> Iterator[Part]:
        """Yield the head and the sections."""
        yield _head(self)
        yield from list_findings(self)
        yield INNER_VALUES.with_rows(self.values)
        yield collectives_section(self.collectives, excerpts=self.excerpts)
        yield sent_section(self.collectives, "a call")
        yield MOVES.with_rows(self.moves)
        yield values_section("arguments", "Arguments", self.inputs)
        yield values_section("results", "Results", self.outputs)
        yield donations_section(self.donations)
        if self.memory is not None:
            yield memory_map_section(self.memory.parts, self.inputs, self.outputs)
        yield _environment(self.place)

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


def collectives_text(collectives: Sequence[CollectiveReport]) -> str:
    """Format the table of collectives for a message; "" if there are none."""
    return section_text(collectives_section(collectives), _MESSAGE_WIDTH)


def moves_text(moves: Sequence[MoveReport]) -> str:
    """Format the table of moved arguments for a message."""
    return section_text(MOVES.with_rows(moves), _MESSAGE_WIDTH)


def values_text(title: str, values: Sequence[ValueReport]) -> str:
    """Format the table of the largest arguments or results for a message."""
    return section_text(values_section(title.lower(), title, values), _MESSAGE_WIDTH)


def _head(report: ProgramReport) -> Head:
    place, memory = report.place, report.memory
    devices = counted(place.num_devices, "device")
    kind = place.device_kind if place.device_kind != place.platform else ""
    where = [f"{devices} ({' '.join(filter(None, (place.platform, kind)))})"]
    if place.num_processes > 1:
        where.append(f"{place.num_processes} processes")
    if place.mesh:
        where.append(sizes_text(place.mesh))
    where.append(place.partitioner)
    sent = sum(c.sent_bytes for c in report.collectives)
    notes = [("lacks", numbered(report.not_understood))] * bool(report.not_understood)
    notes += [("unknown", report.forgotten)] * bool(report.forgotten)
    return Head(
        title=report.name,
        place=where,
        facts=list(_facts(report)),
        headline=f"Each device sends {in_bytes(sent)} in a call"
        if sent
        else "No device sends anything",
        worth=max(list_remedies(report), default=(0, ""))[1],
        notes=[(word, join_cell(note)) for word, note in notes],
        figures=list(_key_figures(report)),
        figure=None if memory is None else MemoryBar(memory.parts, memory.total_bytes),
        severity="costly" if _wasted_bytes(report) else "",
    )


def _wasted_bytes(report: ProgramReport) -> int:
    return sum(u.nbytes for u in report.unmet if u.is_whole)


def _key_figures(report: ProgramReport) -> Iterator[KeyFigure]:
    memory, cost = report.memory, report.cost
    times = sum(c.times for c in report.collectives)
    yield KeyFigure("collectives", f"{times:,}", times, "run in a call")
    if memory is not None:
        total, temporary = memory.total_bytes, memory.temporary_bytes
        yield KeyFigure("memory", in_bytes(total), total, "of each device")
        yield KeyFigure("temporaries", in_bytes(temporary), temporary, "of that")
    if cost is not None:
        note = "on each device; a loop counts once"
        yield KeyFigure("work", in_flop(cost.flops), cost.flops, note)
    moved, wasted = sum(m.nbytes for m in report.moves), _wasted_bytes(report)
    yield KeyFigure("moved", in_bytes(moved), moved, "before each call")
    yield KeyFigure("silently replicated", in_bytes(wasted), wasted, "on each device")


def _environment(place: PlaceReport) -> Section[tuple[str, str]]:
    names = ("platform", "device_kind", "partitioner", "xlashard", "jax", "jaxlib", "runtime")
    pairs = [(name.replace("_", " "), str(getattr(place, name))) for name in names]
    return pairs_section("environment", "Devices and versions", pairs)


def pairs_section(
    id: str, title: str, pairs: Sequence[tuple[str, str]], *, is_narrow: bool = False
) -> Section[tuple[str, str]]:
    """Return facts about the devices or the compiler, for pages."""
    columns = (
        Column[tuple[str, str]]("what", lambda pair: pair[0]),
        Column[tuple[str, str]]("value", lambda pair: pair[1]),
    )
    return Section(id, title, columns=columns, rows=pairs, view="page", is_narrow=is_narrow)


def _facts(report: ProgramReport) -> Iterator[tuple[str, str]]:
    """Yield the bytes that one device sends and holds, and its FLOP."""
    if report.place.num_devices > 1:
        yield "sends", sent_text(report.collectives)
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
