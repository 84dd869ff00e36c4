"""Head and sections of a preflight report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from xlashard.analysis.explain.program_report import pairs_section
from xlashard.analysis.explain.sections import (
    INNER_VALUES,
    collectives_section,
    donations_section,
    list_findings,
    list_remedies,
    memory_map_section,
    merge_values,
    modules_section,
    sent_section,
    values_section,
)
from xlashard.analysis.report.cells import (
    Content,
    Span,
    Style,
    TableCell,
    bar_cell,
    join_cell,
    operation_cell,
)
from xlashard.analysis.report.parts import Column, Head, KeyFigure, MemoryBar, Section
from xlashard.analysis.report.printable import Part
from xlashard.errors import counted
from xlashard.predict.preflight.render.report_text import (
    ESTIMATE,
    axes_text,
    error_text,
    in_thousands,
    is_visible_ring,
    mesh_text,
    step_time_text,
    topology_text,
    unknown_work,
    words_of,
)
from xlashard.predict.preflight.render.roofline import RooflinePlot, Slope, read_roofline
from xlashard.predict.preflight.render.step_timeline import draw_timelines, make_light_key
from xlashard.predict.preflight.render.torus_drawing import (
    device_positions,
    lies_along,
    torus_lead,
)
from xlashard.predict.preflight.report.preflight_model import (
    AdviceReport,
    AxisReport,
    MemoryBreakdown,
    PreflightFields,
    TemporaryReport,
    TimeEstimate,
)
from xlashard.predict.preflight.report.pricing import PriceReport, ThroughputReport
from xlashard.predict.preflight.report.step_model import LineTime, SpillReport
from xlashard.support.formatting import (
    fold_axes,
    in_amount,
    in_bytes,
    in_flop,
    in_percent,
    in_seconds,
    numbered,
    signed,
)

FOOTER = (
    "Estimated before the program has run: bytes by the compiler, times by its schedule at the "
    "rates that published measurements show."
)


def list_parts(report: PreflightFields) -> Iterator[Part]:
    """Yield the head and the sections of a report."""
    fresh = [v for v in report.outputs if not v.aliased]
    yield make_head(report)
    yield _memory(report)
    yield _memory_map(report)
    yield _temporaries(report)
    yield _time(report)
    yield _roofline(report)
    yield _lines(report)
    yield from _modules(report.time)
    yield _spills(report.spills)
    yield _timeline(report)
    yield _mesh(report)
    collectives = collectives_section(
        report.traffic,
        "of each device in one execution",
        "a step",
        words_of(report.topology).networks,
        report.excerpts,
    )
    yield replace(collectives, light_key=make_light_key(report.time))
    yield sent_section(report.traffic, "a step")
    yield advice_section(report.advice)
    yield from list_findings(report)
    yield INNER_VALUES.with_rows(report.values)
    yield _replicated(report)
    yield values_section("arguments", "Arguments", report.inputs)
    yield values_section("results", "Results", report.outputs, fresh)
    yield donations_section(report.donations)
    yield from _environment(report)


def make_head(report: PreflightFields) -> Head:
    """Return the head of a report."""
    fits, place = report.outcome == "fits", [report.title] if report.title else []
    colour, memory = _severity(report), _memory_summary(report)
    place += [topology_text(report.topology), axes_text(report.mesh)]
    place += [*["mesh laid out by xlashard"] * report.is_laid_out, report.partitioner]
    badge = ("✓ Fits", colour, "") if fits else ("✗ Out of memory", colour, "")
    notes: list[tuple[str, TableCell]] = []
    if report.degraded:
        notes.append(("degraded", join_cell(Span(report.degraded, "bad"))))
    if report.forgotten:
        notes.append(("unknown", join_cell(Span(report.forgotten, "name"))))
    notes += [("warning", join_cell(Span(warning, "warn"))) for warning in report.warnings]
    return Head(
        title=report.name,
        place=list(filter(None, place)),
        facts=list(_facts(report)),
        headline=f"{memory[0].upper()}{memory[1:]}",
        badges=[badge, *[("Estimate", "estimate", ESTIMATE)] * report.is_estimate],
        worth=_most_worthwhile(report),
        notes=notes,
        figures=list(_key_figures(report)),
        figure=memory_bar(report.memory),
        severity=colour,
    )


def _facts(report: PreflightFields) -> Iterator[tuple[str, Content]]:
    if report.is_estimate:
        yield "estimate", ESTIMATE
    fits = report.outcome == "fits"
    verdict = Span(_memory_summary(report), "good" if fits else "bad")
    yield "fits" if fits else "too large", verdict
    yield "takes", _time_summary(report)
    most, least = ("at most ", "at least ") if report.time.is_lower_bound else ("", "")
    if report.throughput is not None:
        yield "trains", most + _throughput_text(report.throughput)
    if report.price is not None:
        yield "costs", least + _price_summary(report.price, words_of(report.topology).chip)
    if places := mesh_text(report.mesh):
        yield "mesh", places


def _key_figures(report: PreflightFields) -> Iterator[KeyFigure]:
    time, memory, words = report.time, report.memory, words_of(report.topology)
    throughput, price = report.throughput, report.price
    error = error_text(time) + (f", without {unknown_work(time)}" if time.is_lower_bound else "")
    yield KeyFigure("step time", step_time_text(time), time.seconds, error)
    waits = f"waits for {words.resources[time.bound].detail}"
    yield KeyFigure("bound", words.resources[time.bound].short, time.bound, waits)
    note = f"{in_bytes(memory.total_bytes)} of {in_bytes(memory.available_bytes)}"
    yield KeyFigure("memory", in_percent(memory.share), memory.share, note)
    if throughput is not None:
        speed = throughput.tokens_per_second
        each = f"{in_thousands(throughput.device_tokens_per_second)} on each device"
        note = f"{each}, {throughput.workload.tokens:,} in a step"
        yield KeyFigure("tokens/s", in_thousands(speed), speed, note)
        use, peak = throughput.utilisation, _peak_text(throughput)
        yield KeyFigure("utilisation", in_percent(use), use, f"of {peak} (MFU)")
    else:
        yield KeyFigure("work", in_flop(time.flops), time.flops, "on each device")
    if price is not None:
        hour, chip_hour = price.format_amount(price.hour), price.format_amount(price.chip_hour)
        note = f"{hour} an hour, {chip_hour} a {words.chip}"
        yield KeyFigure("price of a step", price.format_amount(price.step), price.step, note)
        if price.billion_tokens is not None:
            cost = price.format_amount(price.billion_tokens)
            yield KeyFigure("10⁹ tokens", cost, price.billion_tokens, "at this speed")


def _memory_summary(report: PreflightFields) -> str:
    """Return the memory use and the bytes to spare or missing."""
    m = report.memory
    have = in_bytes(m.available_bytes)
    if report.outcome == "fits":
        spare = f"{in_bytes(m.spare_bytes)} ({m.spare_bytes / m.available_bytes:.0%}) to spare"
        return f"{in_bytes(m.total_bytes)} of {have} of HBM on each device, {spare}"
    needs = f"needs {in_bytes(m.total_bytes)} of HBM on each device"
    if m.fits:
        return f"{needs}, which the compiler could not fit into {have}"
    return f"{needs}, {in_bytes(-m.spare_bytes)} more than the {have} available"


def _time_summary(report: PreflightFields) -> str:
    """Return the time with its error, what bounds it, the roofline, and what the time lacks."""
    time = report.time
    text = (
        f"{step_time_text(time)} ({error_text(time)}), bound by "
        f"{words_of(report.topology).resources[time.bound].bound}; "
        f"at least {in_seconds(time.roofline_seconds)} by the roofline"
    )
    if time.is_lower_bound:
        text += f"; without {unknown_work(time)}"
    if time.unknown_kernels:
        first = time.unknown_kernels[0][0]
        text += f"; give a cost: kernel_costs={{{first!r}: seconds}}, or --kernel-cost NAME=TIME"
    return text


def _peak_text(throughput: ThroughputReport) -> str:
    """Return the peak of a device that MFU is a share of: `459 TFLOP/s bf16`."""
    dtype = throughput.peak_dtype.replace("bfloat", "bf")
    return f"{in_thousands(throughput.peak_flops)}FLOP/s {dtype}"


def _throughput_text(throughput: ThroughputReport) -> str:
    """Return tokens per second in all and on each device, MFU and parameters."""
    workload = throughput.workload
    parameters = f"{in_amount(workload.parameters)} parameters"
    if workload.active_parameters != workload.parameters:
        parameters += f", {in_amount(workload.active_parameters)} of them active"
    speed = f"{in_amount(throughput.tokens_per_second)} tokens/s"
    speed += f", {in_amount(throughput.device_tokens_per_second)} on each device"
    use = f"{throughput.utilisation:.1%} of {_peak_text(throughput)}"
    details = f"{parameters}, {in_amount(workload.tokens)} tokens a step"
    return f"{speed}, at an MFU of {use} ({details})"


def _price_summary(price: PriceReport, chip: str) -> str:
    """Return the cost of a step, an hour and 10⁹ tokens."""
    text = f"{price.format_amount(price.step)} a step, {price.format_amount(price.hour)} an hour"
    if price.billion_tokens is not None:
        text += f", {price.format_amount(price.billion_tokens)} for a billion tokens"
    return f"{text} (at {price.format_amount(price.chip_hour)} a {chip} and hour)"


def _most_worthwhile(report: PreflightFields) -> str:
    """Return the code change that saves most, with its price; empty without one."""
    available = report.memory.available_bytes
    remedies = [(nbytes / available, change) for nbytes, change in list_remedies(report)]
    best = report.advice[0] if report.advice else None
    text = ""
    if best is not None and best.outcome in ("helps", "within the error"):
        step = f"{signed(in_seconds)(best.seconds or 0.0)} a step"
        step += ", within the error" * (best.outcome == "within the error")
        memory = signed(in_bytes)(best.memory_bytes or 0)
        text = f"{best.text}: {step}, {memory} on each device"
        if best.outcome == "helps":
            is_cure = report.outcome != "fits"
            share = 1.0 if is_cure else -(best.seconds or 0.0) / report.time.seconds
            remedies.append((share, text))
    share, remedy = max(remedies, default=(0.0, ""))
    return remedy if share >= _LEAST_SHARE else text


_LEAST_SHARE = 0.005
"""Share of the memory, or of the step, below which a code change is not worth a line."""


def _severity(report: PreflightFields) -> Literal["fits", "costly", "not"]:
    """Return the colour of a report: `costly` if devices hold whole values without a request."""
    if report.outcome != "fits":
        return "not"
    is_costly = any(u.is_whole and u.nbytes for u in report.unmet)
    helps = any(each.outcome == "helps" for each in report.advice)
    return "costly" if is_costly or helps else "fits"


_ERROR_CAUSES = {
    "model": "what a run differs by from its settings",
    "waiting": "waiting for links and hosts",
    "hbm": "HBM traffic",
    "dcn": "transfers between slices",
    "slices": "the slowest slice",
    "kernels": "kernels at the rates of other chips",
    "ragged": "ragged products, of which the sizes of groups are unknown",
}


def _error_notes(time: TimeEstimate) -> Iterator[str]:
    """Yield notes on the wait for slices, and on what the error of the time means."""
    if time.slowest_slice_seconds:
        yield (
            f"{in_seconds(time.slowest_slice_seconds)} of the step are a wait for the slowest "
            "slice, as no two slices are equally fast."
        )
    if time.error_parts:
        points = {cause: 100 * (above - below) for cause, below, above in time.error_parts}
        wide = ", ".join(
            f"{points[cause]:.0f} for {_ERROR_CAUSES[cause]}"
            for cause in sorted(points, key=lambda name: -points[name])
            if points[cause] >= 1
        )
        yield f"The error holds nine in ten published runs; its points: {wide}."


def _uncounted_work(time: TimeEstimate) -> Iterator[str]:
    """Yield notes on what the times take for granted, and on work that they leave out."""
    for assumption in time.assumptions:
        yield f"Assumed: {assumption}."
    if time.unmatched_kernel_costs:
        names = ", ".join(map(repr, time.unmatched_kernel_costs))
        kernels = numbered((*time.kernels, *time.unknown_kernels)) or "none"
        yield f"kernel_costs names no kernel of the program: {names}. Its kernels: {kernels}."
    if time.not_understood:
        yield f"Not understood in the compiled program: {numbered(time.not_understood)}."


@dataclass(frozen=True)
class MemoryPart:
    """Part of a device's memory.

    Attributes:
        name: What takes it.
        nbytes: Its bytes; of those that are free, negative if they are missing.
        words: What it is.
    """

    name: str
    nbytes: int
    words: str


def list_memory_parts(memory: MemoryBreakdown) -> list[MemoryPart]:
    """Return the parts of the memory, in order; the last makes up the compiler's total."""
    aliased = memory.alias_bytes
    reused = f"inputs; results reuse {in_bytes(aliased)}"
    inputs = reused if aliased else "inputs of the program"
    parts = [
        MemoryPart("arguments", memory.argument_bytes, inputs),
        MemoryPart("results", memory.result_bytes, "with memory of their own"),
        MemoryPart("temporaries", memory.temporary_bytes, "the heap, at its peak"),
        MemoryPart("constants", memory.constant_bytes, "numbers written in the program"),
        MemoryPart("code", memory.code_bytes, "the program itself"),
    ]
    rest = memory.total_bytes - sum(part.nbytes for part in parts)
    if rest > 0:
        parts.append(MemoryPart("other", rest, "other parts of the compiler's total"))
    return parts


