"""The report of a preflight: a frozen value that prints itself and travels as JSON."""

import json
from dataclasses import dataclass
from typing import Any, Literal, Self

from xlashard.pjit.report.parts import DonationReport, ReplicationReport, ValueReport
from xlashard.pjit.report.records import Record
from xlashard.tpu.preflight.parts import (
    AxisReport,
    MemoryBreakdown,
    PriceReport,
    ThroughputReport,
    TimeEstimate,
    TopologyReport,
    TrafficReport,
    VersionsReport,
)

FORMAT = 1
"""Number of the JSON format. It grows when a field changes its meaning or goes away."""

_RECORD = Record("preflight report", FORMAT, "xlashard.preflight(f, ...).to_json()")


@dataclass(frozen=True, repr=False)
class PreflightReport:
    """What a program would take, do and cost on a TPU topology.

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
        replicated: Arguments and results above `replicated_above` that every device holds whole.
        replicated_above: Bytes.
        throughput: For a step of training.
        price: By a price that the caller gave.
        compile_seconds: How long the compiler took here.
        versions: What the report depends on besides the program.
    """

    name: str
    title: str
    outcome: Literal["fits", "out of memory"]
    topology: TopologyReport
    mesh: tuple[AxisReport, ...]
    partitioner: str
    memory: MemoryBreakdown
    time: TimeEstimate
    traffic: tuple[TrafficReport, ...]
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    donations: tuple[DonationReport, ...]
    replications: tuple[ReplicationReport, ...]
    replicated: tuple[ValueReport, ...]
    replicated_above: int
    throughput: ThroughputReport | None
    price: PriceReport | None
    compile_seconds: float
    versions: VersionsReport

    @property
    def fits(self) -> bool:
        """Whether the compiler took the program."""
        return self.outcome == "fits"

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, with the number of the format."""
        return _RECORD.to_dict(self)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as JSON, as `docs/preflight.schema.json` describes it.

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
