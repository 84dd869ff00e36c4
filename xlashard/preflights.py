"""Preflights: compile a program for TPUs or GPUs elsewhere, and report memory, time and cost.

The rooms behind it are `xlashard.predict.preflight` and `xlashard.predict.sweep`.
"""

import typing as _typing

from xlashard.support.lazily import on_demand as _on_demand

if _typing.TYPE_CHECKING:
    from xlashard.predict.costs.kernel_costs import KernelCost
    from xlashard.predict.preflight.preflight_run import preflight
    from xlashard.predict.preflight.report.comparison import (
        Breach,
        Comparison,
        Limit,
        broken_limits,
        compare,
        page,
        read_budget,
    )
    from xlashard.predict.preflight.report.measured import MeasuredStep, compare_with_profile
    from xlashard.predict.preflight.report.preflight_report import PreflightReport, make_schema
    from xlashard.predict.preflight.report.pricing import Workload
else:
    _report = "xlashard.predict.preflight.report"
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.predict.costs.kernel_costs": ("KernelCost",),
            "xlashard.predict.preflight.preflight_run": ("preflight",),
            f"{_report}.comparison": (
                *("Breach", "Comparison", "Limit", "broken_limits", "compare"),
                *("page", "read_budget"),
            ),
            f"{_report}.measured": ("MeasuredStep", "compare_with_profile"),
            f"{_report}.preflight_report": ("PreflightReport", "make_schema"),
            f"{_report}.pricing": ("Workload",),
        },
    )

__all__ = [
    "Breach",
    "Comparison",
    "KernelCost",
    "Limit",
    "MeasuredStep",
    "PreflightReport",
    "Workload",
    "broken_limits",
    "compare",
    "compare_with_profile",
    "make_schema",
    "page",
    "preflight",
    "read_budget",
]
