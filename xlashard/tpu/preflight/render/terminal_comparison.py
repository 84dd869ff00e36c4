"""Terminal output of a comparison of two reports, and of several reports side by side."""

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from xlashard.pjit.report.tables import WIDE, Page, section, table
from xlashard.tpu.preflight.render.report_text import BOUNDS, FORMATTERS, price_text, topology_text
from xlashard.tpu.preflight.report.preflight_model import (
    AmountChange,
    ComparisonFields,
    FactChange,
    PreflightFields,
    UsageChange,
)
from xlashard.wording import in_amount, in_bytes, in_seconds

_BETTER_IF_MORE = ("memory to spare", "tokens per second", "model FLOP utilisation")
_COLOURS = {"added": "red", "grown": "red", "removed": "green", "shrunk": "green"}


def comparison_sections(found: ComparisonFields, page: Page) -> Iterator[RenderableType]:
    """Yield the sections of a printed comparison."""
    yield Text.assemble((found.old, "bold"), "  →  ", (found.new, "bold"))
    parts = [
        _facts("Changed", "", found.facts, page),
        _amounts(found.amounts, page),
        _uses("Memory by leaf", "of one device", found.memory, page),
        _uses("Collectives", "what each device sends", found.traffic, page),
        _facts("Shardings", "", found.shardings, page),
        _facts("Donations", "", found.donations, page),
    ]
    shown = [part for part in parts if part is not None]
    yield from shown or [Text("\nnothing changed", style="dim")]


def _facts(title: str, note: str, found: Sequence[FactChange], page: Page) -> RenderableType | None:
    if not found:
        return None
    rows = [
        (page.path(f.name) if "[" in f.name else f.name, f.old or "–", "→", f.new or "–")
        for f in page.rows(found)
    ]
    rest = page.left(len(found) - len(rows))
    return section(title, note, table(("", "", "", ""), rows), rest)


def _amounts(found: Sequence[AmountChange], page: Page) -> RenderableType | None:
    shown = [a for a in found if page.is_full or _differs(a)]
    if not shown:
        return None
    rows = [(a.name, _amount(a, a.old), "→", _amount(a, a.new), _by(a)) for a in shown]
    return section("Numbers", "of one device", table(("", ">", "", ">", ">"), rows))


def _differs(a: AmountChange) -> bool:
    """Return whether the printed amounts differ, ignoring the compile time."""
    if a.name == "time to compile":
        return False
    return _amount(a, a.old) != _amount(a, a.new)


def _amount(a: AmountChange, value: float | None) -> str:
    if value is None:
        return "–"
    text = FORMATTERS[a.unit]
    return f"-{text(-value)}" if value < 0 else text(value)


def _by(a: AmountChange) -> Text:
    ratio = a.ratio
    if ratio is None or ratio <= 0:
        return Text()
    text = f"{ratio - 1:+.1%}"
    if ratio >= 2:
        text = f"×{ratio:.1f}" if ratio < 10 else f"×{ratio:,.0f}"
    is_worse = (ratio > 1) != (a.name in _BETTER_IF_MORE)
    return Text(text, "" if ratio == 1 else "red" if is_worse else "green")


def _uses(title: str, note: str, found: Sequence[UsageChange], page: Page) -> RenderableType | None:
    if not found:
        return None
    rows: list[Sequence[RenderableType]] = []
    for u in page.rows(found):
        what = Text.assemble(u.what, (f"  {u.where}" if u.where else "", "dim"))
        row: list[RenderableType] = [
            Text(u.change, _COLOURS[u.change]),
            in_bytes(u.old_bytes) if u.change != "added" else "–",
            "→",
            in_bytes(u.new_bytes) if u.change != "removed" else "–",
        ]
        if page.width >= WIDE:
            row.append(
                f"{in_seconds(u.old_seconds)} → {in_seconds(u.new_seconds)}"
                if u.old_seconds or u.new_seconds
                else ""
            )
        rows.append((*row, what))
    columns = ["", ">", "", ">", *([""] if page.width >= WIDE else []), ""]
    rest = page.left(len(found) - len(rows))
    return section(title, note, table(columns, rows), rest)


def _times(u: UsageChange) -> str:
    if not (u.old_seconds or u.new_seconds):
        return ""
    return f"{in_seconds(u.old_seconds)} → {in_seconds(u.new_seconds)}"


class SummaryText:
    """Rich renderable of several reports as one table.

    Args:
        reports: Reports in row order.
    """

    def __init__(self, reports: Sequence[PreflightFields]) -> None:
        self._reports = reports

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        reports = self._reports
        columns = {
            "program": [r.title or r.name for r in reports],
            "topology": [topology_text(r.topology) for r in reports],
            "mesh": ["×".join(f"{axis.name}={axis.size}" for axis in r.mesh) for r in reports],
            "fits": [_fits(r) for r in reports],
            ">takes": [in_seconds(r.time.seconds) for r in reports],
            "bound by": [BOUNDS[r.time.bound] for r in reports],
            ">tokens/s": [_tokens(r) for r in reports],
            ">MFU": [_utilisation(r) for r in reports],
            ">a step": [_step(r) for r in reports],
        }
        if options.max_width < WIDE:
            for name in ("mesh", "bound by"):
                del columns[name]
        shown = {name: column for name, column in columns.items() if any(map(str, column))}
        rows = list(zip(*shown.values(), strict=True))
        yield section(f"{len(reports)} reports", "", table(list(shown), rows))


def _fits(report: PreflightFields) -> Text:
    spare = report.memory.spare_bytes
    if report.outcome == "fits":
        return Text(f"{in_bytes(spare)} to spare", "green")
    return Text(f"lacks {in_bytes(-spare)}" if spare < 0 else "too large", "red")


def _tokens(report: PreflightFields) -> str:
    return "" if report.throughput is None else in_amount(report.throughput.tokens_per_second)


def _utilisation(report: PreflightFields) -> str:
    return "" if report.throughput is None else f"{report.throughput.utilisation:.1%}"


def _step(report: PreflightFields) -> str:
    if report.price is None:
        return ""
    return f"{price_text(report.price.step)} {report.price.currency}".strip()
