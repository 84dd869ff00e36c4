"""HTML tables of collectives, shardings, donations and replication."""

from collections.abc import Iterable, Sequence

from xlashard.pjit.report.model import (
    CollectiveReport,
    DonationReport,
    ReplicationReport,
    SourceLine,
    ValueReport,
)
from xlashard.pjit.report.tables import (
    decided_text,
    groups_text,
    line_text,
    operation_text,
    short_type,
    types_text,
)
from xlashard.tpu.preflight.render.html.markup import (
    Child,
    Html,
    TableCell,
    TableColumn,
    TableRow,
    filters,
    join,
    table,
    tag,
    user_text,
)
from xlashard.tpu.preflight.render.report_text import ORIGINS
from xlashard.tpu.preflight.report.preflight_model import PreflightFields, TrafficReport
from xlashard.wording import in_bytes, in_seconds

_VALUES = (
    TableColumn("type"),
    TableColumn("sharding"),
    TableColumn("copies", True, "How many devices hold each part"),
    TableColumn("on a device", True),
    TableColumn("whole", True),
    TableColumn("by", title="Component that chose the sharding"),
)
_DONATIONS = (
    TableColumn("argument"),
    TableColumn("on a device", True),
    TableColumn("donated"),
    TableColumn("its memory goes to"),
)
_REPLICATIONS = (
    TableColumn("value"),
    TableColumn("sharding"),
    TableColumn("wasted", True, "Extra bytes on a device, compared with sharding over its axes"),
    TableColumn("why"),
    TableColumn("line"),
)


def shardings_section(report: PreflightFields) -> Html:
    """Return the tables of arguments and results with their shardings."""
    return join(
        _values("argument", report.inputs, is_open=True),
        _values("result", report.outputs, is_open=False),
    )


def donations_and_replication(report: PreflightFields) -> Html:
    """Return the tables of donations, fully replicated values, and unintended replication."""
    return join(
        _donations(report.donations),
        _replicated(report),
        _replications(report.replications),
    )


def _values(name: str, values: Sequence[ValueReport], *, is_open: bool) -> Html:
    columns = (TableColumn(name), *_VALUES)
    rows = [_value(v) for v in values]
    total = in_bytes(sum(v.device_bytes for v in values))
    whole = in_bytes(sum(v.nbytes for v in values))
    words = f"{len(values):,}, {total} on each device, {whole} in all"
    search = filters(f"{name}s", {}, "Filter by path, type, sharding …")
    return tag(
        "details",
        tag("summary", tag("b", f"{name.capitalize()}s"), " ", tag("span", words, class_="note")),
        tag("div", search, table(f"{name}s", columns, rows), class_="finds"),
        open=is_open,
    )


def _value(value: ValueReport) -> TableRow:
    spec = value.spec if value.used else "not used"
    kind = f" in {value.memory_kind}" if value.memory_kind else ""
    return TableRow(
        (
            TableCell(user_text(value.path, "code"), value.path),
            TableCell(user_text(short_type(value), "code", whole=True), value.type),
            TableCell(join(user_text(spec, "code"), kind), spec),
            TableCell(f"{value.copies:,}", value.copies),
            TableCell(in_bytes(value.device_bytes), value.device_bytes),
            TableCell(in_bytes(value.nbytes), value.nbytes),
            TableCell(decided_text(value), value.decided_by),
        ),
        search=f"{value.path} {short_type(value)} {value.type} {spec} {decided_text(value)}",
    )


def _donations(donations: Sequence[DonationReport]) -> Html:
    reused = [d for d in donations if d.is_reused]
    wasted = [d for d in donations if d.donated and not d.result]
    could = [d for d in donations if not d.donated]
    words = [f"{len(reused):,} reused, {in_bytes(sum(d.device_bytes for d in reused))}"]
    if wasted:
        words.append(f"{len(wasted):,} in vain")
    if could:
        words.append(f"{len(could):,} could be, {in_bytes(sum(d.device_bytes for d in could))}")
    summary = tag(
        "summary",
        tag("b", "Donated"),
        " ",
        tag("span", ", ".join(words) if donations else "nothing", class_="note"),
    )
    if not donations:
        return tag("div", tag("b", "Donated"), " ", tag("span", "nothing", class_="note"))
    rows = [_donation(d) for d in (*wasted, *could, *reused)]
    made = table("donations", _DONATIONS, rows)
    search = filters("donations", {}, "Filter by argument or result …")
    inside = tag("div", search, made, class_="finds")
    return tag("details", summary, inside, open=bool(wasted or could))


