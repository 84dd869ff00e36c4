"""A sweep as a person reads it: the ranking, and why the other meshes are not in it.

How far a sweep is: a bar, or a line for each mesh where nobody looks at a terminal.

The report of a sweep: a frozen value that prints itself and travels as JSON.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from xlashard.documents import read_text
from xlashard.errors import ArgumentError, counted
from xlashard.pjit.report.kept import KeptReport
from xlashard.pjit.report.records import Record
from xlashard.pjit.report.tables import Page, head, section, table
from xlashard.tpu.preflight.render.formatting import BOUNDS, NETWORKS, price_text
from xlashard.tpu.preflight.report.preflight_model import PriceReport
from xlashard.tpu.preflight.report.preflight_report import PreflightReport
from xlashard.tpu.preflight.report.pricing import describe_price
from xlashard.tpu.preflight.sweep.sweep_results import FORMAT, SweepFields, SweepResult
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
        if report.skipped_topologies:
            rows = [(t.where, Text(t.reason, style="dim")) for t in report.skipped_topologies]
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
    if report.reused_results:
        facts.append(("known", f"{counted(report.reused_results, 'result')} from an earlier run"))
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
    return "" if found is None else f"{price_text(found.step)} {found.currency}".strip()


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


class SweepProgress:
    """Tells of results as they come.

    Args:
        shown: Whether anything is shown.
        console: Where; the standard error if None.
    """

    def __init__(self, *, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._is_shown = shown
        self._total = self._done = 0
        self._best: SweepResult | None = None
        self._bar = _bar(self._console) if shown and self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, total: int, known: Sequence[SweepResult]) -> None:
        """Begins.

        Args:
            total: How many results there will be.
            known: Those that are there.
        """
        self._total, self._done = total, len(known)
        for result in known:
            self._compare(result)
        self._show()

    def update(self, result: SweepResult) -> None:
        """One more is there."""
        self._done += 1
        self._compare(result)
        self._show()
        if self._is_shown and not self._bar:
            self._console.print(
                f"{self._done}/{self._total} {result.where} {result.axes}: {_said(result)}",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )

    def _compare(self, result: SweepResult) -> None:
        if result.outcome == "fits" and (self._best is None or result.rank < self._best.rank):
            self._best = result

    def _show(self) -> None:
        if not self._bar:
            return
        best = self._best
        said = "" if best is None else f"best {_said(best)}: {best.axes} on {best.where}"
        (task,) = self._bar.task_ids
        self._bar.update(task, total=self._total, completed=self._done, description=said)


def _bar(console: Console) -> Bar:
    bar = Bar(
        TextColumn("meshes"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
    )
    bar.add_task("", total=None)
    return bar


def _said(result: SweepResult) -> str:
    if result.outcome == "fits" and result.facts is not None:
        return in_seconds(result.facts.seconds)
    reason = " ".join(result.reason.split())
    return f"{result.outcome}: {reason}" if reason else result.outcome


@dataclass(frozen=True, repr=False)
class SweepReport(KeptReport, SweepFields):
    """What a sweep has found, the best mesh first. Made by `xlashard.preflight_sweep`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` keeps it.

    Attributes:
        title: What was asked: the settings file, or `module:function`.
        folder: Where the results and the whole reports are.
        results: One for each mesh: those that fit, the fastest first; those that are out of memory;
            those that can't be; those that failed.
        reused_results: How many of them an earlier sweep in this folder had found.
        prices: Of chips, as the caller gave them.
        skipped_topologies: The topologies that no mesh of the axes has as many devices as.
    """

    _record = Record("sweep report", FORMAT, "xlashard.preflight_sweep(...).to_json()")

    def report(self, result: SweepResult) -> PreflightReport:
        """The whole report of a result.

        Raises:
            ArgumentError: If it has none, for it was not compiled, or its file is gone.
        """
        if not result.report:
            raise ArgumentError(
                f"there is no report of {result.axes} on {result.where}, which was not compiled: "
                f"{result.reason}"
            )
        file = Path(self.folder) / result.report
        try:
            found = PreflightReport.from_json(read_text(file))
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"the report of {result.axes} on {result.where} can't be read: {error}; the same "
                "sweep with again=True writes it anew"
            ) from None
        price = self.price(result)
        if price is None:
            return found
        workload = None if found.throughput is None else found.throughput.workload
        told = describe_price(price, found.time.seconds, found.topology.chips, workload)
        return replace(found, price=told)

    def _shown(self, *, full: bool) -> SweepText:
        return SweepText(self, full=full)

    def __repr__(self) -> str:
        fitting = sum(r.outcome == "fits" for r in self.results)
        return f"<SweepReport of {self.title}: {fitting} of {len(self.results)} fit; print it>"