def memory_bar(memory: MemoryBreakdown) -> MemoryBar:
    """Return the bar of a device's memory."""
    parts = tuple((part.name, part.nbytes) for part in list_memory_parts(memory))
    return MemoryBar(parts, memory.total_bytes, memory.available_bytes)


def _memory(report: PreflightFields) -> Section[MemoryPart]:
    memory, topology = report.memory, report.topology
    words, available = words_of(topology), memory.available_bytes
    over = memory.total_bytes > available

    def bar(part: MemoryPart) -> TableCell:
        style: Style = "" if part.name != "all together" else "bad" if over else "good"
        return bar_cell(abs(part.nbytes) / available, style)

    def name(part: MemoryPart) -> TableCell:
        is_sum = part.name == "all together"
        return join_cell(Span(part.name, "strong" if is_sum else ""), key=part.name)

    parts = sorted(list_memory_parts(memory), key=lambda part: -part.nbytes)
    rows = [
        *parts,
        MemoryPart("all together", memory.total_bytes, "at the peak"),
        MemoryPart("too much", memory.spare_bytes, f"above {words.available}")
        if over
        else MemoryPart("free", memory.spare_bytes, f"of {words.available}"),
    ]
    host = f", and {in_bytes(memory.host_bytes)} of its host's" if memory.host_bytes else ""
    kept = ", ".join(f"{in_bytes(each.device_bytes)} {each.name}" for each in memory.runtime)
    return Section(
        id="memory",
        title="Memory",
        note=f"of the {in_bytes(available)} of HBM available on one device{host}",
        summary=join_cell(_memory_lead(report)),
        columns=(
            Column("what", name),
            Column(">bytes", lambda part: abs(part.nbytes), "bytes"),
            Column(">of HBM", lambda part: abs(part.nbytes) / available, "part"),
            Column("share", bar),
            Column("it is", "words", "quiet"),
        ),
        rows=rows,
        printed=">bytes | >of HBM | ={share} |  ={what} |   ={it is}",
        merged=lambda rows: [part for part in rows[:-1] if part.nbytes],
        rest=[f"The runtime keeps beside them: {kept}."] * bool(kept),
        figure=memory_bar(memory),
        severity="not" if over else "",
    )


