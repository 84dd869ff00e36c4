"""Preflight of every mesh of given topologies, ranked by estimated step time."""

from xlashard.tpu.preflight.sweep.sweep_report import SweepReport
from xlashard.tpu.preflight.sweep.sweep_results import SweepFacts, SweepResult
from xlashard.tpu.preflight.sweep.sweep_run import (
    AxisRange,
    factorisations,
    find_topologies,
    parse_axes,
    preflight_sweep,
    read_axes,
)

__all__ = [
    "AxisRange",
    "SweepFacts",
    "SweepReport",
    "SweepResult",
    "factorisations",
    "find_topologies",
    "parse_axes",
    "preflight_sweep",
    "read_axes",
]
