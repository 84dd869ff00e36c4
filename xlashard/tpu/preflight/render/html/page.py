"""The HTML page: templates, their filters, and what they show of reports.

The page is self-contained. Its content security policy blocks every request, and every script but
its own.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from xlashard.errors import ArgumentError
from xlashard.pictures.svg_html import make_environment
from xlashard.pjit.report.model import CollectiveReport, ReplicationReport, SourceLine
from xlashard.pjit.report.sections import remedy_text, uneven_reason
from xlashard.pjit.report.tables import (
    decided_text,
    groups_text,
    line_text,
    operation_text,
    short_type,
    types_text,
)
from xlashard.tpu.preflight.render.html.charts import (
    RooflinePlot,
    memory_segments,
    read_roofline,
    time_bars,
)
from xlashard.tpu.preflight.render.html.torus_drawing import (
    device_positions,
    gradient,
    lies_along,
    torus_rings,
)
from xlashard.tpu.preflight.render.report_text import (
    FORMATTERS,
    NETWORKS,
    ORIGINS,
    axes_text,
    in_thousands,
    is_visible_ring,
    many,
    price_with_currency,
    three_digits,
    topology_name,
    topology_text,
    uncounted_work,
)
from xlashard.tpu.preflight.report.preflight_model import (
    REPORT_FORMAT,
    AxisReport,
    ComparisonFields,
    PreflightFields,
    TimeEstimate,
    TrafficReport,
    Unit,
)
from xlashard.wording import in_bytes, in_flop, in_percent, in_seconds, printable

MOST_ROWS = 1000
"""Maximum number of table rows, which keeps browsers responsive."""

BOUNDS = {
    "compute": "arithmetic",
    "hbm": "the chip's memory (HBM)",
    "ici": "the links between chips (ICI)",
    "dcn": "the network between slices (DCN)",
}
"""Descriptions of the resources that bound the time."""

SHORT = {"compute": "compute", "hbm": "HBM", **NETWORKS}
"""Short names of the resources."""

_BREAKS = re.compile(r"(?<=.)[/,](?=.)|\](?=\[)", re.DOTALL)
"""Positions where a line may break."""


def page(
    reports: PreflightFields | Sequence[PreflightFields],
    changes: ComparisonFields | None = None,
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
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _render(
        "page.html",
        title=title if len(reports) == 1 else f"{len(reports)} preflight reports",
        digest=digest,
        style=_asset("shared.css") + _asset("page.css"),
        script=script,
        reports=reports,
        names=names,
        changes=changes,
        data=[(_file_name(n), _json(r)) for n, r in zip(names, reports, strict=True)],
    )


def fragment(report: PreflightFields) -> str:
    """Return the verdict as an element for notebooks.

    Args:
        report: The report.
    """
    style = _asset("notebook.css") + _asset("shared.css")
    return _render("fragment.html", report=report, style=style)


def _render(template: str, **values: Any) -> str:
    return environment().get_template(template).render(values)


@lru_cache(maxsize=16)
def _asset(name: str) -> Markup:
    return Markup(files(__package__).joinpath("assets", name).read_text(encoding="utf-8"))


def _json(report: PreflightFields) -> Markup:
    """Return the report's JSON, escaped so that no text ends its script element."""
    return Markup(json.dumps(REPORT_FORMAT.to_dict(report)).replace("<", "\\u003c"))


def _file_name(name: str) -> str:
    return f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)}.json"


def _names(reports: Sequence[PreflightFields]) -> list[str]:
    """Return a distinct name for each report."""
    for name in (_title, _full_title):
        names = [name(report) for report in reports]
        if len(set(names)) == len(names):
            return names
    return [f"{n}. {_full_title(report)}" for n, report in enumerate(reports, 1)]


def _title(report: PreflightFields) -> str:
    return report.title or report.name


