"""`explain`, and the report of a compiled program that it returns."""

from xlashard.pjit.report.report_changes import compare_programs as compare_programs
