"""Limits that a program is to keep, written as words: `hbm=90%`, `all_gather_bytes=2GB`."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError
from xlashard.pjit.report.words import line_text, operation_text
from xlashard.program.collectives import KINDS
from xlashard.tpu.preflight.report.preflight_model import TrafficReport
from xlashard.tpu.preflight.report.preflight_report import PreflightReport
from xlashard.wording import in_amount, in_bytes, in_flop, in_seconds

type Quantity = Literal["bytes", "seconds", "part", "flop", "number"]
"""What a limit is a number of."""

_SHOWN = 5
"""How many of those that take most are named for a limit that is broken."""

_UNITS: dict[str, dict[str, float]] = {
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
_TEXTS: dict[str, Callable[[float], str]] = {
    "bytes": in_bytes,
    "seconds": in_seconds,
    "part": "{:.1%}".format,
    "flop": in_flop,
    "number": in_amount,
}


@dataclass(frozen=True)
class BudgetKey:
    """Something that can be limited.

    Attributes:
        quantity: What it is a number of.
        description: What it is, in words.
        measure: Its value in a report; None where the report doesn't say.
        contributors: The largest contributions, as text lines.
        at_least: Whether the limit is one from below.
    """

    quantity: Quantity
    description: str
    measure: Callable[[PreflightReport], float | None]
    contributors: Callable[[PreflightReport], list[str]] = lambda report: []
    at_least: bool = False


@dataclass(frozen=True)
class Limit:
    """A limit that a program is to keep.

    Attributes:
        key: What is limited: `all_gather_bytes`.
        quantity: What the value is a number of. A part of the HBM is one even of a key in bytes.
        value: The limit.
        text: As it was written: `all_gather_bytes=2GB`.
    """

    key: str
    quantity: Quantity
    value: float
    text: str


@dataclass(frozen=True)
class Breach:
    """A limit that a program does not keep.

    Attributes:
        limit: The limit.
        value: What the program takes, in the limit's own quantity; None where nobody knows.
        lines: The operations and arguments that take most of it, the largest first.
    """

    limit: Limit
    value: float | None
    lines: tuple[str, ...]

    def __str__(self) -> str:
        key = KEYS[self.limit.key]
        if self.value is None:
            return f"{self.limit.text} is not kept: the report has no {key.description}"
        text = _TEXTS[self.limit.quantity]
        found, wanted = text(self.value), text(self.limit.value)
        side = "less than" if key.at_least else "more than"
        head = f"{self.limit.text} is not kept: {key.description} is {found}, {side} {wanted}"
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
    said = f"{in_bytes(c.sent_bytes)} {c.kind}{times} along {c.along}{where}"
    return f"{said} for {what}" if what else said


def _traffic(description: str, keep: Callable[[TrafficReport], bool]) -> BudgetKey:
    return BudgetKey(
        "bytes", description, lambda r: _sent(r, keep), lambda r: _traffic_lines(r, keep)
    )


def _kind(kind: str) -> Callable[[TrafficReport], bool]:
    return lambda t: t.collective.kind == kind


def _network(network: str) -> Callable[[TrafficReport], bool]:
    return lambda t: t.network == network


def _held(report: PreflightReport) -> list[str]:
    """What takes most of the HBM."""
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
    "hbm": BudgetKey("part", "the part of the HBM in use", lambda r: r.memory.total_bytes, _held),
    "argument_bytes": BudgetKey(
        "bytes", "what arguments take", lambda r: r.memory.argument_bytes, _held
    ),
    "temporary_bytes": BudgetKey(
        "bytes",
        "what temporaries take",
        lambda r: r.memory.temporary_bytes,
        lambda r: [f"{in_bytes(size)} {what}" for size, what in sorted(_temporaries(r))[::-1]],
    ),
    "time": BudgetKey("seconds", "the time of one execution", lambda r: r.time.seconds, _waits),
    "flops": BudgetKey("flop", "the arithmetic of a device", lambda r: r.time.flops),
    "hbm_traffic_bytes": BudgetKey(
        "bytes", "what goes to and from HBM", lambda r: r.time.hbm_bytes
    ),
    **{
        f"{kind.replace('-', '_')}_bytes": _traffic(f"what a device sends by {kind}", _kind(kind))
        for kind in KINDS
    },
    "collective_bytes": _traffic("what a device sends", lambda t: True),
    "ici_bytes": _traffic("what a device sends within its slice", _network("ici")),
    "dcn_bytes": _traffic("what a device sends to other slices", _network("dcn")),
    "unrequested_bytes": _traffic(
        "what a device sends that nobody asked for", lambda t: not t.requested
    ),
    "compile_time": BudgetKey("seconds", "the time to compile", lambda r: r.compile_seconds),
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
"""All that can be limited. Those of bytes, FLOP and seconds are of one device and execution."""


_EARLIER_NAMES = {"unasked_bytes": "unrequested_bytes"}
"""Keys of earlier releases, which still work."""


def read_budget(words: Iterable[str]) -> tuple[Limit, ...]:
    """Limits as a person writes them.

    Args:
        words: Each `KEY=VALUE`: `hbm=90%`, `hbm=80GiB`, `all_gather_bytes=2GB`, `time=250ms`,
            `mfu=40%`. GB are 10⁹ bytes, GiB 2³⁰.

    Raises:
        ArgumentError: If there is no such key, or the value is none that it can have.

    Example:
        >>> [(limit.key, limit.value) for limit in read_budget(["hbm=90%", "time=250ms"])]
        [('hbm', 0.9), ('time', 0.25)]
    """
    with short_tracebacks:
        return tuple(_limit(word) for word in words)


def _limit(word: str) -> Limit:
    name, equals, said = word.partition("=")
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
        meant = f"; did you mean {' or '.join(near)}?" if near else f": there are {', '.join(KEYS)}"
        raise ArgumentError(f"budget {word!r} limits nothing that a report has{meant}")
    quantities: Sequence[Quantity] = ("part", "bytes") if name == "hbm" else (key.quantity,)
    for quantity in quantities:
        value = _value(said, quantity, plain=name != "hbm")
        if value is not None:
            return Limit(name, quantity, value, word)
    examples = " or ".join(f"{name}={_EXAMPLES[quantity]}" for quantity in quantities)
    raise ArgumentError(f"budget {word!r} has the value {said!r}: write {examples}")


def _value(said: str, quantity: Quantity, *, plain: bool) -> float | None:
    """A number with its unit; None if it is none of that quantity.

    Args:
        said: The text.
        quantity: What it is to be a number of.
        plain: Whether one without a unit may be meant as bytes, FLOP or a number.
    """
    found = re.fullmatch(
        r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ%]*)\s*",
        said.lower().replace("\N{GREEK SMALL LETTER MU}", "µ"),
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
    """The limits that a program does not keep.

    Args:
        report: Of the program.
        limits: From `read_budget`.

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
