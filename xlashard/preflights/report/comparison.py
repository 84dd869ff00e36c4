"""Comparison of two preflight reports, and the figures of several side by side."""

from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from xlashard.pjit.report.comparison import Comparison
from xlashard.pjit.report.report_changes import (
    Amounts,
    BytesUse,
    Facts,
    amount_changes,
    fact_changes,
    traffic_use,
    usage_changes,
    value_changes,
)
from xlashard.pjit.report.tables import WIDE, line_text, operation_text, section, table
from xlashard.preflights.render.report_text import (
    Words,
    axes_text,
    mesh_text,
    price_with_currency,
    topology_text,
    words_of,
)
from xlashard.preflights.report.preflight_model import PreflightFields
from xlashard.preflights.report.preflight_report import PreflightReport
from xlashard.wording import in_amount, in_bytes, in_seconds


def compare(old: PreflightReport, new: PreflightReport) -> Comparison:
    """Compare two reports.

    Args:
        old: Report before the change, or of the first alternative.
        new: Report after the change, or of the second alternative.

    Example:
        >>> import jax
        >>> from xlashard import P, pjit, preflight
        >>> x = jax.ShapeDtypeStruct((1024, 512), "bfloat16")
        >>> gram = pjit(lambda x: x @ x.T, in_shardings=P("data"))
        >>> small = preflight(gram, x, topology="v5e-8", mesh={"data": 8})
        >>> large = preflight(gram, x, topology="v5e-16", mesh={"data": 16})
        >>> [(c.old, c.new) for c in compare(small, large).facts if c.name == "topology"]
        [('v5e:2x4 (8 chips)', 'v5e:4x4 (16 chips)')]
    """
    return Comparison(
        old=_title(old),
        new=_title(new),
        facts=fact_changes(_facts(old, new), old, new),
        amounts=amount_changes(_amounts(old, new), old, new),
        memory=usage_changes(_held(old), _held(new)),
        traffic=usage_changes(_sent(old), _sent(new)),
        **value_changes(old, new),
    )


def _title(report: PreflightReport) -> str:
    kind = " (estimate)" if report.is_estimate else ""
    return f"{report.title or report.name} on {topology_text(report.topology)}{kind}"


def _names(name: Callable[[Words], str], *reports: PreflightReport) -> str:
    """Return what reports name alike, or both names."""
    return " or ".join(dict.fromkeys(name(words_of(report.topology)) for report in reports))


def _facts(old: PreflightReport, new: PreflightReport) -> Facts[PreflightReport]:
    layout = _names(lambda words: words.layout, old, new)
    return {
        "outcome": lambda r: r.outcome,
        "compilation": lambda r: "without code" if r.is_estimate else "whole",
        "bound by": lambda r: words_of(r.topology).bounds[r.time.bound],
        "function": lambda r: r.name,
        "topology": lambda r: topology_text(r.topology),
        "mesh": lambda r: axes_text(r.mesh),
        f"mesh on the {layout}": lambda r: mesh_text(r.mesh),
        "partitioner": lambda r: r.partitioner,
        "xlashard": lambda r: r.versions.xlashard,
        "jax": lambda r: r.versions.jax,
        "jaxlib": lambda r: r.versions.jaxlib,
        "libtpu": lambda r: r.versions.libtpu,
        "flags": lambda r: " ".join(f"{where}: {flag}" for where, flag in r.versions.flags),
    }


