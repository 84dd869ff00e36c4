"""The report of a sweep: a frozen value that prints itself and travels as JSON."""

from dataclasses import dataclass, replace
from pathlib import Path

from xlashard.documents import read_text
from xlashard.errors import ArgumentError
from xlashard.pjit.report.kept import KeptReport
from xlashard.pjit.report.records import Record
from xlashard.tpu.preflight.money import describe_price
from xlashard.tpu.preflight.report import PreflightReport
from xlashard.tpu.preflight.sweep.fields import FORMAT, SweepFields, SweepResult
from xlashard.tpu.preflight.sweep.screen import SweepText


@dataclass(frozen=True, repr=False)
class SweepReport(KeptReport, SweepFields):
    """What a sweep has found, the best mesh first. Made by `xlashard.preflight_sweep`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` keeps it.

    Attributes:
        title: What was asked: the settings file, or `module:function`.
        folder: Where the results and the whole reports are.
        results: One for each mesh: those that fit, the fastest first; those that are out of memory;
            those that can't be; those that failed.
        taken_over: How many of them an earlier sweep in this folder had found.
        prices: Of chips, as the caller gave them.
        without_mesh: The topologies that no mesh of the axes has as many devices as.
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
