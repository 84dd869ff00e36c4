"""The report of a preflight: a frozen value that prints itself and travels as JSON."""

from dataclasses import dataclass
from typing import Literal

from xlashard.pjit.report.parts import DonationReport, ReplicationReport, ValueReport
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
