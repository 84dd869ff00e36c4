"""A report as a person reads it: what costs most comes first, and the rest is counted."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from xlashard.pjit.report.merging import (
    merged_collectives,
    merged_donations,
    merged_moves,
    merged_values,
)
from xlashard.pjit.report.parts import (
    CollectiveReport,
    DonationReport,
    MoveReport,
    ReplicationReport,
    ReportFields,
    ValueReport,
)
from xlashard.pjit.report.words import (
    decided,
    groups_text,
    line_text,
    operation_text,
    sharding_text,
    short_path,
    short_type,
    types_text,
)
from xlashard.wording import in_bytes, in_flop, plain_text

_SHOWN = 8
"""Rows of a table that are shown where not all are asked for."""

_WIDE = 100
"""From this width on there is room for columns that say no more than others do."""


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
        page = _Page(options.max_width, self._full)
        collectives, moves, donations = report.collectives, report.moves, report.donations
        if not self._full:
            collectives, moves = merged_collectives(collectives), merged_moves(moves)
        sections = [
            _head(report),
            _replications(report.replications, page),
            _collectives(collectives, page),
            _moves(moves, page),
            _values("Arguments", report.inputs, page),
            _values("Results", report.outputs, page),
            _donations(donations, page),
        ]
        for section in sections:
            if section is not None:
                yield section


_MESSAGE_WIDTH = 110


def collectives_text(found: Sequence[CollectiveReport]) -> str:
    """The table of collectives alone, for a message; "" for none."""
    return _section_text(_collectives(merged_collectives(found), _Page(_MESSAGE_WIDTH, False)))


def moves_text(found: Sequence[MoveReport]) -> str:
    """The table of arguments that are moved, likewise."""
    return _section_text(_moves(merged_moves(found), _Page(_MESSAGE_WIDTH, False)))


def values_text(title: str, found: Sequence[ValueReport]) -> str:
    """The table of the largest arguments or results, likewise."""
    return _section_text(_values(title, found, _Page(_MESSAGE_WIDTH, False)))


def _section_text(section: RenderableType | None) -> str:
    return "" if section is None else plain_text(section, _MESSAGE_WIDTH).strip("\n")


class _Page:
    """How much there is room for."""

    def __init__(self, width: int, full: bool) -> None:
        self.width = width
        self.is_full = full

    def rows[T](self, values: Sequence[T]) -> Sequence[T]:
        """Those to show."""
        return values if self.is_full else values[:_SHOWN]

    def rest[T](self, values: Sequence[T], nbytes: Callable[[T], int]) -> str:
        """What the others come to."""
        left = values[len(self.rows(values)) :]
        if not left:
            return ""
        return f"and {len(left)} more, {in_bytes(sum(map(nbytes, left)))}: report.print(all=True)"

    def path(self, path: str) -> Text:
        """A path as the room of half a line allows."""
        most = max(24, self.width // 2 - 12)
        return Text(path if self.is_full else short_path(path, most), style="green")

    def paths(self, paths: Sequence[str], columns: Sequence[Sequence[str]]) -> list[Text] | None:
        """Paths beside other columns, or None if they could not be told apart in that room."""
        taken = sum(max(map(len, column)) + 2 for column in columns)
        room = max(20, self.width - taken - 4)
        short = paths if self.is_full else [short_path(path, room) for path in paths]
        if len(set(short)) < len(set(paths)):
            return None
        return [Text(path, style="green") for path in short]


def _table(columns: Sequence[str], rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    """A table; a column whose name begins with `>` is set to the right and never broken."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, 2))


def _section(title: str, note: str, body: RenderableType | None, rest: str = "") -> RenderableType:
    heading = Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))
    parts: list[RenderableType] = [heading]
    if body is not None:
        parts.append(body)
    if rest:
        parts.append(Text(f"  {rest}", style="dim"))
    return Group(*parts)


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
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, fact in _facts(report):
        facts.add_row(name, fact)
    title = Text.assemble((report.name, "bold"), "  ", (" · ".join(where), "dim"))
    return Group(title, Padding(facts, (0, 0, 0, 2)))


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


def _collectives(found: Sequence[CollectiveReport], page: _Page) -> RenderableType | None:
    if not found:
        return None
    rows = [
        (
            in_bytes(c.sent_bytes),
            Text.assemble((c.kind, "cyan"), _runs(c)),
            groups_text(c),
            types_text(c),
            _cause(c, page),
        )
        for c in page.rows(found)
    ]
    return _section(
        "Collectives",
        "what each device sends in one call",
        _table((">sends", "what", "along", "of", "for"), rows),
        page.rest(found, lambda c: c.sent_bytes),
    )


def _runs(c: CollectiveReport) -> str:
    times = f" ×{c.times}" if c.times > 1 else ""
    return f"{times}{'' if c.times_known else ' ×?'}{' in a branch' if c.conditional else ''}"


