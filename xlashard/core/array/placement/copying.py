"""Copies within the memory of the host, and staging buffers for tiles of host values.

The first touch of new memory dominates a large copy, as the kernel maps it page by page in the
touching thread: two threads take half the time of one.

A staging buffer is a copy of a tile that devices sharing the memory of the host use as it is.
Replicas share one.
"""

import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from xlashard._jax.runtime.transfer import (
    aligned_blocks,
    aligned_empty,
    aligned_strides,
    collect_garbage,
)
from xlashard.core.array.placement.target import ResolvedSharding

type Copy = tuple[np.ndarray, np.ndarray]
"""Destination and source, of one shape and dtype."""

# Starting a thread takes about as long as copying a tenth of this many bytes.
_BYTES_PER_THREAD = 4 << 20
_MOST_THREADS = 16

# Bytes of one piece of work. Contiguous memory is copied past the caches if there is enough of it;
# strided pieces share pages with their neighbours.
_CONTIGUOUS_STRETCH = 16 << 20
_STRIPED_STRETCH = 2 << 20


def copy_all(copies: Sequence[Copy]) -> None:
    """Make copies in any order; no two destinations may overlap.

    After an exception, including `KeyboardInterrupt`, no thread writes any more.
    """
    copies = [(_plain(to), _plain(source)) for to, source in copies]
    threads = _threads_for(sum(to.nbytes for to, _ in copies))
    if threads == 1:
        for to, source in copies:
            np.copyto(to, source)
        return
    _work_off(sorted([s for copy in copies for s in _stretches(*copy)], key=_address), threads)


def private_copy(value: np.ndarray) -> np.ndarray:
    """Return a contiguous copy that a CPU device can use as its buffer."""
    out = aligned_empty(value.shape, value.dtype)
    copy_all([(out, value)])
    return out


def _plain(x: np.ndarray) -> np.ndarray:
    """Return a view with a dtype of NumPy, which NumPy copies faster than extension dtypes."""
    if x.dtype.kind != "V" or x.itemsize not in (1, 2, 4, 8):
        return x
    return x.view(f"u{x.itemsize}")


