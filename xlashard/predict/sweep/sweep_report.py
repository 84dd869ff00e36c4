"""Report of a sweep, its terminal output, and its progress display."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from xlashard.analysis.explain.tables import (
    Page,
    SerializableReport,
    columns_table,
    head,
    listing,
    section,
    table,
)
from xlashard.errors import ArgumentError, counted
from xlashard.predict.preflight.render.report_text import (
    ESTIMATE,
    WORDS,
    price_with_currency,
)
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import Price, PriceReport, describe_price
from xlashard.predict.sweep.sweep_results import (
    FORMAT,
    ChipPrice,
    SkippedTopology,
    SweepFacts,
    SweepResult,
)
from xlashard.support.documents import ReportFormat, read_text
from xlashard.support.formatting import elided, in_amount, in_bytes, in_seconds

_SHOWN = 12
_REASON = 160
_TITLES = {
    "out of memory": "Out of memory",
    "impossible": "Impossible",
    "failed": "Failed",
}


def _head(report: "SweepReport") -> RenderableType:
    counts = Counter(r.outcome for r in report.results)
    text = [f"{counts[o]} {o}" for o in ("fits", *_TITLES) if counts[o]]
    topologies = list(dict.fromkeys(r.where for r in report.results))
    best = report.best
    kind = [("estimate", ESTIMATE)] if report.is_estimate else []
    facts: list[tuple[str, str | Text]] = [
        ("meshes", f"{len(report.results)}: {', '.join(text).replace('fits', 'fit')}")
    ]
    if best is not None and best.facts is not None:
        step = in_seconds(best.facts.seconds)
        facts.insert(0, ("best", f"{best.axes} on {best.where}, {step}"))
    if (cheapest := report.cheapest) is not None and (price := report.step_price(cheapest)):
        tokens = _million_tokens(price)
        step = f"{price_with_currency(price.step, price.currency)} a step"
        cost = f"{tokens} for a million tokens" if tokens else step
        facts.insert(1, ("cheapest", f"{cheapest.axes} on {cheapest.where}, {cost}"))
    if report.reused_results:
        facts.append(("known", f"{counted(report.reused_results, 'result')} from an earlier run"))
    facts.append(("reports", report.folder))
    return head(report.title, topologies, [*kind, *facts])


def _ranking(
    report: "SweepReport", fitting: Sequence[SweepResult], page: Page, title: str, note: str
) -> RenderableType:
    shown = fitting if page.is_full else fitting[:_SHOWN]
    facts = [r.facts for r in shown if r.facts is not None]
    prices = [report.step_price(r) for r in shown]
    columns: dict[str, list[RenderableType]] = {
        "": [Text(f"{i}.", style="dim") for i, _ in enumerate(shown, 1)],
        "topology": [r.where for r in shown],
        "mesh": [Text(r.axes, style="" if i else "bold") for i, r in enumerate(shown)],
        ">step": [in_seconds(f.seconds) for f in facts],
        ">tokens/s": [
            "" if f.tokens_per_second is None else in_amount(f.tokens_per_second) for f in facts
        ],
        ">MFU": ["" if f.utilisation is None else f"{f.utilisation:.1%}" for f in facts],
        ">HBM": [f"{f.total_bytes / f.available_bytes:.0%}" for f in facts],
        "waits for": [_bound(f) for f in facts],
        ">a step": ["" if p is None else price_with_currency(p.step, p.currency) for p in prices],
        ">10⁶ tokens": [_million_tokens(p) for p in prices],
    }
    rest = page.left(len(fitting) - len(shown), "more that fit")
    return section(title, note, columns_table(columns), rest)


def _bound(facts: SweepFacts) -> str:
    words = WORDS[facts.links]
    return words.networks.get(facts.bound) or words.bounds[facts.bound]


def _million_tokens(price: PriceReport | None) -> str:
    if price is None or price.billion_tokens is None:
        return ""
    return price_with_currency(price.billion_tokens / 1000, price.currency)


def _reason(result: SweepResult, page: Page) -> str:
    facts = result.facts
    if result.outcome == "out of memory" and facts is not None:
        return f"{in_bytes(facts.total_bytes)} of {in_bytes(facts.available_bytes)}"
    line = " ".join(result.reason.split())
    return line if page.is_full else elided(line, _REASON)


class SweepProgress:
    """Progress of a sweep: a bar in a terminal, else one line per mesh.

    Args:
        shown: Whether to show progress.
        console: Console; None for standard error.
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
        """Start with the number of results.

        Args:
            total: Number of meshes.
            known: Cached results.
        """
        self._total, self._done = total, len(known)
        for result in known:
            self._compare(result)
        self._show()

    def update(self, result: SweepResult) -> None:
        """Add a result."""
        self._done += 1
        self._compare(result)
        self._show()
        if self._is_shown and not self._bar:
            self._console.print(
                f"{self._done}/{self._total} {result.where} {result.axes}: {_result_text(result)}",
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
        text = "" if best is None else f"best {_result_text(best)}: {best.axes} on {best.where}"
        (task,) = self._bar.task_ids
        self._bar.update(task, total=self._total, completed=self._done, description=text)


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


def _result_text(result: SweepResult) -> str:
    if result.outcome == "fits" and result.facts is not None:
        return in_seconds(result.facts.seconds)
    reason = " ".join(result.reason.split())
    return f"{result.outcome}: {reason}" if reason else result.outcome


@dataclass(frozen=True, repr=False)
class SweepReport(SerializableReport):
    """Results of a sweep, best mesh first. Made by `xlashard.preflight_sweep`.

    `print(report)`, rich's `print` and `report.print()` display it; `to_json` serializes it.

    Attributes:
        title: Source of the program: settings file, or `module:function`.
        folder: Folder of the results and reports.
        results: One result per mesh: fitting ones by time, then out of memory, impossible, failed.
        reused_results: Number of results cached by an earlier sweep in this folder.
        prices: Prices of chips, as specified by the caller.
        skipped_topologies: Topologies without a mesh of these axes.
        is_estimate: Whether the compiler was stopped before code generation.

    Example:
        >>> from xlashard import preflight_sweep
        >>> report = preflight_sweep("model:step", "v5e-16")  # doctest: +SKIP
        >>> report.best.axes  # doctest: +SKIP
        'data=8 model=2'
    """

    _format = ReportFormat("sweep report", FORMAT, "xlashard.preflight_sweep(...).to_json()")

    title: str
    folder: str
    results: tuple[SweepResult, ...]
    reused_results: int = field(default=0, compare=False)
    prices: tuple[ChipPrice, ...] = ()
    skipped_topologies: tuple[SkippedTopology, ...] = ()
    is_estimate: bool = False

    @property
    def best(self) -> SweepResult | None:
        """The fastest mesh that fits; None if none fits."""
        return next(iter(self.fitting), None)

    @property
    def fitting(self) -> tuple[SweepResult, ...]:
        """The meshes that fit, fastest first."""
        return tuple(r for r in self.results if r.outcome == "fits")

    @property
    def cheapest(self) -> SweepResult | None:
        """The mesh with the least cost per token, or per step; None without prices of all chips."""
        costs = {r.key: self._cost(r) for r in self.fitting}
        if not costs or math.inf in costs.values():
            return None
        return min(self.fitting, key=lambda r: costs[r.key])

    @property
    def best_by_topology(self) -> tuple[SweepResult, ...]:
        """The fastest mesh of each topology; the cheapest first if all chips have prices."""
        best_by_place: dict[str, SweepResult] = {}
        for result in self.fitting:
            best_by_place.setdefault(result.where, result)
        best = tuple(best_by_place.values())
        return best if self.cheapest is None else tuple(sorted(best, key=self._cost))

    def _cost(self, result: SweepResult) -> float:
        """Return the cost of 10⁹ tokens, or of a step of other programs; infinite if unknown."""
        price = self.step_price(result)
        if price is None:
            return math.inf
        return price.step if price.billion_tokens is None else price.billion_tokens

    def price(self, result: SweepResult) -> Price | None:
        """Return the price of a chip of a result's topology, or None if unspecified."""
        chip, colon, _ = result.topology.partition(":")
        if not colon and result.facts is not None:
            chip = result.facts.chip  # A machine type of a cloud, such as `p5.48xlarge`.
        known = {price.generation: price for price in self.prices}
        price = known.get(chip) or known.get("")
        return None if price is None else Price(price.chip_hour, price.currency)

    def step_price(self, result: SweepResult) -> PriceReport | None:
        """Return the cost of one execution, or None without a price or an estimate."""
        price, facts = self.price(result), result.facts
        if price is None or facts is None:
            return None
        speed = facts.tokens_per_second
        tokens = None if speed is None else speed * facts.seconds
        return describe_price(price, facts.seconds, facts.chips, tokens)

    def report(self, result: SweepResult) -> PreflightReport:
        """Return the whole report of a result.

        Raises:
            ArgumentError: If the mesh was not compiled, or the file is missing or invalid.
        """
        if not result.report:
            raise ArgumentError(
                f"{result.axes} on {result.where} has no report, because it was not compiled: "
                f"{result.reason}"
            )
        file = Path(self.folder) / result.report
        try:
            report = PreflightReport.from_json(read_text(file))
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"the report of {result.axes} on {result.where} can't be read: {error}; run the "
                f"sweep with again=True to compile it again"
            ) from None
        price = self.price(result)
        if price is None:
            return report
        tokens = None if report.throughput is None else report.throughput.workload.tokens
        cost = describe_price(price, report.time.seconds, report.topology.chips, tokens)
        return replace(report, price=cost)

    def _sections(self, page: Page) -> Iterator[RenderableType | None]:
        yield _head(self)
        if self.fitting:
            best = self.best_by_topology
            if len(best) > 1:
                order = "the cheapest first" if self.cheapest is not None else "the fastest first"
                yield _ranking(self, best, page, "Best mesh of each topology", order)
            note = "by the estimated time of a step"
            yield _ranking(self, self.fitting, page, "Fastest first", note)
        for outcome, title in _TITLES.items():
            yield listing(
                page,
                (title, ""),
                ("topology", "mesh", "why"),
                [r for r in self.results if r.outcome == outcome],
                lambda r: (r.where, r.axes, Text(_reason(r, page), style="dim")),
            )
        if self.skipped_topologies:
            rows = [(t.where, Text(t.reason, style="dim")) for t in self.skipped_topologies]
            yield section("Without a mesh", "", table(["topology", "why"], rows))

    def __repr__(self) -> str:
        fit = f"{len(self.fitting)} of {len(self.results)} fit"
        kind = "estimate, " if self.is_estimate else ""
        return f"<SweepReport of {self.title}: {kind}{fit}; print it>"
