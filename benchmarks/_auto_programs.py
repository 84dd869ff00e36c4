"""Programs of `benchmarks/auto.py` by name."""

from collections.abc import Mapping

from benchmarks import _auto_decoders as decoders
from benchmarks import _auto_decoding, _auto_recurrent, _auto_sparse, _auto_vision
from benchmarks._auto_program import BenchmarkProgram

PROGRAMS: Mapping[str, BenchmarkProgram] = {
    "dense_1b": decoders.DENSE_1B,
    "grouped_8b": decoders.GROUPED_8B,
    "grouped_70b": decoders.GROUPED_70B,
    "moe": decoders.MOE,
    "long": decoders.LONG,
    "lora": decoders.LORA,
    "decode": _auto_decoding.DECODE,
    "selective_scan": _auto_recurrent.SELECTIVE_SCAN,
    "resnet": _auto_vision.RESNET,
    "vit": _auto_vision.VIT,
    "unet": _auto_vision.UNET,
    "recommender": _auto_sparse.RECOMMENDER,
    "graph": _auto_sparse.GRAPH,
    "neighbors": _auto_sparse.NEIGHBORS,
    "alternating": _auto_sparse.ALTERNATING,
    "radiance": _auto_vision.RADIANCE,
}
"""By name."""
