"""Changes between two reports of programs, and limits on the figures of one: `memory=80GiB`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from xlashard.analysis.explain.comparison import (
    REUSED,
    AmountChange,
    Comparison,
    FactChange,
    UsageChange,
)
from xlashard.analysis.explain.model import (
    CollectiveReport,
    DonationReport,
)
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.analysis.explain.sections import (
    cause_text,
    find_cause,
    sent_by_axes,
    sharding_text,
    short_type,
)
from xlashard.analysis.report.cells import read_value
from xlashard.analysis.report.texts import line_text
from xlashard.hlo.collective_kinds import KINDS
from xlashard.support.formatting import (
    FORMATTERS,
    Limit,
    Unit,
    in_bytes,
    parse_limits,
    sizes_text,
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


def _usage_changes(old: Sequence[BytesUse], new: Sequence[BytesUse]) -> tuple[UsageChange, ...]:
    """Return what changed between two lists of uses, the largest difference first."""
    before, after = _sum_uses(old), _sum_uses(new)
    changes = [_use_change(before.get(key), after.get(key)) for key in {**before, **after}]
    changed = [change for change in changes if change.old_bytes != change.new_bytes]
    return tuple(sorted(changed, key=lambda c: -abs(c.new_bytes - c.old_bytes)))


def _sum_uses(uses: Sequence[BytesUse]) -> dict[tuple[str, ...], BytesUse]:
    """Return the uses by key, those of one key together."""
    totals: dict[tuple[str, ...], BytesUse] = {}
    for use in uses:
        known = totals.get(use.key, replace(use, nbytes=0, seconds=0.0))
        totals[use.key] = replace(
            known, nbytes=known.nbytes + use.nbytes, seconds=known.seconds + use.seconds
        )
    return totals


def _use_change(old: BytesUse | None, new: BytesUse | None) -> UsageChange:
    last = new or old or BytesUse((), "", "", 0)
    before, after = (each or replace(last, nbytes=0, seconds=0.0) for each in (old, new))
    change: Literal["added", "removed", "grown", "shrunk"]
    change = "grown" if after.nbytes > before.nbytes else "shrunk"
    change = "added" if old is None else "removed" if new is None else change
    return UsageChange(
        change, last.what, last.where, before.nbytes, after.nbytes, before.seconds, after.seconds
    )


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


def _axis_changes(
    old: Sequence[CollectiveReport], new: Sequence[CollectiveReport]
) -> Iterator[AmountChange]:
    """Yield the bytes that a device sends along the axes of either report."""
    before, after = sent_by_axes(old), sent_by_axes(new)
    for along in {**before, **after}:
        sent, now_sent = before.get(along, 0), after.get(along, 0)
        yield AmountChange(f"sent along {along}", "bytes", sent, now_sent)


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
    numbers = [
        AmountChange(name, figure.unit, figure.measure(old), figure.measure(new))
        for name, figure in figures.items()
    ]
    return Comparison(
        old=read_value(old, "name"),
        new=read_value(new, "name"),
        facts=_changes(one, other),
        amounts=(*(n for n in numbers if n.old or n.new), *_axis_changes(sent, now_sent)),
        memory=_usage_changes(held(old), held(new)),
        traffic=_usage_changes(*(list(map(_traffic_use, rows)) for rows in (sent, now_sent))),
        drawn=(),
        **{field: _changes(texts, after[field]) for field, texts in before.items()},
    )


_FACTS: Facts[ProgramReport] = {
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
    return compare_reports(old, new, _FACTS, _FIGURES, _held, "collectives")


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
    operation, where = cause_text(c), line_text(find_cause(c)[1])
    at = f" at {where}" if where else ""
    times = f" ×{c.times}" if c.times > 1 else ""
    what = f" for {operation}" if operation else ""
    return f"{c.kind}{times} along {c.along}{at}{what}"


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
