"""How arguments and results are dealt out, what is donated, and what is held more than once."""

from collections.abc import Sequence

from xlashard.pjit.report.parts import DonationReport, ReplicationReport, ValueReport
from xlashard.pjit.report.words import decided, line_text, short_type
from xlashard.tpu.preflight.fields import PreflightFields
from xlashard.tpu.preflight.page.markup import Html, join, tag, user
from xlashard.tpu.preflight.page.tables import Cell, Column, Row, filters, table
from xlashard.wording import in_bytes

_VALUES = (
    Column("type"),
    Column("sharding"),
    Column("copies", True, "How many devices hold each part"),
    Column("on a device", True),
    Column("whole", True),
    Column("by", title="Who decided how it lies"),
)
_DONATIONS = (
    Column("argument"),
    Column("on a device", True),
    Column("donated"),
    Column("its memory goes to"),
)
_REPLICATIONS = (
    Column("value"),
    Column("sharding"),
    Column("wasted", True, "Bytes on a device more than if its axes cut it"),
    Column("why"),
    Column("line"),
)


def shardings_section(report: PreflightFields) -> Html:
    """Arguments and results, each with its sharding."""
    return join(
        _values("argument", report.inputs, is_open=True),
        _values("result", report.outputs, is_open=False),
    )


def held_section(report: PreflightFields) -> Html:
    """Donations, values that every device holds whole, and those held more often than said."""
    return join(
        _donations(report.donations),
        _replicated(report),
        _replications(report.replications),
    )


def _values(name: str, values: Sequence[ValueReport], *, is_open: bool) -> Html:
    columns = (Column(name), *_VALUES)
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


def _value(value: ValueReport) -> Row:
    spec = value.spec if value.used else "not used"
    kind = f" in {value.memory_kind}" if value.memory_kind else ""
    return Row(
        (
            Cell(user(value.path, "code"), value.path),
            Cell(user(short_type(value), "code", whole=True), value.type),
            Cell(join(user(spec, "code"), kind), spec),
            Cell(f"{value.copies:,}", value.copies),
            Cell(in_bytes(value.device_bytes), value.device_bytes),
            Cell(in_bytes(value.nbytes), value.nbytes),
            Cell(decided(value), value.decided_by),
        ),
        search=f"{value.path} {short_type(value)} {value.type} {spec} {decided(value)}",
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


def _donation(donation: DonationReport) -> Row:
    state = "yes" if donation.is_reused else "in vain" if donation.donated else "could be"
    shown = state if state == "yes" else tag("span", state, class_="warns")
    goes = user(donation.result, "code") if donation.result else donation.reason
    return Row(
        (
            Cell(user(donation.path, "code"), donation.path),
            Cell(in_bytes(donation.device_bytes), donation.device_bytes),
            Cell(shown, state),
            Cell(goes, donation.result or donation.reason),
        ),
        search=f"{donation.path} {state} {donation.result} {donation.reason}",
    )


def _replicated(report: PreflightFields) -> Html:
    above = in_bytes(report.replicated_above)
    found = report.replicated
    if not found:
        words = f"nothing of {above} or more"
        return tag(
            "div", tag("b", "Held whole by every device"), " ", tag("span", words, class_="note")
        )
    total = in_bytes(sum(v.device_bytes for v in found))
    words = f"{len(found):,} of {above} or more, {total} on each device"
    made = table("replicated values", (Column("value"), *_VALUES), [_value(v) for v in found])
    title = tag("b", "Held whole by every device")
    return tag("details", tag("summary", title, " ", tag("span", words, class_="note")), made)


def _replications(replications: Sequence[ReplicationReport]) -> Html | None:
    if not replications:
        return None
    wasted = in_bytes(sum(r.wasted_bytes for r in replications))
    words = f"{len(replications):,}, {wasted} on each device that nobody asked for"
    rows = [_replication(r) for r in replications]
    title = tag("b", "Replicated silently")
    return tag(
        "details",
        tag("summary", title, " ", tag("span", words, class_="warns")),
        table("silent replications", _REPLICATIONS, rows),
        open=True,
    )


def _replication(replication: ReplicationReport) -> Row:
    axes = " and ".join(replication.axes)
    dims = " and ".join(map(str, replication.dims))
    plural = "s" if len(replication.dims) > 1 else ""
    why = {
        "result": f"nothing was said of it, and it came out whole along {axes}",
        "open dimension": f"the partitioner left dimension{plural} {dims} whole",
        "constraint": f"the constraint closes dimension{plural} {dims}: gathered along {axes}",
    }[replication.kind]
    source = replication.source
    line = "" if source is None else line_text(source)
    title = None if source is None else f"{source.file}:{source.line}"
    return Row(
        (
            Cell(user(replication.path, "code"), replication.path),
            Cell(user(replication.spec, "code"), replication.spec),
            Cell(in_bytes(replication.wasted_bytes), replication.wasted_bytes),
            Cell(user(why), why),
            Cell(
                user(line, "code", whole=True, class_="line", title=title) if line else None, line
            ),
        ),
        search=f"{replication.path} {replication.spec} {why} {line}",
    )
