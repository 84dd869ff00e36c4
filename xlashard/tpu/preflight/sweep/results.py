"""The report of a sweep: a frozen value that prints itself and travels as JSON."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult

from xlashard.errors import ArgumentError
from xlashard.pjit.report.records import Record
from xlashard.tpu.preflight.money import describe_price
from xlashard.tpu.preflight.report import PreflightReport
from xlashard.tpu.preflight.sweep.fields import FORMAT, SweepFields, SweepResult
from xlashard.tpu.preflight.sweep.screen import SweepText
from xlashard.wording import plain_text

_RECORD = Record("sweep report", FORMAT, "xlashard.preflight_sweep(...).to_json()")


@dataclass(frozen=True, repr=False)
class SweepReport(SweepFields):
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
