"""Preflight of every mesh of given topologies, ranked by estimated step time."""

from xlashard.tpu.preflight.sweep.mesh_shapes import (
    AxisRange,
    factorisations,
    parse_axes,
    read_axes,
)
from xlashard.tpu.preflight.sweep.sweep_report import SweepReport
from xlashard.tpu.preflight.sweep.sweep_results import SweepFacts, SweepResult
from xlashard.tpu.preflight.sweep.sweep_run import find_topologies, preflight_sweep

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
