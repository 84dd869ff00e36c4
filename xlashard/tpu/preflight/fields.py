"""The facts of a preflight report, without what shows and keeps them."""

from dataclasses import dataclass
from typing import Literal

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

RECORD = Record("preflight report", FORMAT, "xlashard.preflight(f, ...).to_json()")
"""How a report travels as JSON."""


@dataclass(frozen=True, repr=False)
class PreflightFields:
    """The facts of a report; `PreflightReport`, which can print them, says what each is."""

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
