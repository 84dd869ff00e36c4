"""Inference of `ShardingSpec`s from tilings."""

import math
from itertools import groupby

from xlashard.errors import TilingError
from xlashard.geometry import strides
from xlashard.geometry.tiling import Tiling
from xlashard.legacy.shardings.sharding_spec import (
    Chunked,
    DimSharding,
    MeshAxis,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
)

type _Digit = tuple[int, int, int]
"""Dimension, size and tile stride of a part of a step that is within one dimension."""


def sharding_spec_from_tiling(tiling: Tiling) -> ShardingSpec:
    """Return the sharding spec with the same tiles on the same device positions.

    Args:
        tiling: Which tile each position holds.

    Returns:
        The spec with the fewest cuts and the smallest device grid.

    Raises:
        TilingError: No grid of the devices has the tiles in that order.

    Example:
        >>> sharding_spec_from_tiling(Tiling((2, 1), 4, ((2, 0), (2, 1))))
        ShardingSpec((Chunked((2,)), NoSharding()), (Replicated(2), ShardedAxis(0)))
    """
    if tiling.is_partial:
        raise TilingError(
            f"each device holds one of {tiling.addends} partial results of a {tiling.reduction}: "
            "a ShardingSpec has no unreduced axes"
        )
    if tiling.listed:
        raise TilingError(
            f"no grid of {tiling.num_devices} devices has the tiles {tiling.counts} in this order: "
            "a ShardingSpec can't express it"
        )
    grid = [part for step in tiling.steps for part in _within_dims(tiling.counts, step)]
    # Cuts count from the major one on; of one dimension they stand together.
    cuts = sorted({digit for digit in grid if isinstance(digit, tuple)}, key=lambda d: -d[2])
    chunks = {
        dim: tuple(size for _, size, _ in of_dim)
        for dim, of_dim in groupby(cuts, key=lambda digit: digit[0])
    }
    dims: list[DimSharding] = [
        Chunked(chunks[dim]) if dim in chunks else NoSharding() for dim in range(tiling.ndim)
    ]
    mapping: list[MeshAxis] = [
        ShardedAxis(cuts.index(part)) if isinstance(part, tuple) else part for part in grid
    ]
    return ShardingSpec(tuple(dims), tuple(mapping))


def _within_dims(counts: tuple[int, ...], step: tuple[int, int]) -> list[_Digit | Replicated]:
    """Return the parts of a step, major to minor, each within one dimension or over replicas."""
    size, stride = step
    if stride == 0:
        return [Replicated(size)]
    parts: list[_Digit | Replicated] = []
    for dim, inner in enumerate(strides.row_major(counts)):
        low, high = max(stride, inner), min(stride * size, inner * counts[dim])
        if high > low:
            parts.append((dim, high // low, low))
    if math.prod(part[1] for part in parts if isinstance(part, tuple)) != size:
        raise TilingError(
            f"{size} devices in a row step over the borders of the dimensions that {counts} tiles "
            "cut: a ShardingSpec can't express it"
        )
    return parts
