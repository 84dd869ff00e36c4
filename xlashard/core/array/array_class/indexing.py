"""Indexing and iteration on the devices, without a program where a shard is the result."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from xlashard._jax import originals
from xlashard._jax.lowering import uses_shardy
from xlashard._jax.runtime.global_state import allow_transfers
from xlashard._jax.runtime.transfer import Handle, HandleType, assemble, copy_to, make_aval, split
from xlashard.core.array.array_class.base import ArrayBase, check_alive, own_handles, type_text
from xlashard.core.array.array_class.wrappers import unwrap, wrap_jax_function, wrap_results
from xlashard.core.array.placement.read import check_reduced
from xlashard.core.array.placement.reshape import reshape_buffer
from xlashard.core.array.reshard.execute import uncommit
from xlashard.core.sharding import from_jax
from xlashard.errors import ArgumentError
from xlashard.geometry import Tiling
from xlashard.support.tracebacks import shorten

_LARGEST = 2**31 - 1
"""Largest 32-bit integer."""


def is_long(x: Any) -> bool:
    """Return True if a dimension of an array is longer than a 32-bit integer can count."""
    return x.size > _LARGEST and max(x.shape) > _LARGEST


def wide_integers(x: Any) -> AbstractContextManager[Any]:
    """Return a block in which integers have 64 bits if an array is long, else an empty one."""
    return jax.enable_x64(True) if is_long(x) else nullcontext()


def widened(index: Any) -> Any:
    """Return an index with its arrays of integers as int64; call it in `wide_integers`."""
    if isinstance(index, tuple | list):
        return type(index)(map(widened, index))
    is_array = isinstance(index, jax.Array | np.ndarray | np.generic)
    if is_array and jnp.issubdtype(index.dtype, np.integer):
        return index.astype(np.int64)
    return index


type Bounds = tuple[tuple[int, int], ...]


class _SelectedBounds(NamedTuple):
    """Bounds that an index selects.

    Attributes:
        bounds: Start and stop per dimension.
        dropped: Dimensions with an integer, which the result lacks.
    """

    bounds: Bounds
    dropped: tuple[int, ...] = ()


def has_explicit_axes(handle: Handle) -> bool:
    """Return True if the sharding is part of the type, so that operations must specify it."""
    return AxisType.Explicit in jax.typeof(handle).sharding.mesh.axis_types


def whole_shard(handle: Handle, index: Any) -> Handle | None:
    """Return an uncommitted copy of the one shard that a static index selects, or None.

    A slice keeps the shape and costs one transfer within the device. An integer, in a dimension
    whose tiles have one element, drops the dimension (see `reshape_buffer`).

    A copy outlives the array, as any other result does: donating the array must not depend on an
    earlier slice being a shard. Only for arrays wholly in this process: all processes must take the
    same path.
    """
    part = _static_part(index, handle.shape)
    if part is None or handle.is_deleted() or not handle.is_fully_addressable:
        return None
    number = _holder(handle.sharding, handle.shape, part.bounds)
    if number is None or has_explicit_axes(handle):
        return None
    return _copy(split(handle)[number], part.dropped, handle.weak_type)


def rows_as_shards(handle: Handle) -> Callable[[int], Handle] | None:
    """Return `whole_shard` of each index of the first dimension; None unless each is one shard."""
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
    """Copy a buffer on its device, uncommitted, without some dimensions of size 1."""
    with allow_transfers():
        if dropped:
            kept = tuple(size for dim, size in enumerate(shard.shape) if dim not in dropped)
            return reshape_buffer(shard, kept, weak_type)
        return uncommit(copy_to(shard, shard.sharding, fresh=True), weak_type)


@lru_cache(maxsize=4096)
def _holder(sharding: Any, shape: tuple[int, ...], bounds: Bounds) -> int | None:
    """Return the first device position whose shard has these bounds."""
    tiling = from_jax(sharding).tiling(shape)
    tile = _tile_at(tiling, shape, bounds)
    return None if tile is None else tiling.replicas(tile)[0]


def _static_part(index: Any, shape: tuple[int, ...]) -> _SelectedBounds | None:
    """Return the bounds of an index of integers and plain slices; None for any other index."""
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
    return _SelectedBounds(tuple(bounds), tuple(dropped))


def _is_plain(cut: slice) -> bool:
    return (
        (cut.start is None or type(cut.start) is int)
        and (cut.stop is None or type(cut.stop) is int)
        and (cut.step is None or cut.step == 1)
    )


def _tile_at(tiling: Tiling, shape: tuple[int, ...], bounds: Bounds) -> int | None:
    """Return the number of the tile with exactly these bounds."""
    tile = 0
    extents = tiling.shard_shape(shape)
    for (start, stop), extent, count in zip(bounds, extents, tiling.counts, strict=True):
        if not extent or start % extent or stop - start != extent:
            return None
        tile = tile * count + start // extent
    return tile


def _joined_slices(handle: Handle, index: Any) -> Handle | None:
    """Return a short static slice on one device, cut from the shards that hold it, or None.

    XLA would gather the whole array on every device first.
    """
    part = _static_part(index, handle.shape)
    if part is None or part.dropped or not handle.is_fully_addressable or has_explicit_axes(handle):
        return None
    tiling = from_jax(handle.sharding).tiling(handle.shape)
    extents = tiling.shard_shape(handle.shape)
    lengths = [stop - start for start, stop in part.bounds]
    if min(lengths) <= 0 or math.prod(lengths) > math.prod(extents):
        return None
    shards = split(handle)

    def joined(tile: tuple[int, ...]) -> Any:
        """Join the slices of all tiles whose numbers begin with the given ones."""
        dim = len(tile)
        if dim < handle.ndim:
            (start, stop), extent = part.bounds[dim], extents[dim]
            numbers = range(start // extent, (stop - 1) // extent + 1)
            pieces = [joined((*tile, number)) for number in numbers]
            return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, dim)
        offsets = [n * extent for n, extent in zip(tile, extents, strict=True)]
        starts = [max(b[0] - o, 0) for b, o in zip(part.bounds, offsets, strict=True)]
        stops = [min(b[1] - o, e) for b, o, e in zip(part.bounds, offsets, extents, strict=True)]
        number = int(np.ravel_multi_index(tile, tiling.counts))
        sizes = tuple(b - a for a, b in zip(starts, stops, strict=True))
        cut = _cut(shards[tiling.replicas(number)[0]], tuple(map(np.int64, starts)), sizes)
        return originals.device_put(cut, first)

    with allow_transfers(), wide_integers(handle):
        first = shards[0].sharding
        whole = joined(())
        aval = make_aval(whole.shape, handle.dtype, first, handle.weak_type)
        return assemble(aval, first, [whole], committed=False)


@partial(originals.jit, static_argnums=2)
def _cut(x: Any, starts: Any, sizes: tuple[int, ...]) -> Any:
    return jax.lax.dynamic_slice(x, starts, sizes)


# Rows per program: one program per row would pay its launch for each, one for all rows of a long
# array would take minutes to compile.
_ROWS_AT_ONCE = 64


@partial(originals.jit, static_argnums=2)
def _rows(x: Any, start: Any, count: int) -> list[Any]:
    """Return rows from `start` on; from None, which no device waits for, those of a short array."""
    chunk = x if start is None else jax.lax.dynamic_slice_in_dim(x, start, count, axis=0)
    return [jax.lax.index_in_dim(chunk, i, axis=0, keepdims=False) for i in range(count)]


def _rows_uncut(handle: Any) -> Any:
    """Return the array with an unsharded first dimension, which JAX requires on explicit axes."""
    sharding = handle.sharding
    entries = sharding.spec.partitions
    if entries[:1] in ((), (None,)):
        return handle
    whole_rows = sharding.update(spec=sharding.spec.update(partitions=(None, *entries[1:])))
    with allow_transfers():
        return originals.device_put(handle, whole_rows)


_get_item = wrap_jax_function(HandleType.__getitem__, "indexing", None)


class Indexing(ArrayBase):
    """Implementation of `x[...]` and `for row in x`."""

    __slots__ = ()

    def __getitem__(self, index: Any, /) -> Self:
        handle = self._handle
        try:
            if not handle.is_fully_replicated:
                check_reduced(handle)
                shard = whole_shard(handle, index)
                if shard is None and is_long(handle):
                    shard = _joined_slices(handle, index)
                if shard is not None:
                    return wrap_results(type(self), shard, ())
            if is_long(handle):
                with wide_integers(handle):
                    return _get_item(self, widened(unwrap(index)))
            return _get_item(self, index)
        except Exception as error:
            shorten(error)
            raise

    def __iter__(self) -> Iterator[Self]:
        return self._iterate(reverse=False)

    def __reversed__(self) -> Iterator[Self]:
        return self._iterate(reverse=True)

    def _iterate(self, *, reverse: bool) -> Iterator[Self]:
        check_alive(self)
        if not self.ndim:
            raise ArgumentError(
                f"iteration over an Array without dimensions, {type_text(self)}, is not "
                "possible: write x.ravel()"
            )
        check_reduced(self._handle)
        length = self.shape[0]
        starts = range(0, length, _ROWS_AT_ONCE)
        return self._chunks(reversed(starts) if reverse else starts, length, reverse)

    def _chunks(self, starts: Any, length: int, reverse: bool) -> Iterator[Self]:
        row_at = rows_as_shards(self._handle)
        if row_at is not None:
            for row in range(length - 1, -1, -1) if reverse else range(length):
                check_alive(self)
                yield wrap_results(type(self), row_at(row), ())
            return
        typed = None
        if has_explicit_axes(self._handle):
            typed = _rows_uncut(self._handle)
        elif not uses_shardy():
            typed = self._handle  # JAX can't name all tiles that GSPMD chooses for many rows
        for start in starts:
            check_alive(self)
            count = min(_ROWS_AT_ONCE, length - start)
            with allow_transfers(), wide_integers(self._buffers):
                if typed is not None:
                    rows = [typed[i] for i in range(start, start + count)]
                else:
                    rows = _rows(self._handle, None if count == length else start, count)
            # Rows have the devices of the array, and are committed if it is.
            yield from own_handles(type(self), rows[::-1] if reverse else rows)
