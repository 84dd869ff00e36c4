"""Comparison of reports of `explain`."""

from xlashard.analysis.explain.report_changes import compare_programs as compare_programs