def _threads_for(total: int) -> int:
    if total < 2 * _BYTES_PER_THREAD:
        return 1  # without a system call
    processors = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    return max(1, min(processors, _MOST_THREADS, total // _BYTES_PER_THREAD))


def _stretches(to: np.ndarray, source: np.ndarray) -> list[Copy]:
    """Split a copy into pieces of limited size, along the dimension with the longest stride."""
    striped = not (to.flags.c_contiguous and source.flags.c_contiguous)
    limit = _STRIPED_STRETCH if striped else _CONTIGUOUS_STRETCH
    if to.nbytes <= limit or to.size < 2:
        return [(to, source)]
    dim = max(range(to.ndim), key=lambda d: (to.shape[d] > 1, abs(source.strides[d])))
    size = to.shape[dim]
    parts = min(size, -(-to.nbytes // limit))
    edges = [size * n // parts for n in range(parts + 1)]
    before = (slice(None),) * dim
    cuts = [(*before, slice(a, b)) for a, b in pairwise(edges)]
    # A piece may still be too large where the dimension has few elements.
    return [part for cut in cuts for part in _stretches(to[cut], source[cut])]


def _address(copy: Copy) -> int:
    """Return the address of a piece, on the strided side if there is one."""
    to, source = copy
    return to.ctypes.data if source.flags.c_contiguous else source.ctypes.data


def _work_off(stretches: list[Copy], threads: int) -> None:
    waiting = stretches[::-1]

    def work() -> None:
        while True:
            try:
                to, source = waiting.pop()
            except IndexError:
                return
            np.copyto(to, source)

    def help_out() -> None:
        while waiting:
            try:
                copy = waiting.pop()
            except IndexError:  # another thread was faster
                return
            try:
                np.copyto(*copy)
            except Exception:  # the caller's thread raises it again
                waiting.append(copy)
                return

    helpers = _started(help_out, threads - 1)
    try:
        work()
    except BaseException:
        waiting.clear()
        raise
    finally:
        for helper in helpers:
            helper.join()
    work()


def _started(work: Callable[[], None], count: int) -> list[threading.Thread]:
    """Start threads; fewer if the process reaches its limit or is about to exit."""
    helpers: list[threading.Thread] = []
    for _ in range(count):
        # The caller joins it, and Python must not exit while it copies.
        helper = threading.Thread(target=work, name="xlashard copy", daemon=False)
        try:
            helper.start()
        except RuntimeError:
            break
        helpers.append(helper)
    return helpers


# A larger tile has memory of its own, freed with its last device.
_LARGEST_POOLED = 1 << 16

# Bytes of a pool for small tiles: few enough to be freed soon after the last of them, enough for
# large pages of the kernel, which cost a fifth of as many small ones.
_POOL = 4 << 20


class MemoryPool:
    """Memory for the tiles of the values of one call.

    Args:
        expected: Bytes of small tiles in the call.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._pool = np.empty(0, np.uint8)
        self._start = self._end = 0
        collect_garbage()  # frees memory of deleted buffers before new memory is allocated

    def blocks(self, count: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """Return pooled blocks, `[count, *shape]`; None if they are too large for the pool."""
        if math.prod(shape) * dtype.itemsize > _LARGEST_POOLED:
            return None
        strides = aligned_strides(shape, dtype)
        needed = count * strides[0]
        if self._start + needed > self._end:
            self._refill(needed)
        start, self._start = self._start, self._start + needed
        return np.ndarray((count, *shape), dtype, self._pool, start, strides)

    def _refill(self, needed: int) -> None:
        size = max(needed, min(self._expected, _POOL))
        self._expected -= size
        self._pool = aligned_blocks(1, (size,), np.uint8)[0]
        self._start, self._end = 0, size


class StagingBuffer:
    """Slices of host values of one shape under one sharding, cached.

    Args:
        target: The sharding.
    """

    def __init__(self, target: ResolvedSharding) -> None:
        self._target = target

    @cached_property
    def _rows(self) -> list[int] | None:
        """Number of the tile of each device; None if every device has its own."""
        numbers: dict[int, int] = {}
        rows = [numbers.setdefault(tile, len(numbers)) for tile in self._target.tiles]
        return None if len(numbers) == len(rows) else rows

    @cached_property
    def _indices(self) -> list[tuple[slice, ...]]:
        """Index of each distinct tile of this process."""
        by_tile = dict(zip(self._target.tiles, self._target.indices, strict=True))
        return list(by_tile.values())

    @cached_property
    def _regrouping(self) -> tuple[tuple[int, ...], ...] | None:
        """Reshape, transpose and shape of the value as tiles.

        The first shape has each dimension as tiles and elements of a tile; the permutation puts
        tiles first. None unless this process holds all tiles in order.
        """
        counts, shard = self._target.tiling.counts, self._target.shard_shape
        held = list(dict.fromkeys(self._target.tiles))
        if held != list(range(math.prod(counts))) or len(shard) != len(counts):
            return None
        pairs = [n for pair in zip(counts, shard, strict=True) for n in pair]
        dims = range(len(pairs))
        return tuple(pairs), (*dims[::2], *dims[1::2]), (*counts, *shard)

    def pieces(
        self, value: np.ndarray, dtype: np.dtype, memory: MemoryPool, later: list[Copy]
    ) -> list[np.ndarray]:
        """Return one block of memory per device of this process.

        Args:
            value: The whole value.
            dtype: The dtype on devices.
            memory: Pool of the blocks.
            later: List to which the remaining copies are appended; small ones are made at once.
        """
        count = len(self._indices)
        pooled = memory.blocks(count, self._target.shard_shape, dtype)
        if pooled is None:
            blocks = [aligned_empty(self._target.shard_shape, dtype) for _ in range(count)]
            self._fill(blocks, value, later)
        else:
            blocks = self._fill_at_once(pooled, value)
        return blocks if self._rows is None else [blocks[row] for row in self._rows]

    def _fill(self, blocks: list[np.ndarray], value: np.ndarray, later: list[Copy]) -> None:
        copies = [(block, value[i]) for block, i in zip(blocks, self._indices, strict=True)]
        if value.dtype == blocks[0].dtype:
            later += copies
            return
        for block, piece in copies:
            # On this thread, whose NumPy error state the caller has set.
            np.copyto(block, piece, casting="unsafe")

    def _fill_at_once(self, pooled: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
        blocks = list(pooled) if pooled.ndim > 1 else [pooled[i, ...] for i in range(len(pooled))]
        if self._regrouping is None:
            for block, index in zip(blocks, self._indices, strict=True):
                np.copyto(block, value[index], casting="unsafe")
            return blocks
        split, order, grid = self._regrouping
        tiles = value.reshape(split).transpose(order)
        np.copyto(pooled.reshape(grid), tiles, casting="unsafe")
        return blocks
