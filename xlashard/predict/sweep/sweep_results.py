"""Results of a sweep, and their folder: one line of JSON per result, and the whole reports."""

import contextlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xlashard.errors import ArgumentError
from xlashard.predict.preflight.render.report_text import slices_text
from xlashard.predict.preflight.report.preflight_model import Bound
from xlashard.predict.preflight.report.preflight_report import PreflightReport
from xlashard.predict.targets.chip import Links
from xlashard.predict.targets.gpu.gpu_models import GPU_MODELS
from xlashard.predict.targets.tpu.generations import GENERATIONS
from xlashard.support.documents import ReportFormat, write_whole

FORMAT = 2
"""Version of the JSON format, increased when a field changes its meaning or is removed."""

type Outcome = Literal["fits", "not compiled", "out of memory", "impossible", "failed"]
"""Outcome of a mesh. `not compiled`: its layout was predicted, and others are more promising.
`impossible`: the program can't be sharded over it, for example because a dimension is not
divisible. `failed`: the worker process did not finish.
"""

OUTCOMES: tuple[Outcome, ...] = ("fits", "not compiled", "out of memory", "impossible", "failed")
"""Outcomes in their order."""


@dataclass(frozen=True)
class SweepFacts:
    """Figures of a preflight report for ranking.

    Attributes:
        chips: Number of chips in all slices or nodes.
        seconds: Time of one execution.
        bound: Resource that bounds the time; None for a time that a search predicts.
        total_bytes: Memory use per device.
        available_bytes: Available memory per device.
        compile_seconds: Compile time.
        tokens_per_second: Tokens per second of a training step, over all devices.
        utilisation: Model FLOP utilisation (MFU) of a training step.
        chip: Name of the chip: `v5p`, `h100`.
        links: Links within a slice or node.
    """

    chips: int
    seconds: float
    bound: Bound | None
    total_bytes: int
    available_bytes: int
    compile_seconds: float
    tokens_per_second: float | None = None
    utilisation: float | None = None
    chip: str = ""
    links: Links = "ici"

    @property
    def memory_share(self) -> float:
        """Share of the available memory that the program takes."""
        return self.total_bytes / self.available_bytes

    @classmethod
    def of(cls, report: PreflightReport) -> "SweepFacts":
        """Return the figures of a report."""
        return cls(
            chips=report.topology.chips,
            seconds=report.time.seconds,
            bound=report.time.bound,
            total_bytes=report.memory.total_bytes,
            available_bytes=report.memory.available_bytes,
            compile_seconds=report.compile_seconds,
            tokens_per_second=report.tokens_per_second,
            utilisation=report.utilisation,
            chip=report.topology.generation,
            links=report.topology.links,
        )