def _memory_map(report: PreflightFields) -> Section[None]:
    parts = [(part.name, part.nbytes) for part in list_memory_parts(report.memory)]
    temporaries = [(t.op_name or t.name, t.device_bytes) for t in report.memory.temporaries]
    return memory_map_section(parts, report.inputs, report.outputs, temporaries)


def _memory_lead(report: PreflightFields) -> str:
    memory, topology = report.memory, report.topology
    devices = f"All {topology.devices:,} devices hold the same"
    devices = devices if topology.devices > 1 else "1 device holds all"
    peak = f"{in_bytes(memory.total_bytes)} of {in_bytes(memory.available_bytes)} at the peak"
    reserved = topology.hbm_bytes - memory.available_bytes
    kept = f"; {words_of(topology).reserves} {in_bytes(reserved)}" if reserved > 0 else ""
    text = f"{devices}: {peak}{kept}."
    if memory.fits and report.outcome != "fits":
        text += " The compiler rejected the program nevertheless."
    return text


def _temporaries(report: PreflightFields) -> Section[TemporaryReport]:
    temporaries = report.memory.temporaries
    total = in_bytes(sum(t.device_bytes for t in temporaries))
    whole = in_bytes(report.memory.temporary_bytes)
    largest = max((t.device_bytes for t in temporaries), default=0) or 1

    def type_text(t: TemporaryReport) -> str:
        return f"{t.count} × {t.type}" if t.count > 1 else t.type

    return Section(
        id="temporaries",
        title="Temporaries at the peak",
        note="live at the peak of the heap",
        summary=f"{total} of {whole} by the operations that hold them",
        columns=(
            Column("at the peak", "name", "code"),
            Column("type", type_text, "code"),
            Column("operation", lambda t: operation_cell(t.op_name)),
            Column("of", lambda t: operation_cell(t.op_name, t.name), on_page=False),
            Column("line", "source", "line"),
            Column(">bytes", "device_bytes", "bytes", "On a device"),
            Column("share", lambda t: bar_cell(t.device_bytes / largest)),
        ),
        rows=temporaries,
        printed=">bytes | type | of={line: }{of}",
    )


