"""What a sweep has found, without what shows and keeps it: one frozen result for each mesh.

The folder of a sweep: a line of JSON for each result, and the whole reports beside them.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from xlashard.errors import ArgumentError
from xlashard.pjit.report.records import Record
from xlashard.tpu.preflight.report.preflight_model import Bound, PriceReport
from xlashard.tpu.preflight.report.preflight_report import PreflightReport
from xlashard.tpu.preflight.report.pricing import Price, describe_price

FORMAT = 2
"""Number of the JSON format. It grows when a field changes its meaning or goes away."""

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
        return _where(self.topology, self.slices)

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


@dataclass(frozen=True)
class SkippedTopology:
    """A topology on which no mesh of the axes is possible, where others have some.

    Attributes:
        topology: As libtpu writes it: `v5p:4x4x4`.
        slices: How many slices of it.
        reason: Why there is none.
    """

    topology: str
    slices: int
    reason: str

    @property
    def where(self) -> str:
        """The topology as text: `2 × v5e:4x4`."""
        return _where(self.topology, self.slices)


def _where(topology: str, slices: int) -> str:
    return topology if slices == 1 else f"{slices} × {topology}"


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
class SweepFields:
    """The facts of a sweep; `SweepReport`, which can print them, says what each is."""

    title: str
    folder: str
    results: tuple[SweepResult, ...]
    reused_results: int = field(default=0, compare=False)
    prices: tuple[ChipPrice, ...] = ()
    skipped_topologies: tuple[SkippedTopology, ...] = ()

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


_RECORD = Record("result of a sweep", FORMAT, "the same sweep")
_LINES = "results.jsonl"
_REPORTS = "reports"


class ResultStore:
    """Results that outlive the process that found them.

    Args:
        folder: Where they are; made if it isn't there.

    Raises:
        ArgumentError: If it can't be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            (folder / _REPORTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"the folder of the sweep, {folder}, can't be made: {error.strerror}; name another "
                "one"
            ) from None

    def known(self) -> dict[str, SweepResult]:
        """The results that are there by their keys, the last one of each.

        A line that is cut off, as when a machine stops, and a result whose report is gone are
        passed over: they are found again.
        """
        try:
            text = (self.folder / _LINES).read_bytes().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ArgumentError(  # no-catalogue: needs a folder of its own
                f"the folder of the sweep, {self.folder}, can't be read ({_LINES}: "
                f"{error.strerror}); name another one"
            ) from None
        found = {}
        for line in text.splitlines():
            with contextlib.suppress(ArgumentError):
                result = _RECORD.read(SweepResult, line)
                found[result.key] = result
        return {k: r for k, r in found.items() if self._is_whole(r)}

    def _is_whole(self, result: SweepResult) -> bool:
        return not result.report or (self.folder / result.report).exists()

    def keep_report(self, name: str, report: PreflightReport) -> str:
        """Writes a whole report, and gives its place in the folder."""
        place = f"{_REPORTS}/{name}.json"
        file = self.folder / place
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(report.to_json(), encoding="utf-8")
        unfinished.replace(file)
        return place

    def keep(self, result: SweepResult) -> None:
        """Writes a result."""
        line = json.dumps(_RECORD.to_dict(result), separators=(",", ":"))
        file = self.folder / _LINES
        with file.open("ab+") as lines:
            # After a line that was cut off a new one begins.
            lines.seek(0, os.SEEK_END)
            if lines.tell():
                lines.seek(-1, os.SEEK_END)
                line = line if lines.read(1) == b"\n" else f"\n{line}"
            lines.write(f"{line}\n".encode())
