"""HTML tables of a comparison of two reports."""

from collections.abc import Iterator, Sequence

from xlashard.tpu.preflight.render.formatting import FORMATTERS
from xlashard.tpu.preflight.render.html.markup import (
    Html,
    TableCell,
    TableColumn,
    TableRow,
    join,
    table,
    tag,
    user_text,
)
from xlashard.tpu.preflight.report.change_model import (
    AmountChange,
    ComparisonFields,
    FactChange,
    UsageChange,
)
from xlashard.wording import in_bytes, in_seconds

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
