"""The report of a preflight: a frozen value that prints itself and travels as JSON."""

from dataclasses import dataclass

from xlashard.pjit.report.kept import KeptReport
from xlashard.tpu.preflight.fields import RECORD, PreflightFields
from xlashard.tpu.preflight.page import fragment, page
from xlashard.tpu.preflight.screen import PreflightText
from xlashard.tpu.preflight.words import counted_chips
from xlashard.wording import in_bytes, in_seconds


@dataclass(frozen=True, repr=False)
class PreflightReport(KeptReport, PreflightFields):
    """What a program would take, do and cost on a TPU topology. Made by `xlashard.preflight`.

    `print(report)`, rich's `print` and `report.print()` show it; `to_json` keeps it, in the form
    that `docs/preflight.schema.json` describes.

    Attributes:
        name: The function's name.
        title: What was asked: the settings file, or `module:function`.
        outcome: `fits`, or `out of memory` where the compiler refuses the program for its memory:
            `memory` says what it would take, and `time` and `traffic` are those of that program.
        topology: The devices.
        mesh: The mesh axes and where they lie on the torus.
        partitioner: `shardy` or `gspmd`.
        memory: Bytes of one device.
        time: How long one execution takes.
        traffic: The collectives, those that take longest first.
        inputs: Shardings of the arguments.
        outputs: Shardings of the results.
        donations: Arguments that were donated, and those that could be.
        replications: Values that are held more often than anyone said.
        replicated: Arguments and results that every device holds whole though mesh axes could cut
            them, the largest first.
        replicated_above: From how many bytes on they are named.
        throughput: For a step of training.
        price: By a price that the caller gave.
        compile_seconds: How long the compiler took here.
        versions: What the report depends on besides the program.
    """

    _record = RECORD

    @property
    def fits(self) -> bool:
        """Whether the compiler took the program."""
        return self.outcome == "fits"

    def _shown(self, *, full: bool) -> PreflightText:
        return PreflightText(self, full=full)

    def __repr__(self) -> str:
        used = f"{in_bytes(self.memory.total_bytes)} of {in_bytes(self.memory.available_bytes)}"
        found = f"{self.outcome}, {used}, {in_seconds(self.time.seconds)}"
        chips = counted_chips(self.topology)
        return f"<PreflightReport of {self.name} on {chips}: {found}; print it>"

    def to_html(self) -> str:
        """The report as one HTML page, which needs nothing from elsewhere.

        It draws the mesh on the torus, the memory of a device, the times and the roofline, and its
        tables sort and filter. Write it in UTF-8.
        """
        return page(self)

    def _repr_html_(self) -> str:
        return fragment(self)
