"""The HTML page: sections, style, script, and the reports' JSON.

The page is self-contained. Its content security policy blocks every request, and every script but
its own.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.resources import files

from xlashard.errors import ArgumentError
from xlashard.tpu.preflight.render.html.markup import (
    Child,
    Html,
    TableCell,
    TableColumn,
    TableRow,
    join,
    table,
    tag,
    user_text,
)
from xlashard.tpu.preflight.render.html.memory_bar import memory_section
from xlashard.tpu.preflight.render.html.report_tables import (
    collectives_section,
    donations_and_replication,
    shardings_section,
)
from xlashard.tpu.preflight.render.html.timing import roofline_section, time_section
from xlashard.tpu.preflight.render.html.torus_drawing import mesh_section
from xlashard.tpu.preflight.render.html.verdict import (
    is_fitting,
    overview_section,
    title_of,
    verdict_section,
)
from xlashard.tpu.preflight.render.report_text import FORMATTERS, in_thousands
from xlashard.tpu.preflight.report.preflight_model import (
    REPORT_FORMAT,
    AmountChange,
    ComparisonFields,
    FactChange,
    PreflightFields,
    UsageChange,
)
from xlashard.tpu.preflight.report.pricing import ThroughputReport
from xlashard.wording import in_bytes, in_seconds


def environment_section(report: PreflightFields) -> Html:
    """Return lists of chip figures, versions and flags."""
    lists = [
        _list("Each device", _device(report)),
        _list("Compiled with", _versions(report)),
        _list("Model", _model(report.throughput)) if report.throughput else None,
    ]
    return join(tag("div", lists, class_="lists"), _flags(report))


def _list(name: str, pairs: Iterator[tuple[str, str]]) -> Html:
    items = [[tag("dt", word), tag("dd", user_text(text))] for word, text in pairs]
    return tag("div", tag("h3", name), tag("dl", items))


def _device(report: PreflightFields) -> Iterator[tuple[str, str]]:
    topology = report.topology
    yield "generation", topology.generation
    for dtype, flops in topology.peak_flops:
        yield f"peak {dtype}", f"{in_thousands(flops)}{'OP' if 'int' in dtype else 'FLOP'}/s"
    yield "HBM", f"{in_bytes(topology.hbm_bytes)}, {in_bytes(topology.available_bytes)} available"
    yield "HBM bandwidth", f"{in_thousands(topology.hbm_bandwidth)}B/s"
    yield "one ICI link", f"{in_thousands(topology.ici_bandwidth)}B/s in one direction"
    yield "share of DCN", f"{in_thousands(topology.dcn_bandwidth)}B/s"


def _versions(report: PreflightFields) -> Iterator[tuple[str, str]]:
    versions = report.versions
    for name in ("xlashard", "jax", "jaxlib", "libtpu", "runtime"):
        yield name, getattr(versions, name)
    yield "partitioner", report.partitioner
    yield "compile time", in_seconds(report.compile_seconds)


def _model(throughput: ThroughputReport) -> Iterator[tuple[str, str]]:
    workload = throughput.workload
    yield "parameters", in_thousands(workload.parameters)
    if workload.active_parameters != workload.parameters:
        yield "active for a token", in_thousands(workload.active_parameters)
    yield "tokens in a step", f"{workload.tokens:,}"
    yield "model FLOP in a step", f"{in_thousands(workload.model_flops)}FLOP"


def _flags(report: PreflightFields) -> Html:
    flags = report.versions.flags
    if not flags:
        return tag("p", "No compiler flags were set.", class_="note")
    items: list[Child] = [
        tag("li", tag("b", user_text(place)), " ", user_text(text, "code")) for place, text in flags
    ]
    return join(tag("h3", "Compiler flags"), tag("ul", items, class_="flags"))


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
    given = (reports,) if isinstance(reports, PreflightFields) else tuple(reports)
    if not given:
        raise ArgumentError("reports is empty: write page(report)")
    names = _names(given)
    titles = [f"{_full_title(r)}: {r.outcome}" for r in given]
    title = titles[0] if len(given) == 1 else f"{len(given)} preflight reports"
    return join(
        Html("<!DOCTYPE html>\n"),
        tag("html", _head(title), tag("body", _body(given, names, changes)), lang="en", dir="ltr"),
        Html("\n"),
    )


def fragment(report: PreflightFields) -> str:
    """Return the verdict as an element for notebooks.

    Args:
        report: The report.
    """
    style = _asset("notebook.css") + _asset("shared.css")
    scoped = f"@scope (.xlashard-preflight) {{\n{style}}}"
    return tag(
        "div",
        tag("style", Html(scoped)),
        verdict_section(report, with_bar=True),
        class_="xlashard-preflight",
    )


@lru_cache(maxsize=16)
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _head(title: str) -> Html:
    script = hashlib.sha256(_asset("page.js").encode()).digest()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{base64.b64encode(script).decode()}'"
    )
    style = Html(_asset("shared.css") + _asset("page.css"))
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("meta", name_="generator", content="xlashard"),
        tag("title", title),
        tag("style", style),
    )


def _body(
    reports: Sequence[PreflightFields], names: Sequence[str], changes: ComparisonFields | None
) -> Html:
    panels = [_panel(report, number) for number, report in enumerate(reports)]
    tabs = None
    if len(reports) > 1:
        tabs = _tabs(names)
        changed = None if changes is None else changes_section(changes)
        beside = join(overview_section(reports, names), changed)
        overview = tag("div", beside, id="report-0", class_="panel")
        panels = [overview, *panels]
    data = [
        _data(report, name, n) for n, (report, name) in enumerate(zip(reports, names, strict=True))
    ]
    brand = tag("p", tag("span", "xlashard"), " ", tag("b", "preflight"), class_="brand")
    return join(
        tag("a", "Skip to the report", href="#main", class_="skip"),
        tag("header", brand, _actions(), class_="top"),
        tag("noscript", tag("p", _WITHOUT_SCRIPTS, class_="note no-script")),
        tabs,
        tag("main", panels, id="main"),
        tag("footer", _FOOTER, class_="note"),
        data,
        tag("script", Html(_asset("page.js"))),
    )


_WITHOUT_SCRIPTS = (
    "Scripts are off: everything is shown, and the tables neither sort nor filter. The reports' "
    "JSON is at the end of this page's source."
)
_FOOTER = (
    "Estimated before the program has run: bytes by the compiler, times as lower bounds from the "
    "chip's data sheet."
)


def _actions() -> Html:
    buttons = [
        tag("button", name, type="button", data_theme_choice=name, aria_pressed=str(not n).lower())
        for n, name in enumerate(("auto", "light", "dark"))
    ]
    return tag(
        "div",
        tag("div", buttons, class_="themes", role="group", aria_label="Colours"),
        tag("button", "Download JSON", type="button", class_="download"),
        class_="actions needs-script",
    )


def _tabs(names: Sequence[str]) -> Html:
    links = [
        tag("a", "All" if number == 0 else user_text(name), href=f"#report-{number}")
        for number, name in enumerate(("", *names))
    ]
    return tag("nav", links, class_="tabs", aria_label="Reports")


def _panel(report: PreflightFields, number: int) -> Html:
    time, topology = report.time, report.topology
    memory = memory_section(report.memory, topology, is_fitting=is_fitting(report))
    cards = (
        ("Memory of a device", memory, "memory wide"),
        ("Time of a step", time_section(time), "time"),
        ("Roofline", roofline_section(time, topology), "roofline-card"),
        (
            "Mesh on the torus",
            mesh_section(topology, report.mesh, time, f"colour-{number}"),
            "mesh wide",
        ),
        ("Collectives", collectives_section(report.traffic), "traffic wide"),
        ("Shardings", shardings_section(report), "shardings wide"),
        ("Donated and replicated", donations_and_replication(report), "held wide"),
        ("Chips, versions and flags", environment_section(report), "environment wide"),
    )
    sections = [
        tag("section", tag("h3", name), body, class_=f"card {kind}", aria_label=name)
        for name, body, kind in cards
    ]
    return tag(
        "div",
        tag("h1", user_text(title_of(report)), class_="title"),
        verdict_section(report),
        tag("div", sections, class_="cards"),
        id=f"report-{number + 1}",
        class_="panel",
    )


def _data(report: PreflightFields, name: str, number: int) -> Html:
    """Return the report's JSON, escaped so that no text ends its script element."""
    text = json.dumps(REPORT_FORMAT.to_dict(report)).replace("<", "\\u003c")
    return tag(
        "script",
        Html(text),
        type="application/json",
        id=f"json-{number + 1}",
        data_name=f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)}.json",
    )


