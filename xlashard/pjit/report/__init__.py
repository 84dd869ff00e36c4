"""`explain`, and the report of a compiled program that it returns."""

from xlashard.pjit.report.explain import explain
from xlashard.pjit.report.model import (
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
from xlashard.pjit.report.program_report import ProgramReport

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
