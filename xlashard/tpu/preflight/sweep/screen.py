"""A sweep as a person reads it: the ranking, and why the other meshes are not in it."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from xlashard.errors import counted
from xlashard.pjit.report.tables import Page, head, section, table
from xlashard.tpu.preflight.parts import PriceReport
from xlashard.tpu.preflight.sweep.fields import SweepFields, SweepResult
from xlashard.tpu.preflight.words import BOUNDS, NETWORKS, money_text
from xlashard.wording import in_amount, in_bytes, in_seconds

_SHOWN = 12
_REASON = 160
_TITLES = {
    "out of memory": "Out of memory",
    "impossible": "Impossible",
    "failed": "Failed",
}


class SweepText:
    """A sweep for rich to print.

    Args:
        report: What it found.
        full: Show every mesh and whole reasons.
        more: What to write to see all of that.
    """

    def __init__(
        self, report: SweepFields, *, full: bool, more: str = "report.print(all=True)"
    ) -> None:
        self._report = report
        self._full = full
        self._more = more

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, page = self._report, Page(options.max_width, self._full, self._more)
        yield _head(report)
        fitting = [r for r in report.results if r.outcome == "fits"]
        if fitting:
            yield _ranking(report, fitting, page)
        for outcome, title in _TITLES.items():
            found = [r for r in report.results if r.outcome == outcome]
            if found:
                yield _left_out(title, found, page)
        if report.without_mesh:
            rows = [(t.where, Text(t.reason, style="dim")) for t in report.without_mesh]
            yield section("Without a mesh", "", table(["topology", "why"], rows))


def _head(report: SweepFields) -> RenderableType:
    counts = Counter(r.outcome for r in report.results)
    said = [f"{counts[o]} {o}" for o in ("fits", *_TITLES) if counts[o]]
    topologies = list(dict.fromkeys(r.where for r in report.results))
    best = report.best
    facts: list[tuple[str, str | Text]] = [
        ("meshes", f"{len(report.results)}: {', '.join(said).replace('fits', 'fit')}")
    ]
    if best is not None and best.facts is not None:
        step = in_seconds(best.facts.seconds)
        facts.insert(0, ("best", f"{best.axes} on {best.where}, {step}"))
    if report.taken_over:
        facts.append(("known", f"{counted(report.taken_over, 'result')} from an earlier run"))
    facts.append(("reports", report.folder))
    return head(report.title, topologies, facts)


def _ranking(report: SweepFields, found: Sequence[SweepResult], page: Page) -> RenderableType:
    shown = found if page.is_full else found[:_SHOWN]
    trains = any(r.facts is not None and r.facts.tokens_per_second is not None for r in shown)
    prices = [report.step_price(r) for r in shown]
    priced = any(price is not None for price in prices)
    columns = ["", "topology", "mesh", ">step"]
    columns += [">tokens/s", ">MFU"] if trains else []
    columns += [">HBM", "waits for"] + ([">price"] if priced else [])
    rows = [_row(i, r, trains) for i, r in enumerate(shown, 1)]
    if priced:
        rows = [[*row, _price(price)] for row, price in zip(rows, prices, strict=True)]
    rest = page.left(len(found) - len(shown), "more that fit")
    return section("Fastest first", "by the estimated time of a step", table(columns, rows), rest)


def _row(number: int, result: SweepResult, trains: bool) -> list[RenderableType]:
    facts = result.facts
    assert facts is not None
    row: list[RenderableType] = [
        Text(f"{number}.", style="dim"),
        result.where,
        Text(result.axes, style="bold" if number == 1 else ""),
        in_seconds(facts.seconds),
    ]
    if trains:
        speed, share = facts.tokens_per_second, facts.utilisation
        row.append("" if speed is None else in_amount(speed))
        row.append("" if share is None else f"{share:.1%}")
    return [
        *row,
        f"{facts.total_bytes / facts.available_bytes:.0%}",
        NETWORKS.get(facts.bound) or BOUNDS[facts.bound],
    ]


def _price(found: PriceReport | None) -> str:
    return "" if found is None else f"{money_text(found.step)} {found.currency}".strip()


def _left_out(title: str, found: Sequence[SweepResult], page: Page) -> RenderableType:
    rows = [(r.where, r.axes, Text(_reason(r, page), style="dim")) for r in page.rows(found)]
    rest = page.left(len(found) - len(rows))
    return section(title, "", table(["topology", "mesh", "why"], rows), rest)


def _reason(result: SweepResult, page: Page) -> str:
    facts = result.facts
    if result.outcome == "out of memory" and facts is not None:
        return f"{in_bytes(facts.total_bytes)} of {in_bytes(facts.available_bytes)}"
    line = " ".join(result.reason.split())
    return line if page.is_full or len(line) <= _REASON else f"{line[: _REASON - 1]}…"