def _full_title(report: PreflightFields) -> str:
    return f"{_title(report)} on {topology_name(report.topology)}"


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the environment of the templates; text is escaped where it is inserted."""
    made = make_environment(
        __package__ or "",
        finalize=lambda value: (
            printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )
    made.globals.update(
        BOUNDS=BOUNDS,
        MOST_ROWS=MOST_ROWS,
        ORIGINS=ORIGINS,
        SHORT=SHORT,
        read_roofline=read_roofline,
        roofline_plot=RooflinePlot,
        segments=memory_segments,
        time_bars=time_bars,
        torus_drawing=device_positions,
        uncounted=uncounted_work,
    )
    made.filters.update(
        amount=_amount,
        axes=_axes,
        bytes=in_bytes,
        cause=_cause,
        decided=decided_text,
        filter_choices=_filter_choices,
        flop=in_flop,
        gradient=gradient,
        groups=groups_text,
        is_visible_ring=is_visible_ring,
        lies_along=lies_along,
        line=line_text,
        many=many,
        mesh=axes_text,
        operation=operation_text,
        percent=in_percent,
        pixels=lambda number: f"{number:.2f}".rstrip("0").rstrip("."),
        price=price_with_currency,
        ratio=_ratio,
        remedy=remedy_text,
        replication_reason=_replication_reason,
        rings=torus_rings,
        seconds=in_seconds,
        short_type=short_type,
        text=user_text,
        thousands=in_thousands,
        three_digits=three_digits,
        topology=topology_text,
        topology_name=topology_name,
        traffic_along=_traffic_along,
        types=types_text,
        uneven_reason=uneven_reason,
    )
    return made


def user_text(text: str, name: str = "bdi", *, whole: bool = False, title: str = "") -> Markup:
    """Return an element for text from the user's program, such as a path.

    The text is isolated from its surroundings for bidirectional text, and may break after
    separators.

    Args:
        text: The text.
        name: Name of the element; elements other than `bdi` get `dir="auto"`.
        whole: Whether line breaks are suppressed.
        title: Tooltip.
    """
    direction = "" if name == "bdi" else ' dir="auto"'
    tip = f' title="{escape(printable(title))}"' if title else ""
    shown = printable(text)
    parts = [shown] if whole else _BREAKS.sub("\\g<0>\0", shown).split("\0")
    return Markup(f"<{name}{direction}{tip}>{Markup('<wbr>').join(parts)}</{name}>")


def _amount(value: float | None, unit: Unit) -> str:
    if value is None:
        return "–"
    text = FORMATTERS[unit](abs(value))
    return f"−{text}" if value < 0 else text


def _ratio(ratio: float | None) -> str:
    if ratio is None or ratio <= 0:
        return ""
    return f"×{ratio:,.1f}" if ratio >= 2 else f"{ratio - 1:+.1%}".replace("-", "−")


def _axes(collective: CollectiveReport) -> tuple[str, ...]:
    return ("other groups",) if collective.axes is None else collective.axes


def _cause(collective: CollectiveReport) -> tuple[str, SourceLine | None]:
    """Return the operation of a collective and its line; for an all-gather its consumer."""
    name, source = collective.op_name, collective.source
    gathers = collective.kind == "all-gather" and not name.endswith("sharding_constraint")
    if collective.needed_by and (gathers or source is None):
        return collective.needed_by, collective.needed_by_source
    return name, source


def _filter_choices(traffic: Sequence[TrafficReport]) -> dict[str, list[str]]:
    """Return the values to filter collectives by."""
    choices = {
        "kind": sorted({t.collective.kind for t in traffic}),
        "axis": sorted({axis for t in traffic for axis in _axes(t.collective)}),
        "reason": ["required", "not required"],
    }
    if len({t.network for t in traffic}) > 1:
        choices["network"] = ["ICI", "DCN"]
    return choices


def _replication_reason(replication: ReplicationReport) -> str:
    axes = " and ".join(replication.axes)
    dims = (
        f"dimension{'s' * (len(replication.dims) > 1)} {' and '.join(map(str, replication.dims))}"
    )
    return {
        "result": f"unspecified, and replicated along {axes}",
        "open dimension": f"the partitioner did not shard {dims}",
        "constraint": f"the constraint unshards {dims}: gathered along {axes}",
    }[replication.kind]


def _traffic_along(axis: AxisReport, time: TimeEstimate) -> tuple[int, float]:
    """Return the bytes sent along a mesh axis, and their time."""
    found = [t for t in time.traffic if axis.name in t.along.split(", ")]
    return sum(t.sent_bytes for t in found), sum(t.seconds for t in found)
