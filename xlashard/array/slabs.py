"""Moving an array slab by slab, so that a program needs little memory besides the two ends.

Whatever collectives a partitioner finds for a change of tiles, they need buffers for what they
send and receive: about two shards for an all-to-all, and up to the whole array on each device where
it finds nothing better. Cut into slabs that every device has its part of, before and after, the
same change needs them for one slab at a time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xlashard._jax.shardings import Device
from xlashard.geometry import Tiling
from xlashard.lazily import dataclass
from xlashard.sharding import GSPMDSharding


@dataclass(frozen=True)
class Slabs:
    """How to cut.

    Attributes:
        shape: The array's shape with each dimension in two: `[tiles, extent, ...]`, of which only
            the first is dealt out, before and after.
        dim: The dimension of that shape to cut.
        count: Into how many.
    """

    shape: tuple[int, ...]
    dim: int
    count: int

    @property
    def thickness(self) -> int:
        """Elements of a slab along the dimension; slabs overlap where that doesn't divide."""
        return -(-self.shape[self.dim] // self.count)


def cut_into_slabs(
    shape: Sequence[int], source: Tiling, target: Tiling, count: int
) -> Slabs | None:
    """Slabs along the dimension with most room for them; None where none has any.

    Args:
        shape: Of the array; it divides into the tiles.
        source: Its tiles before.
        target: Its tiles after.
        count: How many slabs there should be; there may be fewer.
    """
    tiles = list(map(math.lcm, source.counts, target.counts))
    extents = [n // t for n, t in zip(shape, tiles, strict=True)]
    longest = max(extents, default=1)
    if longest < 2:
        return None
    halves = tuple(n for pair in zip(tiles, extents, strict=True) for n in pair)
    return Slabs(halves, 2 * extents.index(longest) + 1, min(count, longest))


def move_slab(
    slabs: Slabs, source: Tiling, target: Tiling, devices: tuple[Device, ...]
) -> Callable[[Any, Any, Any], list[Any]]:
    """A function for a program `(x, out, number)` that gives `out` with that slab of `x` in it."""
    before, after = (_in_halves(tiling, devices) for tiling in (source, target))
    last = slabs.shape[slabs.dim] - slabs.thickness
    constrain = jax.lax.with_sharding_constraint

    def move(x: Any, out: Any, number: Any) -> list[Any]:
        start = jnp.minimum(number * slabs.thickness, last)
        halves = constrain(jax.lax.reshape(x, slabs.shape), before)
        slab = jax.lax.dynamic_slice_in_dim(halves, start, slabs.thickness, slabs.dim)
        slab = constrain(constrain(slab, before), after)
        halves = constrain(jax.lax.reshape(out, slabs.shape), after)
        halves = jax.lax.dynamic_update_slice_in_dim(halves, slab, start, slabs.dim)
        return [jax.lax.reshape(constrain(halves, after), x.shape)]

    return move


def _in_halves(tiling: Tiling, devices: tuple[Device, ...]) -> GSPMDSharding:
    counts = tuple(n for count in tiling.counts for n in (count, 1))
    halves = Tiling(counts, tiling.num_devices, tiling.steps, tiling.listed)
    return GSPMDSharding(devices, halves.to_tile_assignment())