def _amounts(old: PreflightReport, new: PreflightReport) -> Amounts[PreflightReport]:
    within = _names(lambda words: words.bounds["ici"], old, new)
    between = _names(lambda words: words.bounds["dcn"], old, new)
    alone = _names(lambda words: f"a {words.group}", old, new)
    groups = _names(lambda words: f"{words.group}s", old, new)
    return {
        "memory": ("bytes", lambda r: r.memory.total_bytes),
        "memory: arguments": ("bytes", lambda r: r.memory.argument_bytes),
        "memory: other results": ("bytes", lambda r: r.memory.result_bytes),
        "memory: temporaries": ("bytes", lambda r: r.memory.temporary_bytes),
        "memory to spare": ("bytes", lambda r: r.memory.spare_bytes),
        "time": ("seconds", lambda r: r.time.seconds),
        "time by the roofline": ("seconds", lambda r: r.time.roofline_seconds),
        "time of the schedule": ("seconds", lambda r: r.time.seconds),
        "time: arithmetic": ("seconds", lambda r: r.time.compute_seconds),
        "time: HBM": ("seconds", lambda r: r.time.hbm_seconds),
        f"time: {within}": ("seconds", lambda r: r.time.ici_seconds),
        f"time: {between}": ("seconds", lambda r: r.time.dcn_seconds),
        "arithmetic": ("flop", lambda r: r.time.flops),
        "HBM read and written": ("bytes", lambda r: r.time.hbm_bytes),
        f"sent within {alone}": ("bytes", lambda r: _on(r, "ici")),
        f"sent between {groups}": ("bytes", lambda r: _on(r, "dcn")),
        "tokens per second": (
            "number",
            lambda r: None if r.throughput is None else r.throughput.tokens_per_second,
        ),
        "model FLOP utilisation": (
            "part",
            lambda r: None if r.throughput is None else r.throughput.utilisation,
        ),
        "price of a step": ("number", lambda r: None if r.price is None else r.price.step),
        "price of a billion tokens": (
            "number",
            lambda r: None if r.price is None else r.price.billion_tokens,
        ),
        "time to compile": ("seconds", lambda r: r.compile_seconds),
    }


def _on(report: PreflightReport, network: str) -> int:
    return sum(t.collective.sent_bytes for t in report.traffic if t.network == network)


def _held(report: PreflightReport) -> list[BytesUse]:
    memory = report.memory
    fresh = [h for h in memory.results if not h.aliased]
    values = [BytesUse(("value", h.path), h.path, "", h.device_bytes) for h in memory.arguments]
    values += [BytesUse(("value", h.path), h.path, "", h.device_bytes) for h in fresh]
    for t in memory.temporaries:
        operation = operation_text(t.op_name) if t.op_name else t.type
        function = t.source.function if t.source is not None else ""
        where = line_text(t.source) if t.source is not None else ""
        key = ("temporary", operation, function)
        values.append(BytesUse(key, f"temporary of {operation}", where, t.device_bytes))
    return values


def _sent(report: PreflightReport) -> list[BytesUse]:
    return [traffic_use(t.collective, t.network, t.seconds) for t in report.traffic]


class SummaryText:
    """Rich renderable of several reports as one table.

    Args:
        reports: Reports in row order.
    """

    def __init__(self, reports: Sequence[PreflightFields]) -> None:
        self._reports = reports

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        reports = self._reports
        columns = {
            "program": [_program(r) for r in reports],
            "topology": [topology_text(r.topology) for r in reports],
            "mesh": [axes_text(r.mesh).replace(" ", "") for r in reports],
            "fits": [_fits(r) for r in reports],
            ">takes": [in_seconds(r.time.seconds) for r in reports],
            "bound by": [words_of(r.topology).bounds[r.time.bound] for r in reports],
            ">tokens/s": [_tokens(r) for r in reports],
            ">MFU": [_utilisation(r) for r in reports],
            ">a step": [_step(r) for r in reports],
        }
        if options.max_width < WIDE:
            for name in ("mesh", "bound by"):
                del columns[name]
        shown = {name: column for name, column in columns.items() if any(map(str, column))}
        rows = list(zip(*shown.values(), strict=True))
        yield section(f"{len(reports)} reports", "", table(list(shown), rows))


def _program(report: PreflightFields) -> str:
    return f"{report.title or report.name}{' (estimate)' if report.is_estimate else ''}"


def _fits(report: PreflightFields) -> Text:
    spare = report.memory.spare_bytes
    if report.outcome == "fits":
        return Text(f"{in_bytes(spare)} to spare", "green")
    return Text(f"lacks {in_bytes(-spare)}" if spare < 0 else "too large", "red")


def _tokens(report: PreflightFields) -> str:
    return "" if report.throughput is None else in_amount(report.throughput.tokens_per_second)


def _utilisation(report: PreflightFields) -> str:
    return "" if report.throughput is None else f"{report.throughput.utilisation:.1%}"


def _step(report: PreflightFields) -> str:
    if report.price is None:
        return ""
    return price_with_currency(report.price.step, report.price.currency)
