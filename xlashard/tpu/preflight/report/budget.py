"""Limits on the figures of a report: `hbm=90%`, `all_gather_bytes=2GB`."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError
from xlashard.hlo.collectives import KINDS
from xlashard.pjit.report.tables import line_text, operation_text
from xlashard.tpu.preflight.render.report_text import FORMATTERS
from xlashard.tpu.preflight.report.preflight_model import TrafficReport, Unit
from xlashard.tpu.preflight.report.preflight_report import PreflightReport
from xlashard.wording import in_bytes, in_seconds

_SHOWN = 5
"""Maximum number of contributions listed for an exceeded limit."""

_UNITS: dict[Unit, dict[str, float]] = {
    "bytes": {
        "b": 1,
        **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
        **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
    },
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60},
    "part": {"%": 0.01},
    "flop": {"flop": 1, **{f"{p}flop": 1000**i for i, p in enumerate("kmgtp", 1)}},
    "number": {},
}
_EXAMPLES = {"bytes": "2GB", "seconds": "250ms", "part": "90%", "flop": "3PFLOP", "number": "100"}


@dataclass(frozen=True)
class BudgetKey:
    """Figure of a report that a budget can limit.

    Attributes:
        quantity: Unit of the figure.
        description: Description for messages.
        measure: Function from a report to the figure; None if the report lacks it.
        contributors: The largest contributions, as text lines.
        at_least: Whether the limit is a lower bound.
    """

    quantity: Unit
    description: str
    measure: Callable[[PreflightReport], float | None]
    contributors: Callable[[PreflightReport], list[str]] = lambda report: []
    at_least: bool = False


@dataclass(frozen=True)
class Limit:
    """Limit of one figure.

    Attributes:
        key: Key: `all_gather_bytes`.
        quantity: Unit of the value; `hbm` accepts a percentage or bytes.
        value: The limit.
        text: Text as entered: `all_gather_bytes=2GB`.
    """

    key: str
    quantity: Unit
    value: float
    text: str


@dataclass(frozen=True)
class Breach:
    """A limit that a program exceeds.

    Attributes:
        limit: The limit.
        value: Figure of the program in the unit of the limit; None if the report lacks it.
        lines: Largest contributions, first the largest.
    """

    limit: Limit
    value: float | None
    lines: tuple[str, ...]

    def __str__(self) -> str:
        key = KEYS[self.limit.key]
        if self.value is None:
            return f"{self.limit.text} can't be checked: the report has no {key.description}"
        text = FORMATTERS[self.limit.quantity]
        value, limit = text(self.value), text(self.limit.value)
        side = "less than" if key.at_least else "more than"
        head = f"{self.limit.text} is not met: {key.description} is {value}, {side} {limit}"
        return "\n".join([head, *(f"  {line}" for line in self.lines)])


def _sent(report: PreflightReport, keep: Callable[[TrafficReport], bool]) -> float:
    return sum(t.collective.sent_bytes for t in report.traffic if keep(t))


def _traffic_lines(report: PreflightReport, keep: Callable[[TrafficReport], bool]) -> list[str]:
    found = sorted(filter(keep, report.traffic), key=lambda t: -t.collective.sent_bytes)
    return [_traffic_line(t) for t in found if t.collective.sent_bytes]


def _traffic_line(t: TrafficReport) -> str:
    c = t.collective
    source = c.source or c.needed_by_source
    where = f" at {line_text(source)}" if source is not None else ""
    what = c.argument or operation_text(c.op_name or c.needed_by)
    times = f" ×{c.times}" if c.times > 1 else ""
    text = f"{in_bytes(c.sent_bytes)} {c.kind}{times} along {c.along}{where}"
    return f"{text} for {what}" if what else text


def _traffic(description: str, keep: Callable[[TrafficReport], bool]) -> BudgetKey:
    return BudgetKey(
        "bytes", description, lambda r: _sent(r, keep), lambda r: _traffic_lines(r, keep)
    )


def _kind(kind: str) -> Callable[[TrafficReport], bool]:
    return lambda t: t.collective.kind == kind


def _network(network: str) -> Callable[[TrafficReport], bool]:
    return lambda t: t.network == network


def _held(report: PreflightReport) -> list[str]:
    """Return the largest buffers in HBM."""
    m = report.memory
    fresh = [h for h in m.results if not h.aliased]
    found = [(h.device_bytes, f"{h.path} {h.type}") for h in (*m.arguments, *fresh)]
    found += _temporaries(report)
    return [f"{in_bytes(size)} {what}" for size, what in sorted(found, reverse=True) if size]


def _temporaries(report: PreflightReport) -> list[tuple[int, str]]:
    return [
        (
            t.device_bytes,
            f"{t.type} of {operation_text(t.op_name) if t.op_name else t.name}"
            + (f" at {line_text(t.source)}" if t.source is not None else ""),
        )
        for t in report.memory.temporaries
    ]


def _waits(report: PreflightReport) -> list[str]:
    t = report.time
    found = [
        (t.compute_seconds, "of arithmetic"),
        (t.hbm_seconds, "of HBM"),
        (t.ici_seconds, "of links within a slice"),
        (t.dcn_seconds, "of the network between slices"),
        (t.compiler_seconds or 0.0, "by the compiler's estimate"),
    ]
    return [f"{in_seconds(s)} {what}" for s, what in sorted(found, reverse=True) if s]


KEYS: dict[str, BudgetKey] = {
    "hbm": BudgetKey("part", "HBM use", lambda r: r.memory.total_bytes, _held),
    "argument_bytes": BudgetKey(
        "bytes", "argument memory", lambda r: r.memory.argument_bytes, _held
    ),
    "temporary_bytes": BudgetKey(
        "bytes",
        "temporary memory",
        lambda r: r.memory.temporary_bytes,
        lambda r: [f"{in_bytes(size)} {what}" for size, what in sorted(_temporaries(r))[::-1]],
    ),
    "time": BudgetKey("seconds", "the time of one execution", lambda r: r.time.seconds, _waits),
    "flops": BudgetKey("flop", "the FLOP of a device", lambda r: r.time.flops),
    "hbm_traffic_bytes": BudgetKey("bytes", "HBM traffic", lambda r: r.time.hbm_bytes),
    **{
        f"{kind.replace('-', '_')}_bytes": _traffic(f"the {kind} traffic of a device", _kind(kind))
        for kind in KINDS
    },
    "collective_bytes": _traffic("the collective traffic of a device", lambda t: True),
    "ici_bytes": _traffic("the traffic of a device within its slice", _network("ici")),
    "dcn_bytes": _traffic("the traffic of a device between slices", _network("dcn")),
    "unrequested_bytes": _traffic(
        "the traffic that the program does not require", lambda t: not t.requested
    ),
    "compile_time": BudgetKey("seconds", "the compile time", lambda r: r.compile_seconds),
    "step_price": BudgetKey(
        "number", "price of an execution", lambda r: None if r.price is None else r.price.step
    ),
    "mfu": BudgetKey(
        "part",
        "model FLOP utilisation",
        lambda r: None if r.throughput is None else r.throughput.utilisation,
        _waits,
        at_least=True,
    ),
    "tokens_per_second": BudgetKey(
        "number",
        "number of tokens per second",
        lambda r: None if r.throughput is None else r.throughput.tokens_per_second,
        _waits,
        at_least=True,
    ),
}
"""Figures that a budget can limit; bytes, FLOP and seconds are per device and execution."""


_EARLIER_NAMES = {"unasked_bytes": "unrequested_bytes"}
"""Keys of earlier releases, which still work."""


def read_budget(words: Iterable[str]) -> tuple[Limit, ...]:
    """Parse limits.

    Args:
        words: Each `KEY=VALUE`: `hbm=90%`, `hbm=80GiB`, `all_gather_bytes=2GB`, `time=250ms`,
            `mfu=40%`. GB are 10⁹ bytes, GiB 2³⁰.

    Raises:
        ArgumentError: If a key or value is invalid.

    Example:
        >>> [(limit.key, limit.value) for limit in read_budget(["hbm=90%", "time=250ms"])]
        [('hbm', 0.9), ('time', 0.25)]
    """
    with short_tracebacks:
        return tuple(_limit(word) for word in words)


def _limit(word: str) -> Limit:
    name, equals, text = word.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        raise ArgumentError(
            f"budget {word!r} has no value: write KEY=VALUE, such as hbm=90% or "
            "all_gather_bytes=2GB"
        )
    name = _EARLIER_NAMES.get(name, name)
    key = KEYS.get(name)
    if key is None:
        near = difflib.get_close_matches(name, KEYS, n=2, cutoff=0.5)
        meant = (
            f"; did you mean {' or '.join(near)}?" if near else f": the keys are {', '.join(KEYS)}"
        )
        raise ArgumentError(f"budget {word!r} has an unknown key{meant}")
    quantities: Sequence[Unit] = ("part", "bytes") if name == "hbm" else (key.quantity,)
    for quantity in quantities:
        value = _value(text, quantity, plain=name != "hbm")
        if value is not None:
            return Limit(name, quantity, value, word)
    examples = " or ".join(f"{name}={_EXAMPLES[quantity]}" for quantity in quantities)
    raise ArgumentError(f"budget {word!r} has the invalid value {text!r}: write {examples}")


def _value(text: str, quantity: Unit, *, plain: bool) -> float | None:
    """Return a number with its unit, or None if the text is invalid for the quantity.

    Args:
        text: The text.
        quantity: Expected unit.
        plain: Whether a number without a unit is accepted for bytes, FLOP and numbers.
    """
    found = re.fullmatch(
        r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ%]*)\s*",
        text.lower().replace("\N{GREEK SMALL LETTER MU}", "µ"),
    )
    if found is None:
        return None
    units = _UNITS[quantity]
    unit = found[2]
    is_clear = plain and quantity in ("bytes", "flop", "number")
    factor = units.get(unit) if unit else 1.0 if is_clear else None
    try:
        value = float(found[1])
    except ValueError:
        return None
    return None if factor is None or not math.isfinite(value) else value * factor


def broken_limits(report: PreflightReport, limits: Iterable[Limit]) -> tuple[Breach, ...]:
    """Return the limits that a program exceeds.

    Args:
        report: Report of the program.
        limits: Limits from `read_budget`.

    Example:
        >>> from xlashard import P, pjit, preflight
        >>> import jax
        >>> x = jax.ShapeDtypeStruct((1024, 512), "bfloat16")
        >>> gram = pjit(lambda x: x @ x.T, in_shardings=P("data"))
        >>> report = preflight(gram, x, topology="v5e-16", mesh={"data": 16})
        >>> (breach,) = broken_limits(report, read_budget(["hbm=90%", "all_gather_bytes=1kB"]))
        >>> breach.limit.key
        'all_gather_bytes'
    """
    found = (_breach(report, limit) for limit in limits)
    return tuple(breach for breach in found if breach is not None)


def _breach(report: PreflightReport, limit: Limit) -> Breach | None:
    key = KEYS[limit.key]
    value = key.measure(report)
    if value is None:
        return Breach(limit, None, ())
    if limit.key == "hbm" and limit.quantity == "part":
        value /= report.memory.available_bytes
    is_kept = value >= limit.value if key.at_least else value <= limit.value
    if is_kept:
        return None
    return Breach(limit, value, tuple(key.contributors(report)[:_SHOWN]))