@dataclass(frozen=True)
class TimeBar:
    """Time of a resource, or of its part along some mesh axes.

    Attributes:
        key: Name of the resource: `hbm`, `ici`, `schedule`.
        seconds: Its time.
        amount: Amount of its work; empty for none.
        words: Its work.
        rate: Rate at which it works; empty if unknown.
        along: Mesh axes; empty for the whole resource.
    """

    key: str
    seconds: float
    amount: str
    words: str
    rate: str = ""
    along: str = ""


_WAITS = {
    "launch": "starting operations, one after another",
    "vmem": "reading and writing the memory of the cores",
    "host": "waiting for copies to and from the host's memory",
}
"""Work of the resources that only the schedule uses."""


def list_time_bars(report: PreflightFields) -> list[TimeBar]:
    """Return the times of all resources, with their parts by mesh axes, and of the schedule."""
    time, topology = report.time, report.topology
    multiplied = sum(flops for _, flops in time.flops_by_dtype)
    # That of the dtypes, as far as they have figures of their own.
    peak = multiplied / time.compute_seconds if time.compute_seconds else 0.0
    rate = f"at {in_flop(peak)}/s" if peak else ""
    bars = [TimeBar("compute", time.compute_seconds, in_flop(time.flops), _work(report), rate)]
    rate, used = f"at {in_bytes(topology.hbm_bandwidth)}/s", in_bytes(time.hbm_bytes)
    bars.append(TimeBar("hbm", time.hbm_seconds, used, "read and written", rate))
    links = {
        "ici": (time.ici_seconds, topology.ici_bandwidth),
        "dcn": (time.dcn_seconds, topology.dcn_bandwidth),
    }
    for network, (seconds, bandwidth) in links.items():
        parts = [t for t in time.traffic if t.network == network]
        if not parts:
            continue
        sent = in_bytes(sum(t.sent_bytes for t in parts))
        rate = f"at {in_bytes(bandwidth)}/s" + (" a link" if topology.links == network else "")
        bars.append(TimeBar(network, seconds, sent, "sent", rate))
        bars += [
            TimeBar(network, t.seconds, in_bytes(t.sent_bytes), "sent", along=t.along)
            for t in parts
        ]
    for name, work in _WAITS.items():
        seconds = dict(time.shares).get(name, 0.0)
        if name == time.bound or (seconds and name == "host"):
            bars.append(TimeBar(name, seconds, "", work))
    if time.bound not in {bar.key for bar in bars}:
        bars.append(TimeBar(time.bound, 0.0, "", "nothing sent"))
    work = "the compiler's schedule, at the rates that measurements show"
    return [*bars, TimeBar("schedule", time.seconds, "", work)]