def _names(reports: Sequence[PreflightFields]) -> list[str]:
    """Return a distinct name for each report."""
    for name in (title_of, _full_title):
        names = [name(report) for report in reports]
        if len(set(names)) == len(names):
            return names
    return [f"{n}. {_full_title(report)}" for n, report in enumerate(reports, 1)]


def _full_title(report: PreflightFields) -> str:
    slices = f"{report.topology.slices} × " if report.topology.slices > 1 else ""
    return f"{title_of(report)} on {slices}{report.topology.name}"


_NUMBERS = (
    TableColumn("number"),
    TableColumn("before", True),
    TableColumn("after", True),
    TableColumn("change", True, "What is after by what was before"),
)
_FACTS = (TableColumn("what"), TableColumn("before"), TableColumn("after"))
_USES = (
    TableColumn("change"),
    TableColumn("before", True),
    TableColumn("after", True),
    TableColumn("more", True),
    TableColumn("what"),
    TableColumn("line"),
)


def changes_section(changes: ComparisonFields) -> Html:
    """Return the section of all changes, numbers first."""
    title = tag("h2", "What changed from ", user_text(changes.old), " to ", user_text(changes.new))
    parts = [
        tag("div", tag("h3", name), made) for name, made in _tables(changes) if made is not None
    ]
    nothing = tag("p", "No differences.", class_="lead")
    return tag("section", title, parts or nothing, class_="card changes", aria_label="Changes")


