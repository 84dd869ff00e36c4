"""Indexing and iterating: on the devices, and without a program where a shard is the answer."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Self

import jax
from jax.sharding import AxisType

from xlashard._jax.transfer import HandleType, assemble, copy_to, make_aval, split
from xlashard.array.holder import Handle, Holder, check_alive, rewrapped, type_text
from xlashard.array.methods import bare_index, on_handle
from xlashard.errors import ArgumentError
from xlashard.geometry import Tiling
from xlashard.sharding import from_jax

# Rows that one program hands out: a program per row would pay its start for each, one for all
# rows of a long array would take minutes to compile.
_ROWS_AT_ONCE = 64


@partial(jax.jit, static_argnums=2)
def _rows(x: Any, start: Any, count: int) -> list[Any]:
    chunk = jax.lax.dynamic_slice_in_dim(x, start, count, axis=0)
    return [jax.lax.index_in_dim(chunk, i, axis=0, keepdims=False) for i in range(count)]


class Indexing(Holder):
    """`x[...]` and `for row in x`."""

    __slots__ = ()

    def __getitem__(self, index: Any, /) -> Self:
        handle = self._handle
        if not handle.is_fully_replicated:
            shard = _whole_shard(handle, index)
            if shard is not None:
                return rewrapped(self, shard)
        return on_handle(self, HandleType.__getitem__, (bare_index(index),), {})

    def __iter__(self) -> Iterator[Self]:
        return self._iterate(reverse=False)

    def __reversed__(self) -> Iterator[Self]:
        return self._iterate(reverse=True)

    def _iterate(self, *, reverse: bool) -> Iterator[Self]:
        check_alive(self)
        if not self.ndim:
            raise ArgumentError(
                f"iteration over an Array without dimensions, {type_text(self)}: for a loop of one "
                "round write x.ravel()"
            )
        length = self.shape[0]
        starts = range(0, length, _ROWS_AT_ONCE)
        return self._chunks(reversed(starts) if reverse else starts, length, reverse)

    def _chunks(self, starts: Any, length: int, reverse: bool) -> Iterator[Self]:
        for start in starts:
            count = min(_ROWS_AT_ONCE, length - start)
            if has_explicit_axes(self._handle):
                rows = [self._handle[i] for i in range(start, start + count)]
            else:
                rows = _rows(self._handle, start, count)
            for row in reversed(rows) if reverse else rows:
                yield rewrapped(self, row)


def has_explicit_axes(handle: Handle) -> bool:
    """Whether the array's sharding is part of its type, where every operation must say it."""
    return AxisType.Explicit in jax.typeof(handle).sharding.mesh.axis_types


def _whole_shard(handle: Handle, index: Any) -> Handle | None:
    """A copy of the shard that a static index names exactly, uncommitted; None if none is meant.

    It is a copy so that it outlives the array, like any other result: whether a slice happens to
    be a shard must make no difference to somebody who then donates the array. Only for arrays
    wholly in this process: in several, all must take the same way.
    """
    if type(index) is not tuple and type(index) is not slice and index is not Ellipsis:
        return None
    bounds = _static_bounds(index, handle.shape)
    if bounds is None or handle.is_deleted() or not handle.is_fully_addressable:
        return None
    sharding = from_jax(handle.sharding)
    tiling = sharding.tiling(handle.shape)
    tile = _tile_at(tiling, handle.shape, bounds)
    if tile is None or has_explicit_axes(handle):
        return None
    shard = split(handle)[tiling.holders(tile)[0]]
    copied = copy_to(shard, shard.sharding, fresh=True)
    aval = make_aval(shard.shape, shard.dtype, shard.sharding, handle.weak_type)
    return assemble(aval, shard.sharding, [copied], committed=False)


def _static_bounds(index: Any, shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """Start and stop per dimension of an index of plain slices; None for any other."""
    entries = list(index) if type(index) is tuple else [index]
    dots = [number for number, entry in enumerate(entries) if entry is Ellipsis]
    unsaid = len(shape) - (len(entries) - len(dots))
    if len(dots) > 1 or unsaid < 0:
        return None
    at = dots[0] if dots else len(entries)
    entries[at : at + 1] = [slice(None)] * unsaid
    if not all(map(_is_plain, entries)):
        return None
    return [entry.indices(size)[:2] for entry, size in zip(entries, shape, strict=True)]


def _is_plain(entry: Any) -> bool:
    return (
        type(entry) is slice
        and (entry.start is None or type(entry.start) is int)
        and (entry.stop is None or type(entry.stop) is int)
        and (entry.step is None or entry.step == 1)
    )


def _tile_at(tiling: Tiling, shape: tuple[int, ...], bounds: list[tuple[int, int]]) -> int | None:
    """The number of the tile with exactly these bounds."""
    tile = 0
    extents = tiling.shard_shape(shape)
    for (start, stop), extent, count in zip(bounds, extents, tiling.counts, strict=True):
        if not extent or start % extent or stop - start != extent:
            return None
        tile = tile * count + start // extent
    return tile
