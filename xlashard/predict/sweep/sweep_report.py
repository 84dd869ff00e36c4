"""Report of a sweep, its terminal output, and its progress display."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from xlashard.analysis.report.cells import Content, Span, TableCell, join_cell, read_value
from xlashard.analysis.report.parts import Column, Head, Section, make_id
from xlashard.analysis.report.printable import Part, SerializableReport
from xlashard.errors import ArgumentError, counted
from xlashard.predict.preflight.render.report_text import (
    ESTIMATE,
    WORDS,
)
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.preflight.report.pricing import Price, PriceReport, describe_price
from xlashard.predict.sweep.sweep_results import (
    FORMAT,
    OUTCOMES,
    ChipPrice,
    SkippedTopology,
    SweepFacts,
    SweepResult,
)
from xlashard.support.documents import ReportFormat, read_text
from xlashard.support.formatting import elided, in_bytes, in_seconds

_SHOWN = 12
_REASON = 160


def _bound(facts: SweepFacts | None) -> str:
    if facts is None or facts.bound is None:
        return ""
    words = WORDS[facts.links]
    return words.networks.get(facts.bound) or words.resources[facts.bound].bound


def _price_cell(price: PriceReport | None, amount: str) -> TableCell:
    """Return an amount of a price by its name; empty without one."""
    cost = read_value(price, amount)
    if price is None or cost is None:
        return TableCell()
    return join_cell(price.format_amount(cost), key=cost)


def _reason(result: SweepResult) -> TableCell:
    facts = result.facts
    if result.outcome == "out of memory" and facts is not None and not result.reason:
        text = f"{in_bytes(facts.total_bytes)} of {in_bytes(facts.available_bytes)}"
        return join_cell(Span(text, "quiet"))
    return join_cell(Span(elided(" ".join(result.reason.split()), _REASON), "quiet"))


_SETTINGS = (
    Column[SweepResult](">batch", "batch", "number"),
    Column[SweepResult]("remat", "remat"),
)


def _row_name(result: SweepResult) -> str:
    return f"{result.where} {result.axes} {result.batch or ''} {result.remat}"


_OTHERS = Section[SweepResult](
    id="others",
    title="",
    columns=(
        Column("topology", "where", ""),
        Column("mesh", "axes"),
        *_SETTINGS,
        Column("why", _reason),
    ),
    row_name=_row_name,
)

_WITHOUT_MESH = Section[SkippedTopology](
    id="without-mesh",
    title="Without a mesh",
    columns=(
        Column("topology", "where", ""),
        Column("why", lambda t: Span(t.reason, "quiet")),
    ),
    most=10**6,
)


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
        results: One result per mesh: fitting ones by time, then those that were not compiled, out
            of memory, impossible, failed.
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

    _kind = "sweep"
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

    def parts(self) -> Iterator[Part]:
        """Yield the head, the meshes that fit, and why the others do not."""
        yield self._head()
        yield from self.tables()

    def tables(self) -> Iterator[Section]:
        """Yield the tables of meshes that fit, and of the others."""
        best = self.best_by_topology
        if len(best) > 1:
            order = "the cheapest first" if self.cheapest is not None else "the fastest first"
            yield self._ranking(best, "topologies", "Best mesh of each topology", order)
        is_varied = len({r.batch for r in self.results}) > 1
        order = "tokens per second" if is_varied else "the estimated time of a step"
        yield self._ranking(self.fitting, "meshes", "Fastest first", f"by {order}")
        rest = {name: [r for r in self.results if r.outcome == name] for name in OUTCOMES[1:]}
        predicted = rest.pop("not compiled")
        note = "predicted by the search, which finds those above more promising"
        yield self._ranking(predicted, "not-compiled", "Not compiled", note)
        for outcome, rows in rest.items():
            yield replace(_OTHERS, id=make_id(outcome), title=outcome.capitalize(), rows=rows)
        yield _WITHOUT_MESH.with_rows(self.skipped_topologies)

    def _head(self) -> Head:
        counts = Counter(r.outcome for r in self.results)
        text = [f"{counts[o]} {o}" for o in OUTCOMES if counts[o]]
        facts: list[tuple[str, Content]] = [("estimate", ESTIMATE)] * self.is_estimate
        best = self.best
        if best is not None and best.facts is not None:
            step = in_seconds(best.facts.seconds)
            facts.append(("best", f"{best.axes} on {best.where}, {step}"))
        if (cheapest := self.cheapest) is not None and (price := self.step_price(cheapest)):
            cost = f"{price.format_amount(price.step)} a step"
            if price.million_tokens is not None:
                cost = f"{price.format_amount(price.million_tokens)} for a million tokens"
            facts.append(("cheapest", f"{cheapest.axes} on {cheapest.where}, {cost}"))
        facts.append(("meshes", f"{len(self.results)}: {', '.join(text).replace('fits', 'fit')}"))
        if self.reused_results:
            known = f"{counted(self.reused_results, 'result')} from an earlier run"
            facts.append(("known", known))
        facts.append(("reports", self.folder))
        topologies = list(dict.fromkeys(r.where for r in self.results))
        meshes = counted(len(self.results), "mesh", "meshes")
        headline = f"{counts['fits']} of {meshes} {'fits' if counts['fits'] == 1 else 'fit'}"
        return Head(self.title, topologies, facts, headline, severity="fits" if best else "not")

    def _ranking(
        self, fitting: Sequence[SweepResult], id: str, title: str, note: str
    ) -> Section[SweepResult]:
        """Return a table of meshes in order."""
        places = {result.key: place for place, result in enumerate(fitting, 1)}

        def place(result: SweepResult) -> TableCell:
            number = places[result.key]
            return join_cell(Span(f"{number}.", "quiet"), key=number)

        def mesh(result: SweepResult) -> Span:
            return Span(result.axes, "strong" if result is fitting[0] else "name")

        def price(amount: str) -> Callable[[SweepResult], TableCell]:
            return lambda result: _price_cell(self.step_price(result), amount)

        return Section(
            id,
            title,
            note,
            columns=(
                Column("", place, tip="place"),
                Column("topology", "where", ""),
                Column("mesh", mesh),
                *_SETTINGS,
                Column("layout", "layout"),
                Column(">step", "facts.seconds", in_seconds),
                Column(">tokens/s", "facts.tokens_per_second", "number"),
                Column(">MFU", "facts.utilisation", "{:.1%}".format),
                Column(">HBM", "facts.memory_share", "{:.0%}".format),
                Column("waits for", lambda result: _bound(result.facts), ""),
                Column(">a step", price("step")),
                Column(">10⁶ tokens", price("million_tokens")),
            ),
            rows=fitting,
            row_name=_row_name,
            most=_SHOWN,
            more_words="more that fit" if fitting and fitting[0].outcome == "fits" else "more",
        )

    def __repr__(self) -> str:
        fit = f"{len(self.fitting)} of {len(self.results)} fit"
        kind = "estimate, " if self.is_estimate else ""
        return f"<SweepReport of {self.title}: {kind}{fit}; print it>"
