"""Comparison of two reports of programs, and limits on the figures of one: `memory=80GiB`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, Literal

from xlashard.analysis.explain.model import CollectiveReport, DonationReport
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.analysis.explain.sections import (
    cause_text,
    find_cause,
    sent_by_axes,
    sharding_text,
    short_type,
)
from xlashard.analysis.report.cells import (
    Content,
    Span,
    Style,
    TableCell,
    join_cell,
    read_value,
)
from xlashard.analysis.report.parts import WIDE, Column, Head, Section
from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.analysis.report.texts import line_text
from xlashard.hlo.collective_kinds import KINDS
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import (
    FORMATTERS,
    Limit,
    Unit,
    in_bytes,
    in_seconds,
    parse_limits,
    signed,
    sizes_text,
)

_BETTER_IF_MORE = ("memory to spare", "tokens per second", "model FLOP utilisation")
_COLOURS: dict[str, Style] = {"added": "bad", "grown": "bad", "removed": "good", "shrunk": "good"}


@dataclass(frozen=True)
class FactChange:
    """A changed text.

    Attributes:
        name: Name of the fact.
        old: Text in the first report; empty if absent.
        new: Text in the second report; empty if absent.
        where: Source line of a finding, from the second report if it has one; else empty.
    """

    name: str
    old: str
    new: str
    where: str = ""


@dataclass(frozen=True)
class AmountChange:
    """A number of both reports.

    Attributes:
        name: Name of the number.
        unit: Its unit.
        old: Value in the first report; None if absent.
        new: Value in the second report; None if absent.
        old_error: Ends of the error bar of the first value, as parts of it: `(-0.1, 0.2)`; the
            upper one is None for a lower bound. None for an exact value.
        new_error: The same of the second value.
    """

    name: str
    unit: Unit
    old: float | None
    new: float | None
    old_error: tuple[float, float | None] | None = None
    new_error: tuple[float, float | None] | None = None

    @property
    def is_changed(self) -> bool:
        """True if the values differ."""
        return self.old != self.new

    @property
    def is_within_error(self) -> bool:
        """True if the second value lies within the error bar of the first one."""
        if self.old_error is None or not self.old or self.new is None:
            return False
        below, above = self.old_error
        is_low = above is None or self.new <= self.old * (1 + above)
        return is_low and self.old * (1 + below) <= self.new

    @property
    def ratio(self) -> float | None:
        """Second value divided by the first; None if one is missing or the first is 0."""
        return None if not self.old or self.new is None else self.new / self.old


@dataclass(frozen=True)
class UsageChange:
    """A change in memory use, or in bytes sent.

    Attributes:
        change: Kind of change.
        what: Name of the buffer or collective.
        where: Source line, from the second report if it has one; empty if unknown.
        old_bytes: Bytes in the first report; 0 if new.
        new_bytes: Bytes in the second report; 0 if removed.
        old_seconds: Network time in the first report.
        new_seconds: Network time in the second report.
    """

    change: Literal["added", "removed", "grown", "shrunk"]
    what: str
    where: str
    old_bytes: int
    new_bytes: int
    old_seconds: float = 0.0
    new_seconds: float = 0.0


@dataclass(frozen=True, repr=False)
class Comparison(SerializableReport):
    """Changes from one report to another. Made by `compare`.

    `print(comparison)` displays it; `to_json`, `to_markdown` and `to_html` write it.

    Attributes:
        old: Title of the first report.
        new: Title of the second report.
        facts: Changed texts: outcome, topology, mesh, versions, flags, ...
        amounts: Every number of either report, changed or not.
        memory: Arguments, results and temporaries with changed memory, largest change first.
        traffic: Collectives with changed bytes, largest change first.
        shardings: Arguments and results with a changed type or sharding.
        donations: Arguments with changed donation.
        unmet: Requests that only one of the programs does not follow.
        findings: Work that every device repeats, and closed-over arrays, of one of the programs.
        drawn: Sections of its page that its JSON lacks, such as both timelines.
    """

    _format = ReportFormat("comparison of reports", 1, "compare(...).to_json()")
    _print_all = "comparison.print(all=True)"
    _kind = "comparison"

    old: str
    new: str
    facts: tuple[FactChange, ...]
    amounts: tuple[AmountChange, ...]
    memory: tuple[UsageChange, ...]
    traffic: tuple[UsageChange, ...]
    shardings: tuple[FactChange, ...]
    donations: tuple[FactChange, ...]
    unmet: tuple[FactChange, ...] = ()
    findings: tuple[FactChange, ...] = ()
    drawn: InitVar[tuple[Section[Any], ...]] = ()

    def __post_init__(self, drawn: tuple[Section[Any], ...]) -> None:
        # An attribute, which `replace` passes on; no field, which the JSON would have.
        object.__setattr__(self, "drawn", drawn)

    @property
    def is_same(self) -> bool:
        """True if nothing but the compile time changed."""
        moved = any(a.is_changed for a in self.amounts if a.name != "time to compile")
        texts = any(self._texts.values())
        return not (moved or self.facts or self.memory or self.traffic or texts)

    @property
    def _texts(self) -> dict[str, tuple[FactChange, ...]]:
        """Return the changed texts of values, by title."""
        return {
            "Shardings": self.shardings,
            "Donations": self.donations,
            "Asked for and not done": self.unmet,
            "Wasted memory and work": self.findings,
        }

    @property
    def regressions(self) -> tuple[str, ...]:
        """Return what became worse, one line each.

        These are more bytes sent in all, by the collectives that send more; more memory in all; a
        time above the error bar of the first one; donations that are no longer reused; requests
        that are newly not followed; and new findings.
        """
        sent = sum(u.new_bytes - u.old_bytes for u in self.traffic)
        grown = [u for u in self.traffic if u.new_bytes > u.old_bytes]
        lines = [
            f"{_append_line(u.what, u.where)} sends {in_bytes(u.new_bytes - u.old_bytes)} more"
            for u in grown
            if sent > 0
        ]
        lines += [
            f"{a.name}: {_amount(a, a.old)} → {_amount(a, a.new)}"
            for a in self.amounts
            if a.name in ("memory", "time") and (a.new or 0) > (a.old or 0)
            if _differs(a) and not a.is_within_error
        ]
        lines += [
            f"{d.name} is no longer donated and reused: {d.new or 'it is no argument'}"
            for d in self.donations
            if d.old.startswith(REUSED) and d.new and not d.new.startswith(REUSED)
        ]
        lines += [
            f"{u.name} is not as requested: {_append_line(u.new, u.where)}"
            for u in self.unmet
            if u.new
        ]
        lines += [
            f"{f.name} is new: {_append_line(f.new, f.where)}" for f in self.findings if f.new
        ]
        return tuple(lines)

    def parts(self) -> Iterator[Part]:
        """Yield the titles of both reports, what became worse, and the changes."""
        worse = self.regressions
        better = "Nothing changed." if self.is_same else "Nothing became worse."
        yield Head(
            title=" → ".join(dict.fromkeys((self.old, self.new))),
            headline="Some figures became worse." if worse else better,
            notes=[("worse", join_cell(Span(line, "name"))) for line in worse],
            severity="costly" if worse else "",
        )
        yield _FACTS.with_rows(self.facts)
        yield _AMOUNTS.with_rows(self.amounts)
        yield from self.drawn  # pyright: ignore[reportAttributeAccessIssue]
        yield _USES.with_rows(self.memory)
        title, note = "Collectives", "what each device sends"
        yield replace(_USES, id="traffic", title=title, note=note, rows=self.traffic)
        for title, facts in self._texts.items():
            yield replace(_FACTS, id=title.lower().replace(" ", "-"), title=title, rows=facts)

    def __repr__(self) -> str:
        return f"<Comparison of {self.old} with {self.new}; print it>"


REUSED = "reused for"
"""Start of the text of a donation that a result reuses."""


def _append_line(text: str, where: str) -> str:
    return f"{text} at {where}" if where else text


def _differs(a: AmountChange) -> bool:
    """Return whether the printed amounts differ, ignoring the compile time."""
    if a.name == "time to compile":
        return False
    return _amount(a, a.old) != _amount(a, a.new)


def _amount(
    a: AmountChange, value: float | None, error: tuple[float, float | None] | None = None
) -> str:
    if value is None:
        return "–"
    shown = FORMATTERS[a.unit]
    text = f"-{shown(-value)}" if value < 0 else shown(value)
    if error is None:
        return text
    below, above = error
    return f"{text} ({below:+.0%} {'or more' if above is None else f'{above:+.0%}'})"


def _ratio_cell(a: AmountChange) -> TableCell:
    ratio = a.ratio
    if ratio is None or ratio <= 0:
        return TableCell()
    text = f"{ratio - 1:+.1%}"
    if ratio >= 2:
        text = f"×{ratio:.1f}" if ratio < 10 else f"×{ratio:,.0f}"
    text += ", within the error" * (a.is_within_error and ratio != 1)
    is_worse = (ratio > 1) != (a.name in _BETTER_IF_MORE)
    return join_cell(Span(text, "" if ratio == 1 else "bad" if is_worse else "good"), key=ratio)


def _name_cell(name: str) -> Content:
    return join_cell(Span(name, "path" if "[" in name else "name"))


_FACTS = Section[FactChange](
    id="facts",
    title="Changed",
    columns=(
        Column("what", lambda f: _name_cell(f.name)),
        Column("before", lambda f: f.old or "–"),
        Column("after", lambda f: f.new or "–"),
        Column("line", "where", "code"),
    ),
    printed="what | before | =→ | after | line",
)

_AMOUNTS = Section[AmountChange](
    id="numbers",
    title="Numbers",
    note="of one device",
    columns=(
        Column("number", "name", ""),
        Column(">before", lambda a: join_cell(_amount(a, a.old, a.old_error), key=a.old)),
        Column(">after", lambda a: join_cell(_amount(a, a.new, a.new_error), key=a.new)),
        Column(">change", _ratio_cell, tip="What is after by what was before"),
    ),
    printed="number | >before | =→ | >after | >change",
    merged=lambda rows: list(filter(_differs, rows)),
    most=100,
)


def _use_cell(nbytes: int, seconds: float, is_absent: bool) -> TableCell:
    note = Span(in_seconds(seconds), "note") if seconds else None
    return join_cell("–", key=0) if is_absent else join_cell(in_bytes(nbytes), note, key=nbytes)


def _seconds_text(u: UsageChange) -> str:
    if not (u.old_seconds or u.new_seconds):
        return ""
    return f"{in_seconds(u.old_seconds)} → {in_seconds(u.new_seconds)}"


_USES = Section[UsageChange](
    id="memory",
    title="Memory by leaf",
    note="of one device",
    columns=(
        Column("what", "what"),
        Column("change", lambda u: join_cell(Span(u.change, _COLOURS[u.change]))),
        Column(">before", lambda u: _use_cell(u.old_bytes, u.old_seconds, u.change == "added")),
        Column(">after", lambda u: _use_cell(u.new_bytes, u.new_seconds, u.change == "removed")),
        Column(">more", lambda u: u.new_bytes - u.old_bytes, signed(in_bytes)),
        Column("time", _seconds_text, "", on_page=False),
        Column("line", "where", "code"),
    ),
    printed="change | >before | =→ | >after | time | what={what}  {line}",
    widths={"time": WIDE},
)


type Facts[R] = Mapping[str, Callable[[R], str] | str]
"""Texts of a report, by name: functions of it, or names of attributes."""

type Amount[R] = Callable[[R], float | None] | str
"""Number of a report: a function of it, or the name of an attribute."""


@dataclass(frozen=True)
class Figure[R]:
    """Number of a report, which comparisons show and a budget can limit.

    Attributes:
        unit: Its unit.
        amount: The number of a report.
        description: Description for messages; empty for one that no budget limits.
        contributors: The largest contributions, as text lines.
        at_least: Whether a limit is a lower bound.
        whole: Function from a report to the amount that a limit in percent refers to.
    """

    unit: Unit
    amount: Amount[R]
    description: str = ""
    contributors: Callable[[R], list[str]] = lambda report: []
    at_least: bool = False
    whole: Callable[[R], float] | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """Return the units of its limits."""
        return (self.unit,) if self.whole is None else ("part", self.unit)

    def measure(self, report: R) -> float | None:
        """Return the figure of a report; None if the report lacks it."""
        return read_value(report, self.amount)


type Figures[R] = Mapping[str, Figure[R]]
"""Numbers of a report, by name."""


@dataclass(frozen=True)
class BytesUse:
    """Bytes of one report, with a key to match the other report.

    Attributes:
        key: The key.
        what: Name of the buffer or collective.
        where: Source line; empty if unknown.
        nbytes: Bytes on one device.
        seconds: Network time.
    """

    key: tuple[str, ...]
    what: str
    where: str
    nbytes: int
    seconds: float = 0.0


def held_uses(values: Iterable[Any]) -> list[BytesUse]:
    """Return the bytes of arguments and results on one device, keyed by path.

    Args:
        values: Values with a `path` and `device_bytes`.
    """
    return [BytesUse(("value", v.path), v.path, "", v.device_bytes) for v in values]


def _traffic_use(c: CollectiveReport) -> BytesUse:
    """Return the bytes of a collective, keyed by kind, axes, network and operation or argument.

    The key excludes the line number, which changes with every edit above it.
    """
    operation, (_, source) = cause_text(c), find_cause(c)
    function = source.function if source is not None else ""
    return BytesUse(
        key=(c.kind, c.along, c.network, operation, function),
        what=f"{c.kind} along {c.along}" + (f" for {operation}" if operation else ""),
        where=line_text(source),
        nbytes=c.sent_bytes,
        seconds=c.seconds,
    )


def _usage_changes(old: Iterable[BytesUse], new: Iterable[BytesUse]) -> tuple[UsageChange, ...]:
    """Return what changed between two lists of uses, the largest difference first."""
    alike: dict[tuple[str, ...], tuple[list[BytesUse], list[BytesUse]]] = {}
    for report, uses in enumerate((old, new)):
        for use in uses:
            alike.setdefault(use.key, ([], []))[report].append(use)
    changes = []
    for before, after in alike.values():
        last = (after or before)[0]
        old_bytes, new_bytes = (sum(use.nbytes for use in uses) for uses in (before, after))
        seconds = (sum(use.seconds for use in uses) for uses in (before, after))
        change: Literal["added", "removed", "grown", "shrunk"]
        change = "grown" if new_bytes > old_bytes else "shrunk"
        change = "added" if not before else "removed" if not after else change
        if old_bytes != new_bytes:
            changes.append(
                UsageChange(change, last.what, last.where, old_bytes, new_bytes, *seconds)
            )
    return tuple(sorted(changes, key=lambda c: -abs(c.new_bytes - c.old_bytes)))


type _Texts = Mapping[str, tuple[str, str]]
"""Texts by the names of facts, each with its source line."""


def _list_texts(report: Any) -> dict[str, _Texts]:
    """Return the texts of values in a report, by field of `Comparison`."""
    findings = {
        f"{f.operation} of {' · '.join(f.operands)}": (
            f"repeated by {f.devices} devices",
            line_text(f.source),
        )
        for f in report.repeated
    }
    findings |= {c.path: (f"{in_bytes(c.nbytes)} closed over", "") for c in report.constants}
    unmet = (u for u in report.unmet if u.kind != "donation")
    values = (*report.inputs, *report.outputs)
    return {
        "shardings": {v.path: (f"{short_type(v)} {sharding_text(v)}", "") for v in values},
        "donations": {d.path: (_fate(d), "") for d in report.donations},
        "unmet": {u.path: (f"{u.requested}: {u.actual}", line_text(u.source)) for u in unmet},
        "findings": findings,
    }


def _fate(d: DonationReport) -> str:
    if d.donated:
        return f"{REUSED} {d.result}" if d.result else "donated, not reused"
    return "not donated"


def _changes(before: _Texts, after: _Texts) -> tuple[FactChange, ...]:
    """Return the texts that differ."""
    none = "", ""
    return tuple(
        FactChange(name, old, new, new_line or old_line)
        for name in {**before, **after}
        for (old, old_line), (new, new_line) in [(before.get(name, none), after.get(name, none))]
        if old != new
    )


def compare_reports[R](
    old: R,
    new: R,
    facts: Facts[R],
    figures: Figures[R],
    held: Callable[[R], Sequence[BytesUse]],
    collectives: str,
) -> Comparison:
    """Compare two reports of a program, or of preflights.

    Args:
        old: Report before the change.
        new: Report after the change.
        facts: The texts to compare.
        figures: The numbers to compare.
        held: Returns the bytes that a device holds.
        collectives: Name of the attribute with the collectives.
    """
    one, other = (
        {name: (read_value(r, fact), "") for name, fact in facts.items()} for r in (old, new)
    )
    sent, now_sent = (read_value(r, collectives) for r in (old, new))
    before, after = _list_texts(old), _list_texts(new)
    along, now_along = sent_by_axes(sent), sent_by_axes(now_sent)
    numbers = [
        AmountChange(name, figure.unit, figure.measure(old), figure.measure(new))
        for name, figure in figures.items()
    ]
    numbers = [number for number in numbers if number.old or number.new]
    numbers += [
        AmountChange(f"sent along {axes}", "bytes", along.get(axes, 0), now_along.get(axes, 0))
        for axes in {**along, **now_along}
    ]
    return Comparison(
        old=read_value(old, "name"),
        new=read_value(new, "name"),
        facts=_changes(one, other),
        amounts=tuple(numbers),
        memory=_usage_changes(held(old), held(new)),
        traffic=_usage_changes(*(list(map(_traffic_use, rows)) for rows in (sent, now_sent))),
        drawn=(),
        **{field: _changes(texts, after[field]) for field, texts in before.items()},
    )


_PROGRAM_FACTS: Facts[ProgramReport] = {
    "function": "name",
    "devices": lambda r: f"{r.place.num_devices} × {r.place.device_kind}",
    "mesh": lambda r: sizes_text(r.place.mesh),
    "partitioner": "place.partitioner",
    "xlashard": "place.xlashard",
    "jax": "place.jax",
    "jaxlib": "place.jaxlib",
}


def _other_results(report: ProgramReport) -> int | None:
    memory = report.memory
    return None if memory is None else memory.result_bytes - memory.alias_bytes


def _held(report: ProgramReport) -> list[BytesUse]:
    reused = {d.result for d in report.donations if d.is_reused}
    fresh = [v for v in report.outputs if v.path not in reused]
    return held_uses([*report.inputs, *fresh])


def compare_programs(old: ProgramReport, new: ProgramReport) -> Comparison:
    """Compare two reports of `explain`.

    Args:
        old: Report before the change.
        new: Report after the change.

    Example:
        >>> import jax, xlashard
        >>> from xlashard import Mesh, NamedSharding, P
        >>> mesh = xlashard.make_mesh((8,), ("data",))
        >>> x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh, P("data")))
        >>> rows, total = (xlashard.explain(jax.jit(lambda x: x.sum(axis)), x) for axis in (1, 0))
        >>> [(u.change, u.what, u.new_bytes) for u in compare_programs(rows, total).traffic]
        [('added', 'all-reduce along data for reduce_sum', 112)]
    """
    return compare_reports(old, new, _PROGRAM_FACTS, _FIGURES, _held, "collectives")


_SHOWN = 5
"""Maximum number of contributions listed for an exceeded limit."""


@dataclass(frozen=True)
class Breach:
    """A limit that a program exceeds.

    Attributes:
        limit: The limit.
        key: Key of the limit.
        value: Figure of the program in the unit of the limit; None if the report lacks it.
        lines: Largest contributions, first the largest; without a figure, the reason.
    """

    limit: Limit
    key: Figure[Any]
    value: float | None
    lines: tuple[str, ...]

    def __str__(self) -> str:
        key = self.key
        if self.value is None:
            why = "; ".join(self.lines) or f"the report has no {key.description}"
            return f"{self.limit.text} can't be checked: {why}"
        text = FORMATTERS[self.limit.quantity]
        value, limit = text(self.value), text(self.limit.value)
        side = "less than" if key.at_least else "more than"
        head = f"{self.limit.text} is not met: {key.description} is {value}, {side} {limit}"
        return "\n".join([head, *(f"  {line}" for line in self.lines)])


def find_breaches[R](report: R, limits: Iterable[Limit], keys: Figures[R]) -> tuple[Breach, ...]:
    """Return the limits that a program exceeds.

    Args:
        report: Report of the program.
        limits: Limits from `parse_limits`.
        keys: The figures that can be limited.
    """
    breaches = (_breach(report, limit, keys[limit.key]) for limit in limits)
    return tuple(breach for breach in breaches if breach is not None)


def _breach[R](report: R, limit: Limit, key: Figure[R]) -> Breach | None:
    value = key.measure(report)
    if value is None:
        return Breach(limit, key, None, ())
    if limit.quantity == "part" and key.whole is not None:
        value /= key.whole(report)
    is_kept = value >= limit.value if key.at_least else value <= limit.value
    if is_kept:
        return None
    return Breach(limit, key, value, tuple(key.contributors(report)[:_SHOWN]))


def _collective_line(c: CollectiveReport) -> str:
    use = _traffic_use(c)
    return _append_line(use.what, use.where) + (f" ×{c.times}" if c.times > 1 else "")


def list_largest(sizes: Iterable[tuple[int, str]]) -> list[str]:
    """Return a line for each of some bytes and their names, most bytes first."""
    largest = sorted(sizes, key=lambda item: -item[0])
    return [f"{in_bytes(nbytes)} {what}" for nbytes, what in largest if nbytes]


def list_collectives(collectives: Iterable[CollectiveReport]) -> list[str]:
    """Return a line for each collective that sends bytes, most bytes first."""
    return list_largest((c.sent_bytes, _collective_line(c)) for c in collectives)


def traffic_key(collectives: str, description: str, **fields: object) -> Figure[Any]:
    """Return the key of the bytes that collectives send.

    Args:
        collectives: Name of the attribute of a report with the collectives.
        description: Description for messages.
        **fields: Values of the fields of those that count.
    """

    def select(report: Any) -> list[CollectiveReport]:
        return [
            c
            for c in read_value(report, collectives)
            if all(getattr(c, name) == value for name, value in fields.items())
        ]

    return Figure(
        "bytes",
        lambda report: sum(c.sent_bytes for c in select(report)),
        description,
        lambda report: list_collectives(select(report)),
    )


def traffic_keys(collectives: str) -> dict[str, Figure[Any]]:
    """Return the keys of the bytes that collectives of each kind, and all, send.

    Args:
        collectives: Name of the attribute of a report with the collectives.
    """
    keys = {
        f"{kind.replace('-', '_')}_bytes": traffic_key(
            collectives, f"the {kind} traffic of a device", kind=kind
        )
        for kind in KINDS
    }
    return {
        **keys,
        "collective_bytes": traffic_key(collectives, "the collective traffic of a device"),
    }


def _largest(report: ProgramReport) -> list[str]:
    values = (*report.inputs, *report.outputs)
    return list_largest((v.device_bytes, f"{v.path} {v.type}") for v in values)


def _list_moves(report: ProgramReport) -> list[str]:
    return list_largest((m.nbytes, f"{m.path}: {m.source} → {m.target}") for m in report.moves)


_FIGURES: Figures[ProgramReport] = {
    "memory": Figure("bytes", "memory.total_bytes", "the memory of a device", _largest),
    "memory: arguments": Figure("bytes", "memory.argument_bytes", "argument memory", _largest),
    "memory: other results": Figure("bytes", _other_results),
    "memory: temporaries": Figure("bytes", "memory.temporary_bytes", "temporary memory"),
    "sent": traffic_key("collectives", "the collective traffic of a device"),
    "collectives run": Figure(
        "number",
        lambda r: sum(c.times for c in r.collectives),
        "number of collectives that run",
        lambda r: list_collectives(r.collectives),
    ),
    "arithmetic": Figure("flop", "cost.flops", "the FLOP of a device"),
    "memory read and written": Figure("bytes", "cost.bytes_accessed"),
    "moved before each call": Figure(
        "bytes",
        lambda r: sum(m.nbytes for m in r.moves),
        "the bytes moved before each call",
        _list_moves,
    ),
}
"""Numbers of `explain` that comparisons show."""

PROGRAM_KEYS: Figures[ProgramReport] = {
    "memory": _FIGURES["memory"],
    "argument_bytes": _FIGURES["memory: arguments"],
    "temporary_bytes": _FIGURES["memory: temporaries"],
    "flops": _FIGURES["arithmetic"],
    **traffic_keys("collectives"),
    "collectives": _FIGURES["collectives run"],
    "moved_bytes": _FIGURES["moved before each call"],
    "silently_replicated_bytes": Figure(
        "bytes",
        lambda r: sum(u.nbytes for u in r.unmet if u.is_whole),
        "the bytes of a device replicated silently",
        lambda r: list_largest((u.nbytes, f"{u.path} {u.actual}") for u in r.unmet if u.is_whole),
    ),
    "unmet": Figure(
        "number",
        lambda r: len(r.unmet),
        "the number of requests not done",
        lambda r: [f"{in_bytes(u.nbytes)} {u.path}: {u.requested}, {u.actual}" for u in r.unmet],
    ),
}
"""Figures of `explain` that a budget can limit; bytes and FLOP are per device and execution."""


def read_program_budget(words: Iterable[str]) -> tuple[Limit, ...]:
    """Parse limits on a report of `explain`.

    Args:
        words: Each `KEY=VALUE`, such as `memory=80GiB`.

    Raises:
        ArgumentError: If a key or value is invalid.
    """
    return parse_limits(words, {name: key.units for name, key in PROGRAM_KEYS.items()})
