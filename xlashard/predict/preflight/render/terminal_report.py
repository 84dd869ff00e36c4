"""Terminal output of a preflight report."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from xlashard.analysis.explain.model import CollectiveReport
from xlashard.analysis.explain.sections import (
    INNER_VALUES,
    donations_section,
    findings_of,
    merged_values,
    values_section,
)
from xlashard.analysis.explain.tables import (
    WIDE,
    Page,
    cause_text,
    columns_table,
    groups_text,
    head,
    listing,
    operation_text,
    place_text,
    runs_text,
    section,
    sharding_text,
    short_type,
    table,
    types_text,
)
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.predict.preflight.render.report_text import (
    ESTIMATE,
    LAID_OUT,
    ORIGINS,
    SUGGESTIONS,
    axes_text,
    error_notes,
    format_change,
    memory_summary,
    mesh_text,
    most_worthwhile,
    price_summary,
    severity,
    spill_remedy,
    throughput_text,
    time_summary,
    topology_text,
    uncounted_work,
    words_of,
)
from xlashard.predict.preflight.report.preflight_model import (
    PreflightFields,
    TemporaryReport,
)
from xlashard.predict.preflight.report.step_model import SpillReport
from xlashard.support.formatting import in_bytes, in_flop, in_seconds

_ADVICE_STYLES = {"helps": "green", "no help": "dim", "out of memory": "red", "not tried": "dim"}

_VERY_WIDE = 130
"""Minimum width for the types of collectives."""


def preflight_sections(report: PreflightFields, page: Page) -> Iterator[RenderableType | None]:
    """Yield the sections of a printed report."""
    yield _head(report)
    yield _memory(report, page)
    yield _temporaries(report, page)
    yield _time(report, page)
    yield _lines(report, page)
    yield _spills(report.spills, page)
    yield _collectives(report, page)
    yield _suggestions(report, page)
    for findings, rows in findings_of(report):
        yield findings.section(rows, page)
    yield INNER_VALUES.section(report.values, page)
    yield _replicated(report, page)
    yield values_section("Arguments", report.inputs, page)
    yield _results(report, page)
    yield donations_section(report.donations, page)
    yield _versions(report)


def _head(report: PreflightFields) -> RenderableType:
    where = [report.title] if report.title else []
    where += [topology_text(report.topology)]
    where += [axes_text(report.mesh), *[LAID_OUT] * report.is_laid_out, report.partitioner]
    return head(report.name, where, _facts(report))


def _facts(report: PreflightFields) -> Iterator[tuple[str, str | Text]]:
    if report.degraded:
        yield "degraded", Text(report.degraded, "red")
    if report.is_estimate:
        yield "estimate", ESTIMATE
    fits = report.outcome == "fits"
    verdict = Text(memory_summary(report), "green" if fits else "red")
    yield "fits" if fits else "too large", verdict
    yield "takes", time_summary(report)
    most, least = ("at most ", "at least ") if report.time.is_lower_bound else ("", "")
    if report.throughput is not None:
        yield "trains", most + throughput_text(report.throughput)
    if report.price is not None:
        yield "costs", least + price_summary(report.price, words_of(report.topology).chip)
    if worth := most_worthwhile(report):
        style = "" if severity(report) == "fits" else "yellow"
        yield "advice", Text.assemble("most worth doing: ", (worth, style))
    if places := mesh_text(report.mesh):
        yield "mesh", places
    if report.forgotten:
        yield "unknown", report.forgotten
    for warning in report.warnings:
        yield "warning", Text(warning, "yellow")


def _bar(part: float, page: Page, style: str = "cyan") -> Text:
    """Return a bar of a fraction."""
    width = 24 if page.width >= WIDE else 12
    filled = min(width, round(part * width))
    filled = max(filled, 1) if part > 0 else 0
    return Text.assemble(("█" * filled, style), ("░" * (width - filled), "dim"))


def _memory(report: PreflightFields, page: Page) -> RenderableType:
    m = report.memory
    fresh = in_bytes(m.alias_bytes)
    parts = [
        (m.argument_bytes, "arguments", f"results reuse {fresh}" if m.alias_bytes else ""),
        (m.temporary_bytes, "temporaries", "at their peak"),
        (m.result_bytes, "other results" if m.alias_bytes else "results", ""),
        (m.code_bytes, "the program", ""),
        (m.constant_bytes, "constants", ""),
    ]
    rows: list[Sequence[RenderableType]] = [
        (
            in_bytes(size),
            f"{size / m.available_bytes:.1%}",
            _bar(size / m.available_bytes, page),
            Text.assemble(word, (f"  {note}" if note else "", "dim")),
        )
        for size, word, note in sorted(parts, key=lambda part: -part[0])
        if size
    ]
    over = m.total_bytes > m.available_bytes
    total = f"{m.total_bytes / m.available_bytes:.1%}"
    bar = _bar(m.total_bytes / m.available_bytes, page, "red" if over else "green")
    rows.append((in_bytes(m.total_bytes), total, bar, Text("all together", "bold")))
    host = f", and {in_bytes(m.host_bytes)} of its host's" if m.host_bytes else ""
    note = f"of the {in_bytes(m.available_bytes)} of HBM available on one device{host}"
    kept = ", ".join(f"{in_bytes(each.device_bytes)} {each.name}" for each in m.runtime)
    rest = f"The runtime keeps beside them: {kept}." if kept else ""
    return section("Memory", note, table((">bytes", ">of HBM", "", ""), rows), rest)


def _temporaries(report: PreflightFields, page: Page) -> RenderableType | None:
    return listing(
        page,
        ("Temporaries at the peak", "live at the peak of the heap"),
        (">bytes", "type", "of"),
        report.memory.temporaries,
        lambda t: (in_bytes(t.device_bytes), _type(t), _operation_of(t.source, t.op_name, t.name)),
        lambda t: t.device_bytes,
    )


def _type(t: TemporaryReport) -> str:
    return f"{t.count} × {t.type}" if t.count > 1 else t.type


def _operation_of(source: SourceLine | None, op_name: str, name: str = "") -> Text:
    return Text.assemble(place_text(source), (operation_text(op_name) if op_name else name, "dim"))


def _time(report: PreflightFields, page: Page) -> RenderableType:
    time, topology, words = report.time, report.topology, words_of(report.topology)
    multiplied = sum(flops for _, flops in time.flops_by_dtype)
    # That of the dtypes, as far as they have figures of their own.
    peak = multiplied / time.compute_seconds if time.compute_seconds else 0.0
    waits = [
        ("compute", time.compute_seconds, in_flop(time.flops), in_flop(peak) if peak else ""),
        ("hbm", time.hbm_seconds, in_bytes(time.hbm_bytes), in_bytes(topology.hbm_bandwidth)),
    ]
    links = {"ici": time.ici_seconds, "dcn": time.dcn_seconds}
    rates = {"ici": topology.ici_bandwidth, "dcn": topology.dcn_bandwidth}
    for network, seconds in links.items():
        sent = sum(t.sent_bytes for t in time.traffic if t.network == network)
        if sent:
            waits.append((network, seconds, in_bytes(sent), in_bytes(rates[network])))
    if time.bound not in {bound for bound, *_ in waits}:
        waits.append((time.bound, dict(time.shares).get(time.bound, 0.0), "", ""))
    longest = max((time.seconds, *(seconds for _, seconds, _, _ in waits))) or 1.0
    rows: list[Sequence[RenderableType]] = []
    for bound, seconds, amount, rate in waits:
        holds = bound == time.bound
        share, style = _bar(seconds / longest, page, "yellow" if holds else "cyan"), "bold" * holds
        at = f"at {rate}/s" * bool(rate) + (" a link" if bound == topology.links else "")
        rows.append((in_seconds(seconds), share, Text(words.bounds[bound], style), amount, at))
        rows += [
            (
                Text(in_seconds(t.seconds), "dim"),
                "",
                Text(f"  along {t.along}", "dim"),
                Text(in_bytes(t.sent_bytes), "dim"),
                "",
            )
            for t in time.traffic
            if t.network == bound
        ]
    parts = " + ".join(
        f"{in_seconds(s)} {words.shares[name]}"
        for name, s in time.shares
        if s >= 0.01 * time.seconds
    )
    rows.append((in_seconds(time.seconds), _bar(time.seconds / longest, page), "schedule", "", ""))
    note = "of one execution on each device; each resource alone, and the schedule"
    rest = " ".join(
        [f"The schedule: {parts}."] * bool(parts) + [*error_notes(time), *uncounted_work(time)]
    )
    return section("Time", note, table((">takes", "", "for", ">amount", ""), rows), rest)


def _lines(report: PreflightFields, page: Page) -> RenderableType | None:
    time, words = report.time, words_of(report.topology)
    if not time.lines:
        return None
    rows = [
        (
            in_seconds(each.seconds),
            f"{each.seconds / time.seconds:.1%}",
            f"{each.runs:,} ×",
            Text(each.kind, "cyan"),
            words.shares[each.bound],
            in_seconds(each.exposed_seconds) if each.exposed_seconds else "",
            _operation_of(each.source, each.op_name),
        )
        for each in page.rows(time.lines)
    ]
    columns = (">takes", ">share", ">runs", "what", "bound by", ">exposed", "of")
    note = "of the schedule; exposed: what the cores wait for"
    left = time.lines[len(rows) :]
    seconds = sum(each.seconds for each in left) + time.other_lines_seconds
    others = f"{in_seconds(seconds)} ({seconds / time.seconds:.1%})"
    rest = page.left(len(left), f"more and shorter ones, {others}")
    rest = rest or (f"and shorter ones, {others}" if seconds else "")
    return section("Time by source line", note, table(columns, rows), rest)


def _spills(spills: Sequence[SpillReport], page: Page) -> RenderableType | None:
    if not spills:
        return None
    vmem = in_bytes(spills[0].vmem_bytes)
    return listing(
        page,
        ("VMEM spill", f"attention scores that pass through HBM; VMEM has {vmem}"),
        (">bytes", ">runs", "type", "of", "remedy"),
        spills,
        lambda spill: (
            in_bytes(spill.device_bytes),
            f"{spill.runs:,} ×",
            spill.type,
            _operation_of(spill.source, spill.op_name),
            spill_remedy(spill),
        ),
    )


def _collectives(report: PreflightFields, page: Page) -> RenderableType | None:
    traffic, networks = report.traffic, words_of(report.topology).networks
    if not traffic:
        return None
    narrow = page if page.is_full else Page(page.width * 2 // 3, full=False)
    shown = page.rows(traffic)
    columns = {
        ">takes": [in_seconds(c.seconds) for c in shown],
        ">sends": [in_bytes(c.sent_bytes) for c in shown],
        "what": [Text.assemble((c.kind, "cyan"), runs_text(c)) for c in shown],
        "along": [_along(c, networks) for c in shown],
        "of": [types_text(c) for c in shown],
        "for": [cause_text(c, narrow) for c in shown],
        "cause": [_origin(c, page) for c in shown],
    }
    if page.width < _VERY_WIDE and not page.is_full:
        del columns["of"]
    if page.width < WIDE:
        del columns[">sends"]
    return section(
        "Collectives",
        "of each device in one execution",
        columns_table(columns),
        page.rest(traffic, lambda c: c.sent_bytes),
    )


def _along(c: CollectiveReport, networks: Mapping[str, str]) -> str:
    return groups_text(c) + ("" if c.network == "ici" else f" ({networks[c.network]})")


def _origin(c: CollectiveReport, page: Page) -> Text:
    text = ORIGINS[c.origin] if page.width >= WIDE else c.origin
    return Text(text, "" if c.requested else "yellow")


def _suggestions(report: PreflightFields, page: Page) -> RenderableType | None:
    return listing(
        page,
        ("Suggestions", SUGGESTIONS),
        (">step", ">memory", "outcome", "change"),
        report.advice,
        lambda each: (
            format_change(each.seconds, in_seconds),
            format_change(each.memory_bytes, in_bytes),
            Text(each.outcome, _ADVICE_STYLES.get(each.outcome, "")),
            each.text,
        ),
    )


def _replicated(report: PreflightFields, page: Page) -> RenderableType | None:
    reused = set() if page.is_full else {v.path for v in report.outputs if v.aliased}
    values = [v for v in report.replicated if v.path not in reused]
    return listing(
        page,
        (
            "Fully replicated",
            f"arguments and results of {in_bytes(report.replicated_above)} or more",
        ),
        (">each device", "path", "type", "sharding × copies"),
        values if page.is_full else sorted(merged_values(values), key=lambda v: -v.device_bytes),
        lambda v: (in_bytes(v.device_bytes), page.path(v.path), short_type(v), sharding_text(v)),
        lambda v: v.device_bytes,
    )


def _results(report: PreflightFields, page: Page) -> RenderableType | None:
    """Return the results that don't reuse an argument's buffer."""
    fresh = [v for v in report.outputs if page.is_full or not v.aliased]
    if fresh or not report.outputs:
        return values_section("Results", fresh, page)
    return section("Results", "all of them reuse the memory of arguments", None)


def _versions(report: PreflightFields) -> RenderableType:
    v = report.versions
    verb = "estimated" if report.is_estimate else "compiled"
    spent = f"in {in_seconds(report.compile_seconds)}" if report.compile_seconds else "before"
    compiler = f"JAX's CUDA plugin {v.cuda_plugin}" if v.cuda_plugin else f"libtpu {v.libtpu}"
    text = f"{verb} {spent} by {compiler}, "
    text += f"jax {v.jax}, jaxlib {v.jaxlib}, xlashard {v.xlashard}"
    flags = "".join(f"\n{where}: {flag}" for where, flag in v.flags)
    return Text(f"\n{text}{flags}", "dim")
