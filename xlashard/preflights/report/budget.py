"""Limits on the figures of a report: `hbm=90%`, `all_gather_bytes=2GB`."""

import re
from collections.abc import Callable, Iterable

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.budgets import Limit, parse_limits
from xlashard.hlo.collective_kinds import KINDS
from xlashard.pjit.report.report_changes import (
    Breach,
    BudgetKey,
    collective_lines,
    find_breaches,
)
from xlashard.pjit.report.tables import line_text, operation_text
from xlashard.preflights.render.report_text import words_of
from xlashard.preflights.report.preflight_model import TrafficReport
from xlashard.preflights.report.preflight_report import PreflightReport
from xlashard.wording import in_bytes, in_seconds


def _sent(report: PreflightReport, keep: Callable[[TrafficReport], bool]) -> float:
    return sum(t.collective.sent_bytes for t in report.traffic if keep(t))


def _traffic(description: str, keep: Callable[[TrafficReport], bool]) -> BudgetKey[PreflightReport]:
    return BudgetKey(
        "bytes",
        description,
        lambda r: _sent(r, keep),
        lambda r: collective_lines(t.collective for t in r.traffic if keep(t)),
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
    t, bounds = report.time, words_of(report.topology).bounds
    found = [
        (t.compute_seconds, "of arithmetic"),
        (t.hbm_seconds, "of HBM"),
        (t.ici_seconds, f"of {bounds['ici']}"),
        (t.dcn_seconds, f"of the {bounds['dcn']}"),
        (t.seconds, "by the schedule"),
    ]
    return [f"{in_seconds(s)} {what}" for s, what in sorted(found, reverse=True) if s]


KEYS: dict[str, BudgetKey[PreflightReport]] = {
    "hbm": BudgetKey(
        "bytes",
        "HBM use",
        lambda r: r.memory.total_bytes,
        _held,
        whole=lambda r: r.memory.available_bytes,
    ),
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
    "nvlink_bytes": _traffic("the traffic of a GPU within its node", _network("ici")),
    "network_bytes": _traffic("the traffic of a GPU between nodes", _network("dcn")),
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
        return parse_limits(map(_current, words), {name: key.units for name, key in KEYS.items()})


def _current(word: str) -> str:
    """Replace the key of an earlier release."""
    return re.sub(r"^\s*unasked[_-]bytes(?=\s*=)", "unrequested_bytes", word)


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
    return find_breaches(report, limits, KEYS)
