"""`explain`, and the report of a compiled program that it returns."""

from xlashard.analysis.explain.report_changes import compare_programs as compare_programs