def _cause(c: CollectiveReport, page: _Page) -> Text:
    """The line and operation behind a collective: for a gather whoever wants it, if known."""
    gathers = c.kind == "all-gather" and not c.op_name.endswith("sharding_constraint")
    name, source = c.op_name, c.source
    if c.needed_by and (gathers or source is None):
        name, source = c.needed_by, c.needed_by_source
    cause = Text()
    if source is not None:
        cause.append(line_text(source), "bold" if source.in_user_file else "")
        cause.append(" ")
    if c.argument:
        cause.append_text(page.path(c.argument))
    else:
        cause.append(operation_text(name) or "XLA doesn't say", "dim")
    return cause


def _moves(moves: Sequence[MoveReport], page: _Page) -> RenderableType | None:
    if not moves:
        return None
    rows = [
        (in_bytes(_moved(m)), page.path(m.path), f"{m.source} → {m.target}")
        for m in page.rows(moves)
    ]
    return _section(
        "Moved before such a call",
        "to all devices; device_put them once to save it",
        _table((">moves", "argument", "from → to"), rows),
        page.rest(moves, _moved),
    )


def _moved(move: MoveReport) -> int:
    return move.device_bytes_moved + move.host_bytes


def _values(title: str, values: Sequence[ValueReport], page: _Page) -> RenderableType | None:
    if not values:
        return None
    largest = values
    if not page.is_full:
        largest = sorted(merged_values(values), key=lambda v: -v.device_bytes)
    words = {decided(v) for v in values}
    total, held = sum(v.nbytes for v in values), sum(v.device_bytes for v in values)
    note = f"{len(values)}: {in_bytes(total)}, {in_bytes(held)} on each device"
    if len(words) == 1 and (word := words.pop()):
        note += f"; shardings by {word}"
    rest = page.rest(largest, lambda v: v.device_bytes)
    shown = page.rows(largest)
    columns = {
        ">each device": [in_bytes(v.device_bytes) if v.used else "–" for v in shown],
        ">whole": [in_bytes(v.nbytes) for v in shown],
        "type": [short_type(v) for v in shown],
        "sharding × copies": [sharding_text(v) for v in shown],
    }
    if words:
        columns["decided by"] = [decided(v) for v in shown]
    return _section(title, note, _value_table([v.path for v in shown], columns, page), rest)


def _value_table(
    paths: Sequence[str], columns: dict[str, list[str]], page: _Page
) -> RenderableType:
    """A table of values; what says least gives way to paths that tell them apart."""
    headed = [[name, *column] for name, column in columns.items()]
    shown = page.paths(paths, headed) if page.width >= _WIDE else None
    if shown is None:
        columns = {name: column for name, column in columns.items() if name != ">whole"}
        headed = [[name, *column] for name, column in columns.items()]
        shown = page.paths(paths, headed)
    numbers = [name for name in columns if name.startswith(">")]
    order = [*numbers, "path", *(name for name in columns if name not in numbers)]
    whole = {**columns, "path": shown or [Text(path, style="green") for path in paths]}
    return _table(order, list(zip(*(whole[name] for name in order), strict=True)))


def _donations(found: Sequence[DonationReport], page: _Page) -> RenderableType | None:
    if not found:
        return None
    reused = [d for d in found if d.is_reused]
    lost = [d for d in found if d.donated and not d.is_reused]
    could = sorted((d for d in found if not d.donated), key=lambda d: -d.device_bytes)
    held = sum(d.device_bytes for d in reused)
    note = f"{len(reused)} reused for results, {in_bytes(held)} on each device"
    others = [*lost, *could]
    if not page.is_full:
        others = merged_donations(others)
    if not others:
        return _section("Donated", note, None)
    rows = [
        (
            in_bytes(d.device_bytes),
            page.path(d.path),
            _donation_text(d, page),
        )
        for d in page.rows(others)
    ]
    return _section(
        "Donated",
        note if reused or lost else "nothing",
        _table((">each device", "argument", ""), rows),
        page.rest(others, lambda d: d.device_bytes),
    )


def _donation_text(d: DonationReport, page: _Page) -> Text:
    if d.donated:
        lost = Text("donated, but not reused", style="yellow")
        return Text.assemble(lost, f": {d.reason}" if d.reason else "")
    return Text.assemble("could be donated to ", page.path(d.result))


def _replications(found: Sequence[ReplicationReport], page: _Page) -> RenderableType | None:
    if not found:
        return None
    rows = [
        (
            in_bytes(r.wasted_bytes),
            Text.assemble(page.path(r.path), " as ", r.spec),
            _why(r),
        )
        for r in page.rows(found)
    ]
    return _section(
        "Replicated silently",
        "what each device holds, or gathers, that nobody asked for",
        _table((">wastes", "value", "why"), rows),
        page.rest(found, lambda r: r.wasted_bytes),
    )


def _why(r: ReplicationReport) -> str:
    axes, dims = ", ".join(r.axes), ", ".join(map(str, r.dims))
    what = f"dimension{'s' if len(r.dims) != 1 else ''} {dims}"
    match r.kind:
        case "constraint":
            line = "" if r.source is None else f" at {line_text(r.source)}"
            return f"the constraint{line} closes {what}: gathered along {axes}"
        case "open dimension":
            return f"{what} left open, and left whole by the partitioner; {axes} could cut it"
        case _:
            return f"unspecified; {axes}, which cuts an argument, could cut {what}"
