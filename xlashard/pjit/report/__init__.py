"""Comparison of reports of `explain`."""

from xlashard.analysis.explain.comparison import compare_programs as compare_programs