def _work(report: PreflightFields) -> str:
    time = report.time
    kinds = ", ".join(f"{in_flop(flops)} {dtype}" for dtype, flops in time.flops_by_dtype)
    parts = [f"{kinds} in matrix products"] if kinds else []
    if time.elementwise_flops:
        parts.append(f"{in_flop(time.elementwise_flops)} besides, which count as free")
    return "; ".join(parts) or f"{in_flop(time.flops)}, none of it in matrix products"


def _time(report: PreflightFields) -> Section[TimeBar]:
    time, words = report.time, words_of(report.topology)
    bars = list_time_bars(report)
    longest = max(bar.seconds for bar in bars) or 1.0

    def name(bar: TimeBar) -> TableCell:
        if bar.along:
            return join_cell(Span(f"  along {bar.along}", "quiet"), key=bar.along)
        resource, is_bound = words.resources.get(bar.key), bar.key == time.bound
        text = "schedule" if resource is None else resource.bound
        tag = Span("bound", "tag") if is_bound else None
        return join_cell(Span(text, "strong" if is_bound else ""), tag, key=text)

    def share(bar: TimeBar) -> TableCell:
        style: Style = "warn" if bar.key == time.bound else ""
        return TableCell() if bar.along else bar_cell(bar.seconds / longest, style)

    def number(bar: TimeBar, text: str) -> TableCell:
        # FLOP and bytes have no common order but that of their times.
        return join_cell(Span(text, "quiet" if bar.along else ""), key=bar.seconds)

    parts = " + ".join(
        f"{in_seconds(s)} {words.shares[each]}"
        for each, s in time.shares
        if s >= 0.01 * time.seconds
    )
    return Section(
        id="time",
        title="Time",
        note="of one execution on each device; each resource alone, and the schedule",
        summary=join_cell(f"{_time_summary(report)}."),
        columns=(
            Column("what", name),
            Column("share", share),
            Column(">takes", lambda bar: number(bar, in_seconds(bar.seconds))),
            Column(">amount", lambda bar: number(bar, bar.amount)),
            Column("work", "words", "quiet"),
            Column("rate", "rate", ""),
        ),
        rows=bars,
        printed=">takes | ={share} | for={what} | >amount |  ={rate}",
        row_name=lambda bar: f"{bar.key} {bar.along}",
        is_marked=lambda bar: bar.key == time.bound and not bar.along,
        most=len(bars),
        rest=[
            *[f"The schedule: {parts}."] * bool(parts),
            *_error_notes(time),
            *_uncounted_work(time),
        ],
    )


