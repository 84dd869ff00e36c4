"""Indices that name exactly one shard, which then is the answer, without a program over devices."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from xlashard._jax.transfer import Handle, assemble, copy_to, make_aval, split
from xlashard.array.buffer_shape import in_shape
from xlashard.array.guards import free_transfers
from xlashard.geometry import Tiling
from xlashard.geometry.sharding_spec import without_dims
from xlashard.sharding import from_jax

type Bounds = tuple[tuple[int, int], ...]


class _Part(NamedTuple):
    """What an index takes.

    Attributes:
        bounds: Start and stop per dimension.
        dropped: The dimensions that had a number, which the result lacks.
    """

    bounds: Bounds
    dropped: tuple[int, ...] = ()


def has_explicit_axes(handle: Handle) -> bool:
    """Whether the array's sharding is part of its type, where every operation must say it."""
    return AxisType.Explicit in jax.typeof(handle).sharding.mesh.axis_types


def whole_shard(handle: Handle, index: Any) -> Handle | None:
    """A copy of the shard that a static index names exactly, uncommitted; None if none is meant.

    Slices leave its shape alone and cost one transfer within the device. Numbers, in dimensions
    that are cut into single elements, drop dimensions (see `in_shape`).

    It is a copy so that it outlives the array, like any other result: whether a slice happens to
    be a shard must make no difference to somebody who then donates the array. Only for arrays
    wholly in this process: in several, all must take the same way.
    """
    part = _static_part(index, handle.shape)
    if part is None or handle.is_deleted() or not handle.is_fully_addressable:
        return None
    number = _holder(handle.sharding, handle.shape, part.bounds)
    if number is None or has_explicit_axes(handle):
        return None
    return _copy(split(handle)[number], part.dropped, handle.weak_type)


def rows_as_shards(handle: Handle) -> Callable[[int], Handle] | None:
    """`whole_shard` of each index of the first dimension; None unless each is one shard."""
    if handle.is_fully_replicated or not handle.is_fully_addressable or has_explicit_axes(handle):
        return None
    rest = tuple((0, size) for size in handle.shape[1:])
    if _holder(handle.sharding, handle.shape, ((0, 1), *rest)) is None:
        return None
    buffers, weak_type = split(handle), handle.weak_type

    def row(number: int) -> Handle:
        holder = _holder(handle.sharding, handle.shape, ((number, number + 1), *rest))
        return _copy(buffers[holder or 0], (0,), weak_type)

    return row


def _copy(shard: Handle, dropped: tuple[int, ...], weak_type: bool) -> Handle:
    """A copy of a buffer on its device, uncommitted, without some dimensions of size 1."""
    there = shard.sharding
    with free_transfers():
        if dropped:
            return in_shape(shard, without_dims(shard.shape, dropped), weak_type)
        copied = copy_to(shard, there, fresh=True)
    aval = make_aval(copied.shape, shard.dtype, there, weak_type)
    return assemble(aval, there, [copied], committed=False)


@lru_cache(maxsize=4096)
def _holder(sharding: Any, shape: tuple[int, ...], bounds: Bounds) -> int | None:
    """The first device position whose shard has these bounds."""
    tiling = from_jax(sharding).tiling(shape)
    tile = _tile_at(tiling, shape, bounds)
    return None if tile is None else tiling.holders(tile)[0]


def _static_part(index: Any, shape: tuple[int, ...]) -> _Part | None:
    """What an index of numbers and plain slices takes; None for any other."""
    entries = list(index) if type(index) is tuple else [index]
    dots = [number for number, entry in enumerate(entries) if entry is Ellipsis]
    unsaid = len(shape) - (len(entries) - len(dots))
    if len(dots) > 1 or unsaid < 0:
        return None
    at = dots[0] if dots else len(entries)
    entries[at : at + 1] = [slice(None)] * unsaid
    bounds: list[tuple[int, int]] = []
    dropped: list[int] = []
    for dim, (entry, size) in enumerate(zip(entries, shape, strict=True)):
        if type(entry) is slice and _is_plain(entry):
            bounds.append(entry.indices(size)[:2])
        elif (type(entry) is int or isinstance(entry, np.integer)) and -size <= entry < size:
            start = int(entry) % size
            bounds.append((start, start + 1))
            dropped.append(dim)
        else:
            return None
    return _Part(tuple(bounds), tuple(dropped))


def _is_plain(cut: slice) -> bool:
    return (
        (cut.start is None or type(cut.start) is int)
        and (cut.stop is None or type(cut.stop) is int)
        and (cut.step is None or cut.step == 1)
    )


def _tile_at(tiling: Tiling, shape: tuple[int, ...], bounds: Bounds) -> int | None:
    """The number of the tile with exactly these bounds."""
    tile = 0
    extents = tiling.shard_shape(shape)
    for (start, stop), extent, count in zip(bounds, extents, tiling.counts, strict=True):
        if not extent or start % extent or stop - start != extent:
            return None
        tile = tile * count + start // extent
    return tile
