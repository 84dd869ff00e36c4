"""Comparison of preflight reports: two of them, several side by side, and one with limits.

Limits on the figures of a report are words such as `hbm=90%` and `all_gather_bytes=2GB`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xlashard.analysis.explain.comparison import (
    Breach,
    BytesUse,
    Comparison,
    Facts,
    Figure,
    Figures,
    compare_reports,
    find_breaches,
    held_uses,
    list_largest,
    traffic_key,
    traffic_keys,
)
from xlashard.analysis.explain.model import ValueReport
from xlashard.analysis.explain.script_report import NUMBERED, ScriptComparison, compare_named
from xlashard.analysis.report.cells import Span, TableCell, join_cell
from xlashard.analysis.report.parts import (
    WIDE,
    Column,
    PagePanel,
    Section,
    distinct_names,
)
from xlashard.analysis.report.printable import Part, SerializableReport, list_panels
from xlashard.analysis.report.texts import line_text, operation_text
from xlashard.predict.preflight.render.preflight_sections import (
    FOOTER,
    advice_section,
    draw_both_timelines,
)
from xlashard.predict.preflight.render.report_text import (
    Words,
    axes_text,
    mesh_text,
    step_time_text,
    topology_name,
    topology_text,
    words_of,
)
from xlashard.predict.preflight.report.preflight_model import FORMAT, AdviceReport, PreflightFields
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.support.documents import ReportFormat
from xlashard.support.formatting import (
    Limit,
    in_bytes,
    in_seconds,
    parse_limits,
)
from xlashard.support.tracebacks import short_tracebacks


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
    changes = compare_reports(old, new, _facts(old, new), _figures(old, new), _held, "traffic")
    return replace(
        changes,
        old=_title(old),
        new=_title(new),
        amounts=tuple(
            replace(a, old_error=_error(old), new_error=_error(new)) if a.name == "time" else a
            for a in changes.amounts
        ),
        drawn=(draw_both_timelines(old, new),),
    )


def compare_sets(
    old: Sequence[PreflightReport], new: Sequence[PreflightReport]
) -> ScriptComparison:
    """Compare the programs of two runs of a script, which are matched by name and order.

    Args:
        old: Reports before the change.
        new: Reports after the change.
    """
    before, after = (
        dict(zip(distinct_names((r.name for r in reports), NUMBERED), reports, strict=True))
        for reports in (old, new)
    )
    return compare_named(topology_text(new[0].topology), before, after, compare)


def _error(report: PreflightReport) -> tuple[float, float | None] | None:
    time = report.time
    return (time.below, time.above) if time.below or time.above else None


def _title(report: PreflightReport) -> str:
    return f"{report.heading} on {topology_text(report.topology)}{_kind_text(report)}"


def _kind_text(report: PreflightFields) -> str:
    return " (estimate)" if report.is_estimate else ""


def _names(name: Callable[[Words], str], *reports: PreflightReport) -> str:
    """Return what reports name alike, or both names."""
    return " or ".join(dict.fromkeys(name(words_of(report.topology)) for report in reports))


def _facts(old: PreflightReport, new: PreflightReport) -> Facts[PreflightReport]:
    layout = _names(lambda words: words.layout, old, new)
    return {
        "outcome": "outcome",
        "compilation": lambda r: "without code" if r.is_estimate else "whole",
        "bound by": _bound,
        "function": "name",
        "topology": lambda r: topology_text(r.topology),
        "mesh": lambda r: axes_text(r.mesh),
        f"mesh on the {layout}": lambda r: mesh_text(r.mesh),
        "partitioner": "partitioner",
        "xlashard": "versions.xlashard",
        "jax": "versions.jax",
        "jaxlib": "versions.jaxlib",
        "libtpu": "versions.libtpu",
        "flags": lambda r: " ".join(f"{where}: {flag}" for where, flag in r.versions.flags),
    }


def _figures(old: PreflightReport, new: PreflightReport) -> Figures[PreflightReport]:
    """Return the numbers to compare, with the names of the chips of both reports."""
    within = _names(lambda words: words.resources["ici"].bound, old, new)
    between = _names(lambda words: words.resources["dcn"].bound, old, new)
    alone = _names(lambda words: f"a {words.group}", old, new)
    groups = _names(lambda words: f"{words.group}s", old, new)
    return {
        "memory": KEYS["hbm"],
        "memory: arguments": KEYS["argument_bytes"],
        "memory: other results": Figure("bytes", "memory.result_bytes"),
        "memory: temporaries": KEYS["temporary_bytes"],
        "memory to spare": Figure("bytes", "memory.spare_bytes"),
        "time": KEYS["time"],
        "time by the roofline": Figure("seconds", "time.roofline_seconds"),
        "time: arithmetic": Figure("seconds", "time.compute_seconds"),
        "time: HBM": Figure("seconds", "time.hbm_seconds"),
        f"time: {within}": Figure("seconds", "time.ici_seconds"),
        f"time: {between}": Figure("seconds", "time.dcn_seconds"),
        "arithmetic": KEYS["flops"],
        "HBM read and written": KEYS["hbm_traffic_bytes"],
        f"sent within {alone}": KEYS["ici_bytes"],
        f"sent between {groups}": KEYS["dcn_bytes"],
        "tokens per second": KEYS["tokens_per_second"],
        "model FLOP utilisation": KEYS["mfu"],
        "price of a step": KEYS["step_price"],
        "price of a billion tokens": Figure("number", "price.billion_tokens"),
        "time to compile": KEYS["compile_time"],
    }


def _held(report: PreflightReport) -> list[BytesUse]:
    uses = held_uses(_list_held(report))
    for t in report.memory.temporaries:
        operation = operation_text(t.op_name) if t.op_name else t.type
        function = t.source.function if t.source is not None else ""
        key = ("temporary", operation, function)
        use = BytesUse(key, f"temporary of {operation}", line_text(t.source), t.device_bytes)
        uses.append(use)
    return uses


def _list_held(report: PreflightReport) -> list[ValueReport]:
    """Return the arguments, and the results with memory of their own."""
    return [*report.inputs, *(v for v in report.outputs if not v.aliased)]


@dataclass(frozen=True)
class UnreportedProgram:
    """A program of a script that has no report.

    Attributes:
        name: The function's name.
        source: File and line where the function is defined; empty if no Python code defines it.
        caller: File and line of the first call.
        reason: Why it has none.
    """

    name: str
    source: str
    caller: str
    reason: str


@dataclass(frozen=True, repr=False)
class PreflightReports(SerializableReport):
    """Reports of several programs or topologies, printed as one table.

    Attributes:
        reports: The reports, in row order.
        unreported: Programs of a script that can't be reported.
        advice: Suggestions that were tried for the programs of a script, and an order of their
            mesh, with the change of all calls together.
    """

    _kind = "preflight"
    _footer = FOOTER
    _format = ReportFormat("preflight reports", FORMAT, "xlashard preflight --json FILE ...")

    reports: tuple[PreflightReport, ...]
    unreported: tuple[UnreportedProgram, ...] = ()
    advice: tuple[AdviceReport, ...] = ()

    def parts(self) -> Iterator[Part]:
        """Yield a table of the reports, and the programs without one."""
        if len(self.reports) > 1:
            yield reports_section(self.reports)
        yield from self._list_others()

    def page_title(self) -> str:
        """Return the title of its page."""
        if len(self.reports) == 1:
            return self.reports[0].page_title()
        return f"{len(self.reports)} preflight reports"

    def panels(self, others: Sequence[Part] = ()) -> Sequence[PagePanel]:
        """Return a panel of all reports, and one of each."""
        named = zip(_panel_names(self.reports), self.reports, strict=True)
        panels = [PagePanel(name, tuple(r.parts()), r.page_data()) for name, r in named]

        def make_overview(links: Sequence[TableCell]) -> Section["_ReportRow"]:
            return reports_section(self.reports, links)

        return list_panels(panels, make_overview, (*others, *self._list_others()))

    def _list_others(self) -> Sequence[Part]:
        """Return the sections that are of no single report."""
        return _UNREPORTED.with_rows(self.unreported), replace(
            advice_section(self.advice),
            title="Suggestions for the script",
            note="tried for these devices: change of all calls together, without moves of values "
            "between programs, and of a device's memory",
        )


_UNREPORTED = Section[UnreportedProgram](
    id="unreported",
    title="Without a report",
    columns=(
        Column("program", "name"),
        Column("defined at", lambda program: program.source or program.caller, "code"),
        Column("reason", "reason"),
    ),
    most=10**6,
)


class _ReportRow(NamedTuple):
    """Report in a table of several, with its name or the link to its panel."""

    name: TableCell | str
    report: PreflightReport


def _bound(report: PreflightReport) -> str:
    """Return the name of what bounds the time."""
    return words_of(report.topology).resources[report.time.bound].bound


def reports_section(
    reports: Sequence[PreflightReport], links: Sequence[TableCell] = ()
) -> Section["_ReportRow"]:
    """Return the table of several reports side by side.

    Args:
        reports: The reports.
        links: Links to their panels on a page; empty in a terminal.
    """
    price = next((r.price.format_amount for r in reports if r.price), str)
    return Section(
        id="reports",
        title=f"{len(reports)} reports",
        columns=(
            Column("program", lambda row: join_cell(row.name, _kind_text(row.report))),
            Column("topology", lambda row: topology_text(row.report.topology), ""),
            Column("mesh", lambda row: axes_text(row.report.mesh).replace(" ", ""), "name"),
            Column("fits", lambda row: _fits(row.report)),
            Column(
                ">memory", "report.memory.share", "part", "Of what a program may use on a device"
            ),
            Column(
                ">takes",
                lambda row: join_cell(step_time_text(row.report.time), key=row.report.time.seconds),
            ),
            Column("bound by", lambda row: _bound(row.report), ""),
            Column(">tokens/s", "report.tokens_per_second", "number"),
            Column(">MFU", "report.utilisation", "{:.1%}".format),
            Column(">a step", "report.price.step", price),
            Column(">10⁹ tokens", "report.price.billion_tokens", price),
        ),
        rows=list(map(_ReportRow, links or [report.heading for report in reports], reports)),
        widths={"mesh": WIDE, "bound by": WIDE, ">memory": 130, ">10⁹ tokens": 130},
        most=10**6,
    )


def _panel_names(reports: Sequence[PreflightReport]) -> list[str]:
    """Return a distinct name for each report."""
    for names in ([r.heading for r in reports], [_full_title(r) for r in reports]):
        if len(set(names)) == len(names):
            return names
    return [f"{n}. {_full_title(report)}" for n, report in enumerate(reports, 1)]


def _full_title(report: PreflightFields) -> str:
    return f"{report.heading} on {topology_name(report.topology)}"


def page(
    reports: PreflightReport | Sequence[PreflightReport], changes: Comparison | None = None
) -> str:
    """Return a preflight report as an HTML page, or several reports with a tab for each.

    The page is self-contained, makes no requests, and follows the light or dark theme of the
    system. Without scripts its tables neither sort nor filter.

    Args:
        reports: One report, or several.
        changes: Comparison of two of the reports, shown first.

    Raises:
        ArgumentError: If `reports` is empty.

    Returns:
        Text of the page, to be written in UTF-8.
    """
    several = PreflightReports(
        (reports,) if isinstance(reports, PreflightFields) else tuple(reports)
    )
    with short_tracebacks:
        return several.make_page(changes)


def _fits(report: PreflightFields) -> TableCell:
    spare = report.memory.spare_bytes
    if report.outcome == "fits":
        return join_cell(Span(f"{in_bytes(spare)} to spare", "good"), key=spare)
    text = f"lacks {in_bytes(-spare)}" if spare < 0 else "too large"
    return join_cell(Span(text, "bad"), key=spare)


def _largest(report: PreflightReport) -> list[str]:
    """Return the largest buffers in HBM."""
    values = [(v.device_bytes, f"{v.path} {v.type}") for v in _list_held(report)]
    return list_largest([*values, *_temporaries(report)])


def _temporaries(report: PreflightReport) -> Iterator[tuple[int, str]]:
    for t in report.memory.temporaries:
        where = f" at {line_text(t.source)}" if t.source is not None else ""
        operation = operation_text(t.op_name) if t.op_name else t.name
        yield t.device_bytes, f"{t.type} of {operation}{where}"


def _waits(report: PreflightReport) -> list[str]:
    t, names = report.time, words_of(report.topology).resources
    times = [
        (t.compute_seconds, "of arithmetic"),
        (t.hbm_seconds, "of HBM"),
        (t.ici_seconds, f"of {names['ici'].bound}"),
        (t.dcn_seconds, f"of the {names['dcn'].bound}"),
        (t.seconds, "by the schedule"),
    ]
    return [f"{in_seconds(s)} {what}" for s, what in sorted(times, reverse=True) if s]


KEYS: Figures[PreflightReport] = {
    "hbm": Figure(
        "bytes",
        "memory.total_bytes",
        "HBM use",
        _largest,
        whole=lambda r: r.memory.available_bytes,
    ),
    "argument_bytes": Figure("bytes", "memory.argument_bytes", "argument memory", _largest),
    "temporary_bytes": Figure(
        "bytes",
        "memory.temporary_bytes",
        "temporary memory",
        lambda r: list_largest(_temporaries(r)),
    ),
    "time": Figure("seconds", "time.seconds", "the time of one execution", _waits),
    "flops": Figure("flop", "time.flops", "the FLOP of a device"),
    "hbm_traffic_bytes": Figure("bytes", "time.hbm_bytes", "HBM traffic"),
    **traffic_keys("traffic"),
    "ici_bytes": traffic_key("traffic", "the traffic of a device within its slice", network="ici"),
    "dcn_bytes": traffic_key("traffic", "the traffic of a device between slices", network="dcn"),
    "nvlink_bytes": traffic_key("traffic", "the traffic of a GPU within its node", network="ici"),
    "network_bytes": traffic_key("traffic", "the traffic of a GPU between nodes", network="dcn"),
    "unrequested_bytes": traffic_key(
        "traffic", "the traffic that the program does not require", requested=False
    ),
    "compile_time": Figure("seconds", "compile_seconds", "the compile time"),
    "step_price": Figure("number", "price.step", "price of an execution"),
    "mfu": Figure("part", "utilisation", "model FLOP utilisation", _waits, at_least=True),
    "tokens_per_second": Figure(
        "number", "tokens_per_second", "number of tokens per second", _waits, at_least=True
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
        return parse_limits(words, {name: key.units for name, key in KEYS.items()})


def broken_limits(report: PreflightReport, limits: Iterable[Limit]) -> tuple[Breach, ...]:
    """Return the limits that a program exceeds, and all for a degraded report.

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
    if report.degraded:
        return tuple(Breach(limit, KEYS[limit.key], None, (report.degraded,)) for limit in limits)
    return find_breaches(report, limits, KEYS)
