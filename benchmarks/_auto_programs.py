"""Programs of `benchmarks/auto.py` by name."""

from collections.abc import Mapping

from benchmarks import _auto_decoders, _auto_vision
from benchmarks._auto_program import AutoProgram

PROGRAMS: Mapping[str, AutoProgram] = {
    "dense_1b": _auto_decoders.DENSE_1B,
    "grouped_8b": _auto_decoders.GROUPED_8B,
    "grouped_70b": _auto_decoders.GROUPED_70B,
    "moe": _auto_decoders.MOE,
    "resnet": _auto_vision.RESNET,
}
"""By name."""
