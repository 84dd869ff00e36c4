"""A report as a person reads it: what costs most comes first, and the rest is counted."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from xlashard.pjit.report.merging import merged_collectives, merged_moves
from xlashard.pjit.report.parts import CollectiveReport, MoveReport, ReportFields, ValueReport
from xlashard.pjit.report.sections import (
    cause_text,
    donations_section,
    replications_section,
    runs_text,
    values_section,
)
from xlashard.pjit.report.tables import Page, head, section, table
from xlashard.pjit.report.words import groups_text, types_text
from xlashard.wording import in_bytes, in_flop, plain_text


class ReportText:
    """A report for rich to print.

    Args:
        report: The report.
        full: Show every row and whole paths, where otherwise the first few stand for all.
    """

    def __init__(self, report: ReportFields, *, full: bool) -> None:
        self._report = report
        self._full = full

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self._report
        page = Page(options.max_width, self._full)
        collectives, moves, donations = report.collectives, report.moves, report.donations
        if not self._full:
            collectives, moves = merged_collectives(collectives), merged_moves(moves)
        sections = [
            _head(report),
            replications_section(report.replications, page),
            _collectives(collectives, page),
            _moves(moves, page),
            values_section("Arguments", report.inputs, page),
            values_section("Results", report.outputs, page),
            donations_section(donations, page),
        ]
        for part in sections:
            if part is not None:
                yield part


_MESSAGE_WIDTH = 110


def collectives_text(found: Sequence[CollectiveReport]) -> str:
    """The table of collectives alone, for a message; "" for none."""
    return _section_text(_collectives(merged_collectives(found), Page(_MESSAGE_WIDTH, False)))


def moves_text(found: Sequence[MoveReport]) -> str:
    """The table of arguments that are moved, likewise."""
    return _section_text(_moves(merged_moves(found), Page(_MESSAGE_WIDTH, False)))


def values_text(title: str, found: Sequence[ValueReport]) -> str:
    """The table of the largest arguments or results, likewise."""
    return _section_text(values_section(title, found, Page(_MESSAGE_WIDTH, False)))


def _section_text(section: RenderableType | None) -> str:
    return "" if section is None else plain_text(section, _MESSAGE_WIDTH).strip("\n")


def _head(report: ReportFields) -> RenderableType:
    place = report.place
    devices = f"{place.num_devices} device{'s' if place.num_devices != 1 else ''}"
    kind = place.device_kind if place.device_kind != place.platform else ""
    where = [f"{devices} ({' '.join(filter(None, (place.platform, kind)))})"]
    if place.num_processes > 1:
        where.append(f"{place.num_processes} processes")
    if place.mesh:
        where.append(" × ".join(f"{name}={size}" for name, size in place.mesh))
    where.append(place.partitioner)
    return head(report.name, where, _facts(report))


def _facts(report: ReportFields) -> Iterator[tuple[str, str]]:
    """What one device sends, holds and computes."""
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


def _sent(collectives: Sequence[CollectiveReport]) -> str:
    if not collectives:
        return "nothing to other devices"
    count, times = sum(c.count for c in collectives), sum(c.times for c in collectives)
    text = f"{in_bytes(sum(c.sent_bytes for c in collectives))} in "
    text += "1 collective" if count == 1 else f"{count} collectives"
    text += f", run {times} times" if times != count else ""
    along: dict[str, int] = {}
    for c in collectives:
        along[c.along] = along.get(c.along, 0) + c.sent_bytes
    biggest = sorted(along.items(), key=lambda item: -item[1])
    text += ": " + ", ".join(f"{in_bytes(sent)} along {name}" for name, sent in biggest)
    if any(not c.times_known for c in collectives):
        text += "; a loop without a known count is taken as one run"
    if any(c.conditional for c in collectives):
        text += "; every branch is taken as run"
    return text


def _collectives(found: Sequence[CollectiveReport], page: Page) -> RenderableType | None:
    if not found:
        return None
    rows = [
        (
            in_bytes(c.sent_bytes),
            Text.assemble((c.kind, "cyan"), runs_text(c)),
            groups_text(c),
            types_text(c),
            cause_text(c, page),
        )
        for c in page.rows(found)
    ]
    return section(
        "Collectives",
        "what each device sends in one call",
        table((">sends", "what", "along", "of", "for"), rows),
        page.rest(found, lambda c: c.sent_bytes),
    )


def _moves(moves: Sequence[MoveReport], page: Page) -> RenderableType | None:
    if not moves:
        return None
    rows = [
        (in_bytes(_moved(m)), page.path(m.path), f"{m.source} → {m.target}")
        for m in page.rows(moves)
    ]
    return section(
        "Moved before such a call",
        "to all devices; device_put them once to save it",
        table((">moves", "argument", "from → to"), rows),
        page.rest(moves, _moved),
    )


def _moved(move: MoveReport) -> int:
    return move.device_bytes_moved + move.host_bytes
