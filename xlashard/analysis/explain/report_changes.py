"""Changes between two reports of programs, and limits on the figures of one: `memory=80GiB`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    MemoryReport,
    RepeatedReport,
    ValueReport,
)
from xlashard.analysis.explain.program_report import ProgramReport
from xlashard.analysis.explain.sections import sharding_text, short_type
from xlashard.analysis.report.texts import line_text, operation_text
from xlashard.hlo.collective_kinds import KINDS
from xlashard.support.formatting import FORMATTERS, Limit, Unit, in_bytes, sizes_text

type Facts[R] = Mapping[str, Callable[[R], str]]
"""Texts of a report, by name."""

type Amounts[R] = Mapping[str, tuple[Unit, Callable[[R], float | None]]]
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


_NOTHING = BytesUse((), "", "", 0)


def held_uses(values: Iterable[Any]) -> list[BytesUse]:
    """Return the bytes of arguments and results on one device, keyed by path.

    Args:
        values: Values with a `path` and `device_bytes`.
    """
    return [BytesUse(("value", v.path), v.path, "", v.device_bytes) for v in values]


def traffic_use(c: CollectiveReport) -> BytesUse:
    """Return the bytes of a collective, keyed by kind, axes, network and operation or argument.

    The key excludes the line number, which changes with every edit above it.
    """
    source = c.source or c.needed_by_source
    operation = c.argument or operation_text(c.op_name or c.needed_by)
    function = source.function if source is not None else ""
    return BytesUse(
        key=(c.kind, c.along, c.network, operation, function),
        what=f"{c.kind} along {c.along}" + (f" for {operation}" if operation else ""),
        where=line_text(source) if source is not None else "",
        nbytes=c.sent_bytes,
        seconds=c.seconds,
    )


def usage_changes(old: Sequence[BytesUse], new: Sequence[BytesUse]) -> tuple[UsageChange, ...]:
    """Return the uses whose bytes differ, largest change first."""
    before, after = _by_key(old), _by_key(new)
    changes = [_use_change(before.get(key), after.get(key)) for key in {**before, **after}]
    changed = [change for change in changes if change.old_bytes != change.new_bytes]
    return tuple(sorted(changed, key=lambda c: -abs(c.new_bytes - c.old_bytes)))


def _by_key(uses: Sequence[BytesUse]) -> dict[tuple[str, ...], BytesUse]:
    totals: dict[tuple[str, ...], BytesUse] = {}
    for use in uses:
        known = totals.get(use.key)
        if known is not None:
            nbytes, seconds = use.nbytes + known.nbytes, use.seconds + known.seconds
            use = BytesUse(use.key, known.what, known.where, nbytes, seconds)
        totals[use.key] = use
    return totals


def _use_change(old: BytesUse | None, new: BytesUse | None) -> UsageChange:
    change: Literal["added", "removed", "grown", "shrunk"]
    if old is None:
        change = "added"
    elif new is None:
        change = "removed"
    else:
        change = "grown" if new.nbytes > old.nbytes else "shrunk"
    last, before, after = new or old or _NOTHING, old or _NOTHING, new or _NOTHING
    return UsageChange(
        change, last.what, last.where, before.nbytes, after.nbytes, before.seconds, after.seconds
    )


def fact_changes[R](facts: Facts[R], old: R, new: R) -> tuple[FactChange, ...]:
    """Return the texts that differ between two reports."""
    return _changes(*({name: fact(r) for name, fact in facts.items()} for r in (old, new)))


def amount_changes[R](amounts: Amounts[R], old: R, new: R) -> tuple[AmountChange, ...]:
    """Return the numbers of two reports that at least one of them has."""
    changes = [AmountChange(name, unit, of(old), of(new)) for name, (unit, of) in amounts.items()]
    return tuple(change for change in changes if change.old or change.new)


def value_changes(old: Any, new: Any) -> dict[str, tuple[FactChange, ...]]:
    """Return the fields of a comparison that follow from values of two reports.

    Args:
        old: A report of a program, or of a preflight.
        new: Another one.
    """
    texts = [
        {
            "shardings": {v.path: _value(v) for v in (*r.inputs, *r.outputs)},
            "donations": {d.path: _fate(d) for d in r.donations},
            "unmet": {
                u.path: f"{u.requested}: {u.actual}" for u in r.unmet if u.kind != "donation"
            },
            "findings": {
                **{_repeated_name(f): f"repeated by {f.devices} devices" for f in r.repeated},
                **{c.path: f"{in_bytes(c.nbytes)} closed over" for c in r.constants},
            },
        }
        for r in (old, new)
    ]
    # Lines change with every edit above them, and are no part of a finding's name.
    where: dict[str, str] = {}
    for report in (old, new):
        where |= {u.path: line_text(u.source) for u in report.unmet if u.source is not None}
        rows = [f for f in report.repeated if f.source is not None]
        where |= {_repeated_name(f): line_text(f.source) for f in rows}
    return {
        name: tuple(
            replace(change, where=where.get(change.name, ""))
            if name in ("unmet", "findings")
            else change
            for change in _changes(texts[0][name], texts[1][name])
        )
        for name in texts[0]
    }


def _repeated_name(row: RepeatedReport) -> str:
    return f"{row.operation} of {' · '.join(row.operands)}"


def axis_changes(
    old: Sequence[CollectiveReport], new: Sequence[CollectiveReport]
) -> tuple[AmountChange, ...]:
    """Return the bytes that a device sends along the axes of either report."""
    sums: list[dict[str, float]] = []
    for rows in (old, new):
        sent: dict[str, float] = {}
        for c in rows:
            sent[c.along] = sent.get(c.along, 0) + c.sent_bytes
        sums.append(sent)
    return tuple(
        AmountChange(f"sent along {along}", "bytes", sums[0].get(along, 0), sums[1].get(along, 0))
        for along in {**sums[0], **sums[1]}
    )


def _value(v: ValueReport) -> str:
    return f"{short_type(v)} {sharding_text(v)}"


def _fate(d: DonationReport) -> str:
    if d.donated:
        return f"{REUSED} {d.result}" if d.result else "donated, not reused"
    return "not donated"


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[FactChange, ...]:
    return tuple(
        FactChange(path, before.get(path, ""), after.get(path, ""))
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    )


_FACTS: Facts[ProgramReport] = {
    "function": lambda r: r.name,
    "devices": lambda r: f"{r.place.num_devices} × {r.place.device_kind}",
    "mesh": lambda r: sizes_text(r.place.mesh),
    "partitioner": lambda r: r.place.partitioner,
    "xlashard": lambda r: r.place.xlashard,
    "jax": lambda r: r.place.jax,
    "jaxlib": lambda r: r.place.jaxlib,
}


def _of_memory(measure: Callable[[MemoryReport], int]) -> Callable[[ProgramReport], float | None]:
    return lambda r: None if r.memory is None else measure(r.memory)


_AMOUNTS: Amounts[ProgramReport] = {
    "memory": ("bytes", _of_memory(lambda m: m.total_bytes)),
    "memory: arguments": ("bytes", _of_memory(lambda m: m.argument_bytes)),
    "memory: other results": ("bytes", _of_memory(lambda m: m.result_bytes - m.alias_bytes)),
    "memory: temporaries": ("bytes", _of_memory(lambda m: m.temporary_bytes)),
    "sent": ("bytes", lambda r: sum(c.sent_bytes for c in r.collectives)),
    "collectives run": ("number", lambda r: sum(c.times for c in r.collectives)),
    "arithmetic": ("flop", lambda r: None if r.cost is None else r.cost.flops),
    "memory read and written": (
        "bytes",
        lambda r: None if r.cost is None else r.cost.bytes_accessed,
    ),
    "moved before each call": ("bytes", lambda r: sum(m.nbytes for m in r.moves)),
}


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

    def held(report: ProgramReport) -> list[BytesUse]:
        reused = {d.result for d in report.donations if d.is_reused}
        fresh = [v for v in report.outputs if v.path not in reused]
        return held_uses([*report.inputs, *fresh])

    return Comparison(
        old=old.name,
        new=new.name,
        facts=fact_changes(_FACTS, old, new),
        amounts=(
            *amount_changes(_AMOUNTS, old, new),
            *axis_changes(old.collectives, new.collectives),
        ),
        memory=usage_changes(held(old), held(new)),
        traffic=usage_changes(*(list(map(traffic_use, r.collectives)) for r in (old, new))),
        **value_changes(old, new),
    )


_SHOWN = 5
"""Maximum number of contributions listed for an exceeded limit."""


@dataclass(frozen=True)
class BudgetKey[R]:
    """Figure of a report that a budget can limit.

    Attributes:
        quantity: Unit of the figure.
        description: Description for messages.
        measure: Function from a report to the figure; None if the report lacks it.
        contributors: The largest contributions, as text lines.
        at_least: Whether the limit is a lower bound.
        whole: Function from a report to the amount that a limit in percent refers to.
    """

    quantity: Unit
    description: str
    measure: Callable[[R], float | None]
    contributors: Callable[[R], list[str]] = lambda report: []
    at_least: bool = False
    whole: Callable[[R], float] | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """Return the units of its limits."""
        return (self.quantity,) if self.whole is None else ("part", self.quantity)


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
    key: BudgetKey[Any]
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


def find_breaches[R](
    report: R, limits: Iterable[Limit], keys: Mapping[str, BudgetKey[R]]
) -> tuple[Breach, ...]:
    """Return the limits that a program exceeds.

    Args:
        report: Report of the program.
        limits: Limits from `parse_limits`.
        keys: The figures that can be limited.
    """
    breaches = (_breach(report, limit, keys[limit.key]) for limit in limits)
    return tuple(breach for breach in breaches if breach is not None)


def _breach[R](report: R, limit: Limit, key: BudgetKey[R]) -> Breach | None:
    value = key.measure(report)
    if value is None:
        return Breach(limit, key, None, ())
    if limit.quantity == "part" and key.whole is not None:
        value /= key.whole(report)
    is_kept = value >= limit.value if key.at_least else value <= limit.value
    if is_kept:
        return None
    return Breach(limit, key, value, tuple(key.contributors(report)[:_SHOWN]))


def collective_lines(collectives: Iterable[CollectiveReport]) -> list[str]:
    """Return a line for each collective that sends bytes, most bytes first."""
    sending = [c for c in collectives if c.sent_bytes]
    return [_collective_line(c) for c in sorted(sending, key=lambda c: -c.sent_bytes)]


def _collective_line(c: CollectiveReport) -> str:
    source = c.source or c.needed_by_source
    where = f" at {line_text(source)}" if source is not None else ""
    what = c.argument or operation_text(c.op_name or c.needed_by)
    times = f" ×{c.times}" if c.times > 1 else ""
    text = f"{in_bytes(c.sent_bytes)} {c.kind}{times} along {c.along}{where}"
    return f"{text} for {what}" if what else text


def _largest(report: ProgramReport) -> list[str]:
    values = sorted((*report.inputs, *report.outputs), key=lambda v: -v.device_bytes)
    return [f"{in_bytes(v.device_bytes)} {v.path} {v.type}" for v in values if v.device_bytes]


def _sent(description: str, kind: str = "") -> BudgetKey[ProgramReport]:
    def of(report: ProgramReport) -> list[CollectiveReport]:
        return [c for c in report.collectives if not kind or c.kind == kind]

    return BudgetKey(
        "bytes",
        description,
        lambda r: sum(c.sent_bytes for c in of(r)),
        lambda r: collective_lines(of(r)),
    )


def _of_amount(
    name: str,
    description: str,
    contributors: Callable[[ProgramReport], list[str]] = lambda report: [],
) -> BudgetKey[ProgramReport]:
    """Return the key of a number that comparisons show too."""
    unit, measure = _AMOUNTS[name]
    return BudgetKey(unit, description, measure, contributors)


PROGRAM_KEYS: dict[str, BudgetKey[ProgramReport]] = {
    "memory": _of_amount("memory", "the memory of a device", _largest),
    "argument_bytes": _of_amount("memory: arguments", "argument memory", _largest),
    "temporary_bytes": _of_amount("memory: temporaries", "temporary memory"),
    "flops": _of_amount("arithmetic", "the FLOP of a device"),
    **{
        f"{kind.replace('-', '_')}_bytes": _sent(f"the {kind} traffic of a device", kind)
        for kind in KINDS
    },
    "collective_bytes": _sent("the collective traffic of a device"),
    "collectives": _of_amount(
        "collectives run",
        "number of collectives that run",
        lambda r: collective_lines(r.collectives),
    ),
    "moved_bytes": _of_amount(
        "moved before each call",
        "the bytes moved before each call",
        lambda r: [f"{in_bytes(m.nbytes)} {m.path}: {m.source} → {m.target}" for m in r.moves],
    ),
    "silently_replicated_bytes": BudgetKey(
        "bytes",
        "the bytes of a device replicated silently",
        lambda r: sum(u.nbytes for u in r.unmet if u.is_whole),
        lambda r: [f"{in_bytes(u.nbytes)} {u.path} {u.actual}" for u in r.unmet if u.is_whole],
    ),
    "unmet": BudgetKey(
        "number",
        "the number of requests not done",
        lambda r: len(r.unmet),
        lambda r: [f"{in_bytes(u.nbytes)} {u.path}: {u.requested}, {u.actual}" for u in r.unmet],
    ),
}
"""Figures of `explain` that a budget can limit; bytes and FLOP are per device and execution."""
