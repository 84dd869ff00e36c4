"""`explain`, and the report of a compiled program that it returns."""

from xlashard.pjit.report.changes.report_changes import compare_programs as compare_programs
from xlashard.pjit.report.explain import explain as explain
from xlashard.pjit.report.model import CollectiveReport as CollectiveReport
from xlashard.pjit.report.model import CostReport as CostReport
from xlashard.pjit.report.model import DonationReport as DonationReport
from xlashard.pjit.report.model import MemoryReport as MemoryReport
from xlashard.pjit.report.model import MoveReport as MoveReport
from xlashard.pjit.report.model import PlaceReport as PlaceReport
from xlashard.pjit.report.model import ReplicationReport as ReplicationReport
from xlashard.pjit.report.model import SourceLine as SourceLine
from xlashard.pjit.report.model import ValueReport as ValueReport
from xlashard.pjit.report.program_report import ProgramReport as ProgramReport