def _roofline(report: PreflightFields) -> Section[Slope]:
    time, words = report.time, words_of(report.topology)
    roofline = read_roofline(time, report.topology)
    section = Section[Slope]("roofline", "Roofline", view="page", is_kept=True)
    if roofline is None:
        lead = "The program does no arithmetic: there is nothing to plot."
        return replace(section, summary=join_cell(lead))
    share = in_percent(roofline.reached / roofline.roof)
    lead = (
        f"{in_thousands(roofline.reached)}FLOP/s on each device, {share} of the "
        f"{in_thousands(roofline.roof)}FLOP/s that its {words.shares['matrix']} do."
    )

    return replace(
        section,
        summary=join_cell(lead),
        columns=(
            Column[Slope]("what", lambda slope: words.resources[slope.name].short, ""),
            Column[Slope](">FLOP per byte", roofline.intensity, in_thousands),
            Column[Slope](">turns at", lambda slope: roofline.roof / slope.bandwidth, in_thousands),
            Column[Slope](">bandwidth", "bandwidth", lambda rate: f"{in_thousands(rate)}B/s"),
        ),
        rows=roofline.slopes,
        row_name=lambda slope: slope.name,
        is_marked=lambda slope: slope.name == time.bound,
        figure=RooflinePlot(roofline, time, words.resources, lead),
    )


def _lines(report: PreflightFields) -> Section[LineTime]:
    time, shares = report.time, words_of(report.topology).shares
    exposed, whole = sum(each.exposed_seconds for each in time.lines), time.seconds or 1.0
    others = time.other_lines_seconds
    bound_tip = "Unit that it uses or waits for most of the time"
    exposed_tip = "Time for which the cores wait for a network, the host or a copy"
    lead = f"{in_seconds(time.seconds)} by operation, each with 0.1 % or more of the step."
    if exposed:
        lead += f" The cores wait {in_seconds(exposed)} for networks, the host and copies."
    if not time.lines:
        lead = "The report has no times by source line."
    return Section(
        id="lines",
        title="Time by source line",
        note="of the schedule; exposed: what the cores wait for",
        summary=join_cell(lead),
        columns=(
            Column("line", "source", "line"),
            Column("operation", lambda each: operation_cell(each.op_name)),
            Column("what", "kind", "kind"),
            Column("bound by", lambda each: shares[each.bound], "", bound_tip),
            Column(">runs", "runs", "{:,} ×".format, "How often it runs in one step"),
            Column(">takes", "seconds", "seconds", "In one step, all runs together"),
            Column(">share", lambda each: each.seconds / whole, "part", "Of the schedule"),
            Column(">exposed", lambda each: each.exposed_seconds or None, "seconds", exposed_tip),
        ),
        rows=time.lines,
        printed=">takes | >share | >runs | what | bound by | >exposed | of={line: }{operation}",
        light_key=make_light_key(time),
        filters={"kind": lambda each: [each.kind], "bound": lambda each: [shares[each.bound]]},
        rest=[f"Shorter ones take {in_seconds(others)} ({others / whole:.1%})."] * bool(others),
        view="all" if time.lines else "page",
        is_kept=not time.lines,
    )