def _donation(donation: DonationReport) -> TableRow:
    state = "yes" if donation.is_reused else "in vain" if donation.donated else "could be"
    shown = state if state == "yes" else tag("span", state, class_="warns")
    goes = user_text(donation.result, "code") if donation.result else donation.reason
    return TableRow(
        (
            TableCell(user_text(donation.path, "code"), donation.path),
            TableCell(in_bytes(donation.device_bytes), donation.device_bytes),
            TableCell(shown, state),
            TableCell(goes, donation.result or donation.reason),
        ),
        search=f"{donation.path} {state} {donation.result} {donation.reason}",
    )


def _replicated(report: PreflightFields) -> Html:
    above = in_bytes(report.replicated_above)
    found = report.replicated
    if not found:
        words = f"nothing of {above} or more"
        return tag("div", tag("b", "Fully replicated"), " ", tag("span", words, class_="note"))
    total = in_bytes(sum(v.device_bytes for v in found))
    words = f"{len(found):,} of {above} or more, {total} on each device"
    made = table("replicated values", (TableColumn("value"), *_VALUES), [_value(v) for v in found])
    title = tag("b", "Fully replicated")
    return tag("details", tag("summary", title, " ", tag("span", words, class_="note")), made)


def _replications(replications: Sequence[ReplicationReport]) -> Html | None:
    if not replications:
        return None
    wasted = in_bytes(sum(r.wasted_bytes for r in replications))
    words = f"{len(replications):,}, {wasted} on each device beyond the specification"
    rows = [_replication(r) for r in replications]
    title = tag("b", "Replicated silently")
    return tag(
        "details",
        tag("summary", title, " ", tag("span", words, class_="warns")),
        table("silent replications", _REPLICATIONS, rows),
        open=True,
    )


def _replication(replication: ReplicationReport) -> TableRow:
    axes = " and ".join(replication.axes)
    dims = " and ".join(map(str, replication.dims))
    plural = "s" if len(replication.dims) > 1 else ""
    why = {
        "result": f"unspecified, and replicated along {axes}",
        "open dimension": f"the partitioner did not shard dimension{plural} {dims}",
        "constraint": f"the constraint unshards dimension{plural} {dims}: gathered along {axes}",
    }[replication.kind]
    source = replication.source
    line = "" if source is None else line_text(source)
    title = None if source is None else f"{source.file}:{source.line}"
    return TableRow(
        (
            TableCell(user_text(replication.path, "code"), replication.path),
            TableCell(user_text(replication.spec, "code"), replication.spec),
            TableCell(in_bytes(replication.wasted_bytes), replication.wasted_bytes),
            TableCell(user_text(why), why),
            TableCell(
                user_text(line, "code", whole=True, class_="line", title=title) if line else None,
                line,
            ),
        ),
        search=f"{replication.path} {replication.spec} {why} {line}",
    )


_COLUMNS = (
    TableColumn("what"),
    TableColumn("along"),
    TableColumn("of"),
    TableColumn("times", True, "How often it runs in one step"),
    TableColumn("sent", True, "Bytes that a device sends in one step"),
    TableColumn("takes", True, "At the speed of the links, all runs together"),
    TableColumn("cause"),
    TableColumn("line"),
)
ASKED, UNASKED = "required", "not required"


def collectives_section(traffic: Sequence[TrafficReport]) -> Html:
    """Return the table of collectives with its filters."""
    if not traffic:
        return tag("p", "Nothing is sent between devices.", class_="lead")
    kinds = _distinct(t.collective.kind for t in traffic)
    axes = _distinct(axis for t in traffic for axis in _axes(t.collective))
    choices: dict[str, list[str]] = {"kind": kinds, "axis": axes, "reason": [ASKED, UNASKED]}
    if len({t.network for t in traffic}) > 1:
        choices["network"] = ["ICI", "DCN"]
    sums = (
        ("sent", "bytes", [t.collective.sent_bytes for t in traffic]),
        ("takes", "seconds", [t.seconds for t in traffic]),
    )
    return join(
        _lead(traffic),
        tag(
            "div",
            filters("collectives", choices, "Filter by operation, line, type …"),
            table("Collectives", _COLUMNS, [_row(t) for t in traffic], sums),
            class_="finds collectives",
        ),
    )


