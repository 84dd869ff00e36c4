"""What a sweep has found: one frozen result for each mesh, ranked."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console, ConsoleOptions, RenderResult

from xlashard.errors import ArgumentError
from xlashard.pjit.report.records import Record
from xlashard.tpu.preflight.money import Price, describe_price
from xlashard.tpu.preflight.parts import Bound, PriceReport
from xlashard.tpu.preflight.report import PreflightReport
from xlashard.tpu.preflight.sweep.screen import SweepText
from xlashard.wording import plain_text

FORMAT = 1
"""Number of the JSON format. It grows when a field changes its meaning or goes away."""

_RECORD = Record("sweep report", FORMAT, "xlashard.preflight_sweep(...).to_json()")

type Outcome = Literal["fits", "out of memory", "impossible", "failed"]
"""What became of a mesh. `impossible`: the program can't be laid on it, as where a dimension does
not divide. `failed`: nobody knows, for the process that was to find out did not come to an end."""

_ORDER: tuple[Outcome, ...] = ("fits", "out of memory", "impossible", "failed")


@dataclass(frozen=True)
class SweepFacts:
    """The facts of a preflight report by which meshes are compared.

    Attributes:
        chips: How many chips, in all slices.
        seconds: How long one execution takes.
        bound: What it waits for.
        total_bytes: What it takes of a device's memory.
        available_bytes: What it may take.
        compile_seconds: How long the compiler took.
        tokens_per_second: Over all devices, for a step of training.
        utilisation: Model FLOP by what the chips could do in that time, likewise.
    """

    chips: int
    seconds: float
    bound: Bound
    total_bytes: int
    available_bytes: int
    compile_seconds: float
    tokens_per_second: float | None = None
    utilisation: float | None = None

    @classmethod
    def of(cls, report: PreflightReport) -> "SweepFacts":
        """Those of a report."""
        throughput = report.throughput
        return cls(
            chips=report.topology.chips,
            seconds=report.time.seconds,
            bound=report.time.bound,
            total_bytes=report.memory.total_bytes,
            available_bytes=report.memory.available_bytes,
            compile_seconds=report.compile_seconds,
            tokens_per_second=None if throughput is None else throughput.tokens_per_second,
            utilisation=None if throughput is None else throughput.utilisation,
        )


@dataclass(frozen=True)
class SweepResult:
    """What became of one mesh.

    Attributes:
        key: A digest of all that it depends on, by which it is found again.
        topology: As libtpu writes it: `v5p:4x4x4`.
        slices: How many slices of it.
        mesh: Its axes with their sizes.
        outcome: Whether it fits.
        reason: Why it does not; empty if it does.
        facts: What the program does on it; None where it was not compiled.
        report: The file of its whole report, in the folder of the sweep; empty for none.
    """

    key: str
    topology: str
    slices: int
    mesh: tuple[tuple[str, int], ...]
    outcome: Outcome
    reason: str = ""
    facts: SweepFacts | None = None
    report: str = ""

    @property
    def where(self) -> str:
        """The topology as text: `2 × v5e:4x4`."""
        return self.topology if self.slices == 1 else f"{self.slices} × {self.topology}"

    @property
    def axes(self) -> str:
        """The mesh as text, without axes of one device: `data=8 model=2`."""
        shown = [f"{name}={size}" for name, size in self.mesh if size > 1]
        return " ".join(shown) or "one device"

    @property
    def rank(self) -> tuple[int, float]:
        """What it is sorted by: those that fit by their time, then by how much is missing."""
        facts = self.facts
        if facts is None:
            return _ORDER.index(self.outcome), math.inf
        if self.outcome == "fits":
            return 0, facts.seconds
        return _ORDER.index(self.outcome), facts.total_bytes / facts.available_bytes


def ranked(results: Iterable[SweepResult]) -> tuple[SweepResult, ...]:
    """Results in their order, the best first."""
    return tuple(sorted(results, key=lambda r: (r.rank, r.topology, r.slices, r.mesh)))


@dataclass(frozen=True)
class ChipPrice:
    """What a chip costs.

    Attributes:
        generation: Of which generation, such as `v5e`; empty for any.
        chip_hour: For an hour.
        currency: As the caller wrote it; empty if they didn't.
    """

    generation: str
    chip_hour: float
    currency: str = ""


@dataclass(frozen=True, repr=False)
class SweepReport:
    """What a sweep has found, the best mesh first. Made by `xlashard.preflight_sweep`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` keeps it.

    Attributes:
        title: What was asked: the settings file, or `module:function`.
        folder: Where the results and the whole reports are.
        results: One for each mesh: those that fit, the fastest first; those that are out of memory;
            those that can't be; those that failed.
        taken_over: How many of them an earlier sweep in this folder had found.
        prices: Of chips, as the caller gave them.
    """

    title: str
    folder: str
    results: tuple[SweepResult, ...]
    taken_over: int = field(default=0, compare=False)
    prices: tuple[ChipPrice, ...] = ()

    @property
    def best(self) -> SweepResult | None:
        """The mesh with the fastest step; None if the program fits on none."""
        return next((r for r in self.results if r.outcome == "fits"), None)

    def price(self, result: SweepResult) -> Price | None:
        """What a chip of a result's topology costs; None if nobody said so."""
        generation = result.topology.partition(":")[0]
        known = {price.generation: price for price in self.prices}
        found = known.get(generation) or known.get("")
        return None if found is None else Price(found.chip_hour, found.currency)

    def step_price(self, result: SweepResult) -> PriceReport | None:
        """What one execution costs; None where nobody said a price, or how long it takes."""
        price, facts = self.price(result), result.facts
        if price is None or facts is None:
            return None
        return describe_price(price, facts.seconds, facts.chips, None)

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
            found = PreflightReport.from_json(file.read_text(encoding="utf-8"))
        except OSError as error:
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

    def print(self, *, all: bool = False, console: Console | None = None) -> None:
        """Prints it.

        Args:
            all: Show every mesh, where otherwise the first few stand for all.
            console: Where to; standard output if None.
        """
        (console or Console()).print(SweepText(self, full=all))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield SweepText(self, full=False)

    def __str__(self) -> str:
        return plain_text(SweepText(self, full=False))

    def __repr__(self) -> str:
        fitting = sum(r.outcome == "fits" for r in self.results)
        return f"<SweepReport of {self.title}: {fitting} of {len(self.results)} fit; print it>"

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, with the number of the format."""
        return _RECORD.to_dict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON.

        Args:
            indent: Spaces per level; None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ArgumentError: If the text is not JSON, of another format, or of another shape.
        """
        return _RECORD.read(cls, text)