def _modules(time: TimeEstimate) -> Iterator[Section[None]]:
    names = [each.op_name or each.kind for each in time.lines]
    others = "shorter operations", time.other_lines_seconds
    amounts = [*zip(names, [each.seconds for each in time.lines], strict=True), others]
    yield modules_section("time-by-module", "Time by module", amounts, in_seconds, "a step")
    used = [each.hbm_bytes for each in time.lines]
    # Reports of earlier versions have no bytes.
    others = "shorter operations", (time.hbm_bytes - sum(used)) * any(used)
    amounts = [*zip(names, used, strict=True), others]
    title = "HBM read and written by module"
    yield modules_section("hbm-by-module", title, amounts, in_bytes, "a step")


def _spill_remedy(spill: SpillReport) -> str:
    """Return how to keep attention scores in VMEM."""
    return (
        f"the scores of {spill.block:,} queries and keys stay in VMEM: attention_block = "
        f"{spill.block} in [model], or a kernel such as splash attention"
    )


def _spills(spills: Sequence[SpillReport]) -> Section[SpillReport]:
    vmem = in_bytes(spills[0].vmem_bytes) if spills else ""
    return Section(
        id="spills",
        title="VMEM spill",
        note=f"attention scores that pass through HBM; VMEM has {vmem}",
        columns=(
            Column(">bytes", "device_bytes", "bytes"),
            Column(">runs", "runs", "{:,} ×".format),
            Column("type", "type", "code"),
            Column("operation", lambda spill: operation_cell(spill.op_name)),
            Column("line", "source", "line"),
            Column("remedy", _spill_remedy),
        ),
        rows=spills,
        printed=">bytes | >runs | type | of={line: }{operation} | remedy",
        severity="costly",
    )


def _timeline(report: PreflightFields) -> Section[None]:
    figure, time = draw_timelines({"": report}), report.time
    lead = "The report has no schedule."
    if figure is not None and time.timeline is not None:
        lead = f"The schedule of one device. {_FOLDED}"
        if time.timeline.left_out:
            lead += f" {time.timeline.left_out:,} short operations are left out."
    return replace(_TIMELINE, summary=join_cell(lead), figure=figure, is_kept=True)


def draw_both_timelines(old: PreflightFields, new: PreflightFields) -> Section[None]:
    """Return the timelines of two reports on one scale of time; nothing without a schedule."""
    figure = draw_timelines({"before": old, "after": new})
    if figure is None:
        return _TIMELINE
    times = f"{step_time_text(old.time)} before and {step_time_text(new.time)} after"
    lead = f"The schedules of one device on one scale: {times}. {_FOLDED}"
    return replace(_TIMELINE, title="Both timelines", summary=join_cell(lead), figure=figure)


_FOLDED = "Each loop is drawn as one iteration, with its count above it."
_TIMELINE = Section[None](id="timeline", title="Timeline of a step", view="page")


def _mesh(report: PreflightFields) -> Section[AxisReport]:
    words, drawing = words_of(report.topology), device_positions(report.topology, report.mesh)
    shown, rest = fold_axes(report.mesh, lambda axis: axis.size)

    def traffic(axis: AxisReport) -> tuple[int, float]:
        along = [t for t in report.time.traffic if axis.name in t.along.split(", ")]
        return sum(t.sent_bytes for t in along), sum(t.seconds for t in along)

    def ring(axis: AxisReport) -> str:
        return "closed" if is_visible_ring(axis) else "open" if axis.size > 1 else ""

    return Section(
        id="mesh",
        title=f"Mesh on the {words.layout}",
        summary=join_cell(torus_lead(report.topology)),
        columns=(
            Column("mesh axis", "name"),
            Column(">size", "size", "number"),
            Column("lies along", lies_along, ""),
            Column("ring", ring, ""),
            Column(">sent along it", lambda axis: traffic(axis)[0], "bytes"),
            Column(">takes", lambda axis: traffic(axis)[1], "seconds"),
        ),
        rows=shown,
        rest=[rest.removeprefix(" and ")] * bool(rest),
        figure=drawing,
        view="page",
    )


