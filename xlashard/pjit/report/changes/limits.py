"""Limits on the figures of a report: `memory=80GiB`, `all_gather_bytes=2GB`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xlashard.budgets import Limit, Unit
from xlashard.hlo.collectives import KINDS
from xlashard.pjit.report.changes.comparison import FORMATTERS
from xlashard.pjit.report.model import CollectiveReport
from xlashard.pjit.report.program_report import ProgramReport
from xlashard.pjit.report.tables import line_text, operation_text
from xlashard.wording import in_bytes

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
        lines: Largest contributions, first the largest.
    """

    limit: Limit
    key: BudgetKey[Any]
    value: float | None
    lines: tuple[str, ...]

    def __str__(self) -> str:
        key = self.key
        if self.value is None:
            return f"{self.limit.text} can't be checked: the report has no {key.description}"
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
    found = (_breach(report, limit, keys[limit.key]) for limit in limits)
    return tuple(breach for breach in found if breach is not None)


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


def _of_memory(name: str) -> Callable[[ProgramReport], float | None]:
    return lambda r: None if r.memory is None else getattr(r.memory, name)


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


PROGRAM_KEYS: dict[str, BudgetKey[ProgramReport]] = {
    "memory": BudgetKey("bytes", "the memory of a device", _of_memory("total_bytes"), _largest),
    "argument_bytes": BudgetKey("bytes", "argument memory", _of_memory("argument_bytes"), _largest),
    "temporary_bytes": BudgetKey("bytes", "temporary memory", _of_memory("temporary_bytes")),
    "flops": BudgetKey(
        "flop", "the FLOP of a device", lambda r: None if r.cost is None else r.cost.flops
    ),
    **{
        f"{kind.replace('-', '_')}_bytes": _sent(f"the {kind} traffic of a device", kind)
        for kind in KINDS
    },
    "collective_bytes": _sent("the collective traffic of a device"),
    "collectives": BudgetKey(
        "number",
        "number of collectives that run",
        lambda r: sum(c.times for c in r.collectives),
        lambda r: collective_lines(r.collectives),
    ),
    "moved_bytes": BudgetKey(
        "bytes",
        "the bytes moved before each call",
        lambda r: sum(m.nbytes for m in r.moves),
        lambda r: [f"{in_bytes(m.nbytes)} {m.path}: {m.source} → {m.target}" for m in r.moves],
    ),
    "silently_replicated_bytes": BudgetKey(
        "bytes",
        "the bytes of a device replicated silently",
        lambda r: sum(v.wasted_bytes for v in r.replications),
        lambda r: [f"{in_bytes(v.wasted_bytes)} {v.path} {v.spec}" for v in r.replications],
    ),
}
"""Figures of `explain` that a budget can limit; bytes and FLOP are per device and execution."""