def _tables(changes: ComparisonFields) -> Iterator[tuple[str, Html | None]]:
    yield "Numbers of one device", _amounts(changes.amounts)
    yield "Facts", _facts("words", changes.facts)
    yield "Memory of a device", _uses("memory", changes.memory)
    yield "Collectives, by what a device sends", _uses("collectives", changes.traffic)
    yield "Shardings", _facts("shardings", changes.shardings)
    yield "Donated", _facts("donations", changes.donations)


def _amounts(amounts: Sequence[AmountChange]) -> Html | None:
    rows = [
        TableRow(
            (TableCell(a.name, a.name), _amount(a, a.old), _amount(a, a.new), _ratio(a)),
            search=a.name,
        )
        for a in amounts
        if a.old != a.new
    ]
    return table("Changed numbers", _NUMBERS, rows) if rows else None


def _amount(change: AmountChange, value: float | None) -> TableCell:
    if value is None:
        return TableCell("–", "")
    text = FORMATTERS[change.unit](abs(value))
    return TableCell(f"−{text}" if value < 0 else text, value)


def _ratio(change: AmountChange) -> TableCell:
    ratio = change.ratio
    if ratio is None or ratio <= 0:
        return TableCell(None, "")
    return TableCell(
        f"×{ratio:,.1f}" if ratio >= 2 else f"{ratio - 1:+.1%}".replace("-", "−"), ratio
    )


def _facts(label: str, facts: Sequence[FactChange]) -> Html | None:
    rows = [
        TableRow(
            (
                TableCell(user_text(f.name, "code" if "[" in f.name else "bdi"), f.name),
                TableCell(user_text(f.old or "–"), f.old),
                TableCell(user_text(f.new or "–"), f.new),
            ),
            search=f"{f.name} {f.old} {f.new}",
        )
        for f in facts
    ]
    return table(f"Changed {label}", _FACTS, rows) if rows else None


def _uses(label: str, uses: Sequence[UsageChange]) -> Html | None:
    rows = [
        TableRow(
            (
                TableCell(tag("span", u.change, class_="tag"), u.change),
                _use(u.old_bytes, u.old_seconds, is_there=u.change != "added"),
                _use(u.new_bytes, u.new_seconds, is_there=u.change != "removed"),
                TableCell(_more(u.new_bytes - u.old_bytes), u.new_bytes - u.old_bytes),
                TableCell(user_text(u.what), u.what),
                TableCell(
                    user_text(u.where, "code", whole=True, class_="line") if u.where else None,
                    u.where,
                ),
            ),
            search=f"{u.change} {u.what} {u.where}",
        )
        for u in uses
    ]
    return table(f"Changed {label}", _USES, rows) if rows else None


def _use(nbytes: int, seconds: float, *, is_there: bool) -> TableCell:
    if not is_there:
        return TableCell("–", 0)
    time = tag("div", in_seconds(seconds), class_="note") if seconds else None
    return TableCell(join(in_bytes(nbytes), time), nbytes)


def _more(nbytes: int) -> str:
    return f"{'−' if nbytes < 0 else '+'}{in_bytes(abs(nbytes))}"
