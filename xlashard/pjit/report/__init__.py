"""The picture of a program: `explain` and the report that it gives."""

from xlashard.pjit.report.explain import explain
from xlashard.pjit.report.parts import (
    CollectiveReport,
    CostReport,
    DonationReport,
    MemoryReport,
    MoveReport,
    PlaceReport,
    ReplicationReport,
    SourceLine,
    ValueReport,
)
from xlashard.pjit.report.report import ProgramReport

__all__ = [
    "CollectiveReport",
    "CostReport",
    "DonationReport",
    "MemoryReport",
    "MoveReport",
    "PlaceReport",
    "ProgramReport",
    "ReplicationReport",
    "SourceLine",
    "ValueReport",
    "explain",
]