@dataclass(frozen=True)
class SweepResult:
    """Result for one candidate: a mesh, and settings of the program on it.

    Attributes:
        key: Cache key.
        topology: Full name: `v5p:4x4x4`, `h100:4x8`.
        slices: Number of slices.
        mesh: Mesh axis names and sizes.
        outcome: Outcome.
        reason: Reason of a failure; empty if the program fits.
        facts: Figures; None if the program was not compiled.
        report: File of the whole report in the sweep's folder; empty for none.
        batch: Sequences of a step; None for those of the program.
        remat: Remat policy; empty for that of the program.
        layout: Name of the automatic layout; empty for the shardings of the program.
    """

    key: str
    topology: str
    slices: int
    mesh: tuple[tuple[str, int], ...]
    outcome: Outcome
    reason: str = ""
    facts: SweepFacts | None = None
    report: str = ""
    batch: int | None = None
    remat: str = ""
    layout: str = ""

    @property
    def where(self) -> str:
        """Topology as text: `2 × v5e:4x4`."""
        return slices_text(self.topology, self.slices)

    @property
    def axes(self) -> str:
        """Mesh as text, without axes of size 1: `data=8 model=2`."""
        shown = [f"{name}={size}" for name, size in self.mesh if size > 1]
        return " ".join(shown) or "one device"

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: outcome, then time of a sequence, or memory use as a share of what is there."""
        order, facts = OUTCOMES.index(self.outcome), self.facts
        if facts is None:
            return order, math.inf
        if self.outcome in ("fits", "not compiled"):
            return order, facts.seconds / (self.batch or 1)
        return order, facts.memory_share


@dataclass(frozen=True)
class SkippedTopology:
    """A topology without a mesh of these axes, in a sweep where other topologies have one.

    Attributes:
        topology: Full name: `v5p:4x4x4`, `h100:4x8`.
        slices: Number of slices.
        reason: Reason.
    """

    topology: str
    slices: int
    reason: str

    @property
    def where(self) -> str:
        """Topology as text: `2 × v5e:4x4`."""
        return slices_text(self.topology, self.slices)


def ranked(results: Iterable[SweepResult]) -> tuple[SweepResult, ...]:
    """Return results in order, best first."""
    return tuple(sorted(results, key=lambda r: (r.rank, r.topology, r.slices, r.mesh)))


_CHIPS = tuple(chip.name for chip in (*GENERATIONS, *GPU_MODELS))


@dataclass(frozen=True)
class ChipPrice:
    """Price of a chip-hour of one kind of chips.

    Attributes:
        generation: Name of the chip, such as `v5e` or `h100`; empty for any.
        chip_hour: Cost of one chip for an hour.
        currency: Currency as entered; may be empty.
    """

    generation: str
    chip_hour: float
    currency: str = ""

    def __post_init__(self) -> None:
        if self.generation and self.generation not in _CHIPS:
            raise ArgumentError(
                f"price of {self.generation!r}: expected a kind of chips, one of "
                f"{', '.join(_CHIPS)}"
            )


_RESULT_FORMAT = ReportFormat("result of a sweep", FORMAT, "the same sweep")
_LINES = "results.jsonl"
_REPORTS = "reports"


class ResultStore:
    """Results of a sweep in a folder.

    Args:
        folder: The folder, created if missing.

    Raises:
        ArgumentError: If the folder can't be created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            (folder / _REPORTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"the folder of the sweep, {folder}, can't be created: {error.strerror}; specify "
                f"another one"
            ) from None

    def known(self) -> dict[str, SweepResult]:
        """Return the stored results by key, the last one of each.

        Truncated lines, and results without their report file, are ignored.
        """
        try:
            text = (self.folder / _LINES).read_bytes().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ArgumentError(  # no-catalogue: needs a folder of its own
                f"the folder of the sweep, {self.folder}, can't be read ({_LINES}: "
                f"{error.strerror}); specify another one"
            ) from None
        results = {}
        for line in text.splitlines():
            with contextlib.suppress(ArgumentError):
                result = _RESULT_FORMAT.read(SweepResult, line)
                results[result.key] = result
        return {
            key: result
            for key, result in results.items()
            if not result.report or (self.folder / result.report).exists()
        }

    def keep_report(self, name: str, report: PreflightReport) -> str:
        """Write a whole report and return its path in the folder."""
        place = f"{_REPORTS}/{name}.json"
        write_whole(self.folder / place, report.to_json())
        return place

    def keep(self, result: SweepResult) -> None:
        """Append a result.

        Raises:
            ArgumentError: If the file can't be written.
        """
        line = json.dumps(_RESULT_FORMAT.to_dict(result), separators=(",", ":"))
        try:
            self._append(line)
        except OSError as error:
            raise ArgumentError(  # no-catalogue: needs a folder of its own
                f"the folder of the sweep, {self.folder}, can't be written ({_LINES}: "
                f"{error.strerror}); specify another one, or continue here once there is room"
            ) from None

    def _append(self, line: str) -> None:
        with (self.folder / _LINES).open("ab+") as lines:
            # Start a new line after a truncated one.
            lines.seek(0, os.SEEK_END)
            if lines.tell():
                lines.seek(-1, os.SEEK_END)
                line = line if lines.read(1) == b"\n" else f"\n{line}"
            lines.write(f"{line}\n".encode())
