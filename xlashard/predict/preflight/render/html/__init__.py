"""Preflight reports as a self-contained HTML page, from `templates/` and `assets/`."""

from collections.abc import Sequence
from functools import lru_cache

from jinja2 import Environment

from xlashard.analysis.explain.comparison import Comparison
from xlashard.analysis.explain.html import (
    filter_choices,
    render_fragment,
    render_page,
    report_environment,
)
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.render.html.charts import (
    RooflinePlot,
    memory_segments,
    read_roofline,
    time_bars,
)
from xlashard.predict.preflight.render.html.torus_drawing import (
    device_positions,
    gradient,
    lies_along,
    torus_rings,
)
from xlashard.predict.preflight.render.report_text import (
    ESTIMATE,
    LAID_OUT,
    ORIGINS,
    SUGGESTIONS,
    axes_text,
    error_notes,
    error_text,
    format_change,
    in_thousands,
    is_visible_ring,
    most_worthwhile,
    peak_text,
    price_with_currency,
    severity,
    spill_remedy,
    step_time_text,
    three_digits,
    topology_name,
    topology_text,
    uncounted_work,
    unknown_work,
    words_of,
)
from xlashard.predict.preflight.render.step_timeline import (
    memory_curve,
    timeline_key,
    timeline_rows,
    timeline_ticks,
)
from xlashard.predict.preflight.report.preflight_model import (
    REPORT_FORMAT,
    AxisReport,
    PreflightFields,
    TimeEstimate,
)
from xlashard.predict.targets.base_topology import counted_in_thousands
from xlashard.support.formatting import fold_axes, in_bytes, in_seconds, printable


def page(
    reports: PreflightFields | Sequence[PreflightFields],
    changes: Comparison | None = None,
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
    reports = (reports,) if isinstance(reports, PreflightFields) else tuple(reports)
    if not reports:
        raise ArgumentError("reports is empty: write page(report)")
    names = _names(reports)
    title = f"{_full_title(reports[0])}: {reports[0].outcome}"
    template = environment().get_template("page.html")
    return render_page(
        template,
        title=title if len(reports) == 1 else f"{len(reports)} preflight reports",
        kind="preflight",
        names=names,
        reports=reports,
        dicts=[REPORT_FORMAT.to_dict(report) for report in reports],
        changes=() if changes is None else (changes,),
    )


def fragment(report: PreflightFields) -> str:
    """Return the verdict as an element for notebooks.

    Args:
        report: The report.
    """
    return render_fragment(environment().get_template("fragment.html"), report)


def _names(reports: Sequence[PreflightFields]) -> list[str]:
    """Return a distinct name for each report."""
    for names in ([r.heading for r in reports], [_full_title(r) for r in reports]):
        if len(set(names)) == len(names):
            return names
    return [f"{n}. {_full_title(report)}" for n, report in enumerate(reports, 1)]


def _full_title(report: PreflightFields) -> str:
    return f"{report.heading} on {topology_name(report.topology)}"


@lru_cache
def environment(*packages: str) -> Environment:
    """Return the environment of the templates; text is escaped where it is inserted.

    Args:
        *packages: Packages whose templates come first.
    """
    templates = report_environment(*packages, __package__ or "")
    templates.globals.update(
        ESTIMATE=ESTIMATE,
        LAID_OUT=LAID_OUT,
        ORIGINS=ORIGINS,
        SUGGESTIONS=SUGGESTIONS,
        memory_curve=memory_curve,
        read_roofline=read_roofline,
        roofline_plot=RooflinePlot,
        segments=memory_segments,
        time_bars=time_bars,
        timeline_key=timeline_key,
        timeline_rows=timeline_rows,
        timeline_ticks=timeline_ticks,
        torus_drawing=device_positions,
        error_notes=error_notes,
        uncounted=uncounted_work,
    )
    templates.filters.update(
        error=error_text,
        filter_choices=_filter_choices,
        fold_axes=lambda mesh: fold_axes(mesh, lambda axis: axis.size),
        gradient=gradient,
        is_visible_ring=is_visible_ring,
        lies_along=lies_along,
        line_choices=_line_choices,
        many=counted_in_thousands,
        mesh=axes_text,
        most_worthwhile=most_worthwhile,
        peak=peak_text,
        pixels=lambda number: f"{number:.2f}".rstrip("0").rstrip("."),
        price=price_with_currency,
        printable=printable,
        rings=torus_rings,
        severity=severity,
        signed_bytes=lambda change: format_change(change, in_bytes),
        signed_seconds=lambda change: format_change(change, in_seconds),
        spill_remedy=spill_remedy,
        step_time=step_time_text,
        thousands=in_thousands,
        three_digits=three_digits,
        topology=topology_text,
        topology_name=topology_name,
        traffic_along=_traffic_along,
        unknown_work=unknown_work,
        words=words_of,
    )
    return templates


def _filter_choices(report: PreflightFields) -> dict[str, list[str]]:
    """Return the values to filter collectives by."""
    choices = filter_choices(report.traffic)
    choices["reason"] = ["required", "not required"]
    if len({t.network for t in report.traffic}) > 1:
        choices["network"] = list(words_of(report.topology).networks.values())
    return choices


def _line_choices(report: PreflightFields) -> dict[str, list[str]]:
    """Return the values to filter source lines by."""
    lines, shares = report.time.lines, words_of(report.topology).shares
    return {
        "kind": sorted({line.kind for line in lines}),
        "bound": sorted({shares[line.bound] for line in lines}),
    }


def _traffic_along(axis: AxisReport, time: TimeEstimate) -> tuple[int, float]:
    """Return the bytes sent along a mesh axis, and their time."""
    traffic = [t for t in time.traffic if axis.name in t.along.split(", ")]
    return sum(t.sent_bytes for t in traffic), sum(t.seconds for t in traffic)
