"""The collectives: what goes over the wire, why, and what would be rid of what nobody asked for."""

from collections.abc import Iterable, Sequence

from xlashard.pjit.report.parts import CollectiveReport, SourceLine
from xlashard.pjit.report.words import groups_text, line_text, operation_text, types_text
from xlashard.tpu.preflight.page.markup import Child, Html, join, tag, user
from xlashard.tpu.preflight.page.tables import Cell, Column, Row, filters, table
from xlashard.tpu.preflight.parts import TrafficReport
from xlashard.tpu.preflight.words import ORIGINS
from xlashard.wording import in_bytes, in_seconds

_COLUMNS = (
    Column("what"),
    Column("along"),
    Column("of"),
    Column("times", True, "How often it runs in one step"),
    Column("sent", True, "Bytes that a device sends in one step"),
    Column("takes", True, "At the speed of the links, all runs together"),
    Column("asked for by"),
    Column("line"),
)
ASKED, UNASKED = "asked for", "not asked for"


def collectives_section(traffic: Sequence[TrafficReport]) -> Html:
    """The table with its filters."""
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
    unasked = [t for t in traffic if not t.asked_for]
    count = sum(t.collective.count for t in traffic)
    sent = in_bytes(sum(t.collective.sent_bytes for t in traffic))
    parts: list[Child] = [f"{count:,} collectives send {sent} from each device in a step. "]
    if unasked:
        seconds = in_seconds(sum(t.seconds for t in unasked))
        number = sum(t.collective.count for t in unasked)
        words = f"{number:,} of them, {seconds}, nobody asked for"
        show = tag(
            "button", "show only these", type="button", class_="shows needs-script", value=UNASKED
        )
        parts += [tag("b", words, class_="warns"), "; each says what would be rid of it. ", show]
    else:
        parts.append("All of them are asked for.")
    return tag("p", parts, class_="lead")


def _row(traffic: TrafficReport) -> Row:
    collective = traffic.collective
    kind, types = collective.kind, types_text(collective)
    why = ORIGINS[traffic.origin]
    operation, line = _cause(collective)
    seconds = traffic.seconds
    return Row(
        (
            Cell(join(tag("b", kind), _marks(traffic), _overlap(collective)), kind),
            Cell(user(groups_text(collective)), collective.along),
            Cell(join(user(types, "code"), _subject(collective)), types),
            Cell(_times(collective), collective.times),
            Cell(in_bytes(collective.sent_bytes), collective.sent_bytes),
            Cell(in_seconds(seconds), seconds),
            Cell(_why(traffic), why),
            Cell(None if line is None else _source(line), "" if line is None else line_text(line)),
        ),
        search=" ".join(
            (
                f"{kind} {collective.along} {types} {operation} {collective.argument} {why}",
                "" if line is None else f"{line.file}:{line.line} {line.function}",
                traffic.remedy,
            )
        ),
        keys={
            "kind": kind,
            "axis": "|".join(_axes(collective)),
            "reason": ASKED if traffic.asked_for else UNASKED,
            "network": traffic.network.upper(),
        },
        kind="" if traffic.asked_for else "unasked",
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
    """What it is done to: an argument, or the operation."""
    name, _ = _cause(collective)
    parts: list[Child] = []
    if collective.argument:
        parts.append(user(collective.argument, "code"))
    if name:
        parts.append(user(operation_text(name), "span", title=name))
    return tag("div", [[part, " "] for part in parts], class_="note") if parts else None


def _cause(collective: CollectiveReport) -> tuple[str, SourceLine | None]:
    """The operation behind it and its line: for a gather whoever wants it, if known."""
    name, source = collective.op_name, collective.source
    gathers = collective.kind == "all-gather" and not name.endswith("sharding_constraint")
    if collective.needed_by and (gathers or source is None):
        return collective.needed_by, collective.needed_by_source
    return name, source


def _why(traffic: TrafficReport) -> Html:
    why = tag("span", ORIGINS[traffic.origin].removeprefix("nobody: "))
    if traffic.asked_for:
        return why
    remedy = tag("div", tag("b", "Instead: "), user(traffic.remedy), class_="remedy")
    return join(
        tag("span", UNASKED, class_="tag warning"),
        " ",
        why,
        remedy if traffic.remedy else None,
    )


def _source(line: SourceLine) -> Html:
    where = f" in {line.function}" if line.function else ""
    return user(
        line_text(line), "code", whole=True, class_="line", title=f"{line.file}:{line.line}{where}"
    )


def _axes(collective: CollectiveReport) -> tuple[str, ...]:
    return ("other groups",) if collective.axes is None else collective.axes


def _distinct(words: Iterable[str]) -> list[str]:
    return sorted(set(words))