_ADVICE_STYLES: Mapping[str, Style] = {
    "helps": "good",
    "no help": "quiet",
    "out of memory": "bad",
    "not tried": "quiet",
}
_ADVICE = Section[AdviceReport](
    id="suggestions",
    title="Suggestions",
    note="shardings against what is not required, tried for these devices: change of the estimated "
    "step, and of a device's memory",
    columns=(
        Column(">step", "seconds", signed(in_seconds)),
        Column(">memory", "memory_bytes", signed(in_bytes)),
        Column("outcome", lambda a: join_cell(Span(a.outcome, _ADVICE_STYLES.get(a.outcome, "")))),
        Column("change", "text"),
    ),
)


def advice_section(advice: Sequence[AdviceReport]) -> Section[AdviceReport]:
    """Return the table of suggestions, with how to try those that were not."""
    untried = sum(each.outcome == "not tried" for each in advice)
    text = f"{counted(untried, 'suggestion')} not tried, as each takes a compilation: make "
    text += "the change, and compare both reports (--compare)."
    return replace(_ADVICE, rows=advice, rest=[text] * bool(untried))


def _replicated(report: PreflightFields) -> Section:
    reused = {v.path for v in report.outputs if v.aliased}
    above = in_bytes(report.replicated_above)
    section = values_section("replicated", "Fully replicated", report.replicated)

    def merge(values: Sequence) -> list:
        return merge_values([v for v in values if v.path not in reused])

    return replace(
        section,
        note=f"arguments and results of {above} or more",
        summary="" if report.replicated else join_cell("None."),
        printed=section.printed.replace(" | >whole", ""),
        whole_paths="",
        merged=merge,
        is_kept=False,
    )


def _environment(report: PreflightFields) -> Iterator[Section]:
    """Yield what is known of devices, compiler and model; a terminal has it in a line."""
    topology, versions, throughput = report.topology, report.versions, report.throughput
    networks, is_tpu = words_of(topology).networks, topology.links == "ici"
    hbm = f"{in_bytes(topology.hbm_bytes)}, {in_bytes(topology.available_bytes)} available"
    pairs = [
        ("generation" if is_tpu else "model", topology.generation),
        *(
            (f"peak {dtype}", f"{in_thousands(flops)}{'OP' if 'int' in dtype else 'FLOP'}/s")
            for dtype, flops in topology.peak_flops
        ),
        ("HBM", hbm),
        ("HBM bandwidth", f"{in_thousands(topology.hbm_bandwidth)}B/s"),
        (
            "one ICI link" if is_tpu else networks["ici"],
            f"{in_thousands(topology.ici_bandwidth)}B/s in one direction",
        ),
        (f"share of {networks['dcn']}", f"{in_thousands(topology.dcn_bandwidth)}B/s"),
    ]
    yield pairs_section("device", "Each device", pairs, is_narrow=True)
    names = ("xlashard", "jax", "jaxlib", "libtpu", "cuda_plugin", "runtime")
    pairs = [(n.replace("_", " "), v) for n in names if (v := getattr(versions, n))]
    pairs += [
        ("partitioner", report.partitioner),
        ("compile time", in_seconds(report.compile_seconds)),
    ]
    yield pairs_section("versions", "Compiled with", pairs, is_narrow=True)
    if throughput is not None:
        workload = throughput.workload
        pairs = [("parameters", in_thousands(workload.parameters))]
        if workload.active_parameters != workload.parameters:
            pairs.append(("active for a token", in_thousands(workload.active_parameters)))
        pairs += [
            ("tokens in a step", f"{workload.tokens:,}"),
            ("model FLOP in a step", f"{in_thousands(workload.model_flops)}FLOP"),
        ]
        yield pairs_section("model", "Model", pairs, is_narrow=True)
    flags = pairs_section("flags", "Compiler flags", versions.flags)
    lead = "" if versions.flags else "No compiler flags were set."
    yield replace(flags, summary=lead, is_kept=True)
    compiler = f"libtpu {versions.libtpu}"
    if versions.cuda_plugin:
        compiler = f"JAX's CUDA plugin {versions.cuda_plugin}"
    verb = "estimated" if report.is_estimate else "compiled"
    spent = f"in {in_seconds(report.compile_seconds)}" if report.compile_seconds else "before"
    text = f"{verb} {spent} by {compiler}, jax {versions.jax}, jaxlib {versions.jaxlib}, "
    lines = [
        f"{text}xlashard {versions.xlashard}",
        *(f"{where}: {flag}" for where, flag in versions.flags),
    ]
    yield Section("compiler", "", rest=lines, view="terminal", is_kept=True)
