"""Every mesh of every topology in question, compiled and ranked by the estimated time of a step."""

from xlashard.tpu.preflight.sweep.api import preflight_sweep
from xlashard.tpu.preflight.sweep.factorisations import AxisRange, factorisations
from xlashard.tpu.preflight.sweep.fields import SweepResult
from xlashard.tpu.preflight.sweep.results import SweepReport

__all__ = ["AxisRange", "SweepReport", "SweepResult", "factorisations", "preflight_sweep"]