def _lead(traffic: Sequence[TrafficReport]) -> Html:
    unasked = [t for t in traffic if not t.requested]
    count = sum(t.collective.count for t in traffic)
    sent = in_bytes(sum(t.collective.sent_bytes for t in traffic))
    parts: list[Child] = [f"{count:,} collectives send {sent} from each device in a step. "]
    if unasked:
        seconds = in_seconds(sum(t.seconds for t in unasked))
        number = sum(t.collective.count for t in unasked)
        words = f"{number:,} of them, {seconds}, are not required"
        show = tag(
            "button", "show only these", type="button", class_="shows needs-script", value=UNASKED
        )
        parts += [tag("b", words, class_="warns"), "; each row has a suggestion. ", show]
    else:
        parts.append("The program requires all of them.")
    return tag("p", parts, class_="lead")


def _row(traffic: TrafficReport) -> TableRow:
    collective = traffic.collective
    kind, types = collective.kind, types_text(collective)
    why = ORIGINS[traffic.origin]
    operation, line = _cause(collective)
    seconds = traffic.seconds
    return TableRow(
        (
            TableCell(join(tag("b", kind), _marks(traffic), _overlap(collective)), kind),
            TableCell(user_text(groups_text(collective)), collective.along),
            TableCell(join(user_text(types, "code"), _subject(collective)), types),
            TableCell(_times(collective), collective.times),
            TableCell(in_bytes(collective.sent_bytes), collective.sent_bytes),
            TableCell(in_seconds(seconds), seconds),
            TableCell(_why(traffic), why),
            TableCell(
                None if line is None else _source(line), "" if line is None else line_text(line)
            ),
        ),
        search=" ".join(
            (
                f"{kind} {collective.along} {types} {operation} {collective.argument} {why}",
                "" if line is None else f"{line.file}:{line.line} {line.function}",
                traffic.suggestion,
            )
        ),
        keys={
            "kind": kind,
            "axis": "|".join(_axes(collective)),
            "reason": ASKED if traffic.requested else UNASKED,
            "network": traffic.network.upper(),
        },
        kind="" if traffic.requested else "unasked",
    )


def _marks(traffic: TrafficReport) -> list[Child]:
    collective = traffic.collective
    marks = {
        "DCN": traffic.network == "dcn",
        "in a branch": collective.conditional,
    }
    return [[" ", tag("span", word, class_="tag")] for word, holds in marks.items() if holds]


def _overlap(collective: CollectiveReport) -> Html | None:
    return tag("div", "beside other work", class_="note") if collective.asynchronous else None


def _times(collective: CollectiveReport) -> str:
    return f"{collective.times:,}{'' if collective.times_known else ' or more'}"


def _subject(collective: CollectiveReport) -> Html | None:
    """Return the argument or operation of a collective."""
    name, _ = _cause(collective)
    parts: list[Child] = []
    if collective.argument:
        parts.append(user_text(collective.argument, "code"))
    if name:
        parts.append(user_text(operation_text(name), "span", title=name))
    return tag("div", [[part, " "] for part in parts], class_="note") if parts else None


def _cause(collective: CollectiveReport) -> tuple[str, SourceLine | None]:
    """Return the operation of a collective and its line; for an all-gather its consumer."""
    name, source = collective.op_name, collective.source
    gathers = collective.kind == "all-gather" and not name.endswith("sharding_constraint")
    if collective.needed_by and (gathers or source is None):
        return collective.needed_by, collective.needed_by_source
    return name, source


def _why(traffic: TrafficReport) -> Html:
    why = tag("span", ORIGINS[traffic.origin])
    if traffic.requested:
        return why
    suggestion = tag(
        "div", tag("b", "Instead: "), user_text(traffic.suggestion), class_="suggestion"
    )
    return join(
        tag("span", UNASKED, class_="tag warning"),
        " ",
        why,
        suggestion if traffic.suggestion else None,
    )


def _source(line: SourceLine) -> Html:
    where = f" in {line.function}" if line.function else ""
    return user_text(
        line_text(line), "code", whole=True, class_="line", title=f"{line.file}:{line.line}{where}"
    )


def _axes(collective: CollectiveReport) -> tuple[str, ...]:
    return ("other groups",) if collective.axes is None else collective.axes


def _distinct(words: Iterable[str]) -> list[str]:
    return sorted(set(words))
