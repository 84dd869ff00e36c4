"""Reshards within the host memory that emulated devices on a CPU share.

A block can be read in place, and where it equals a tile of the target, the target shares it. The
rest costs one copy of each distinct byte and no program.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from xlashard._jax.runtime.transfer import (
    Handle,
    aligned_blocks,
    aligned_empty,
    collect_garbage,
    host_view,
    is_takeable,
    put,
    split,
)
from xlashard.array.host.copying import Copy, copy_all
from xlashard.array.placement.target import ResolvedSharding
from xlashard.array.reshard.p2p import TilingOnDevices, exchange

_PLANS_KEPT = 512

_SMALL_BYTES = 1 << 20


def reshard_in_host_memory(
    handle: Handle,
    source: ResolvedSharding,
    target: ResolvedSharding,
    *,
    donate: bool = False,
    fresh: bool = False,
) -> Handle:
    """Reshard by copies within host memory; waits until the source is computed.

    Args:
        handle: The array.
        source: Its sharding.
        target: Sharding of the result.
        donate: Whether each buffer of the source is freed as soon as it is copied.
        fresh: Whether blocks that are in place are copied too.
    """
    plan = _copy_plan(
        handle.shape,
        handle.itemsize,
        (source.tiling, source.sharding.devices),
        (target.tiling, target.sharding.devices),
    )
    windows = [host_view(buffer)[0] for buffer in split(handle)]
    blocks: dict[int, np.ndarray] = {}
    if not fresh:
        for part in plan.whole:
            window = windows[part.source][part.source_index]
            if is_takeable(window):
                blocks[part.tile] = window
    missing = [number for number in range(plan.num_tiles) if number not in blocks]
    parts = [part for part in plan.parts if part.tile not in blocks]
    blocks |= zip(missing, _blank(len(missing), target.shard_shape, handle.dtype), strict=True)
    if donate:
        _copy_and_free(handle, parts, windows, blocks)
    else:
        copy_all(_copies(parts, windows, blocks))
    aval = target.aval(handle.dtype, handle.weak_type)
    return put(
        aval,
        target.jax_sharding,
        [blocks[n] for n in plan.tile_numbers],
        target.devices,
        alias=True,
    )


def _blank(count: int, shape: tuple[int, ...], dtype: np.dtype) -> Sequence[np.ndarray]:
    """Return blocks that devices can use, each in memory of its own where that matters."""
    if count * math.prod(shape) * dtype.itemsize < _SMALL_BYTES:
        # Pooled blocks are freed together.
        return [block[...] for block in aligned_blocks(count, shape, dtype)] if count else []
    return [aligned_empty(shape, dtype) for _ in range(count)]


class _Part(NamedTuple):
    """Part of a tile, and its position in the source.

    Attributes:
        tile: Number of the tile.
        source: Number of the source buffer.
        tile_index: Index in the tile. The ellipsis in both indices keeps a view on an array without
            dimensions a view.
        source_index: Index in the source buffer.
    """

    tile: int
    source: int
    tile_index: tuple[Any, ...]
    source_index: tuple[Any, ...]


class _CopyPlan(NamedTuple):
    """Copies between devices that share memory; replicas share one block.

    Attributes:
        num_tiles: Number of distinct tiles of the target.
        tile_numbers: Tile number of each device of the target.
        whole: Tiles that lie in one source buffer.
        parts: Parts of all tiles, ordered by source.
    """

    num_tiles: int
    tile_numbers: tuple[int, ...]
    whole: tuple[_Part, ...]
    parts: tuple[_Part, ...]


@lru_cache(maxsize=_PLANS_KEPT)
def _copy_plan(
    shape: tuple[int, ...], itemsize: int, source: TilingOnDevices, target: TilingOnDevices
) -> _CopyPlan:
    senders, pieces_by_target = exchange(shape, itemsize, source, target)
    numbers: dict[int, int] = {}
    first: list[int] = []
    tiles = target[0].tile_ids().tolist()
    for device, tile in enumerate(tiles):
        if tile not in numbers:
            numbers[tile] = len(first)
            first.append(device)
    position = {sender: n for n, sender in enumerate(senders)}
    parts = [
        _Part(n, position[p.source], (*p.destination_index, ...), (*p.source_index, ...))
        for n, device in enumerate(first)
        for p in pieces_by_target[device]
    ]
    return _CopyPlan(
        num_tiles=len(first),
        tile_numbers=tuple(numbers[tile] for tile in tiles),
        whole=tuple(part for part in parts if len(pieces_by_target[first[part.tile]]) == 1),
        parts=tuple(sorted(parts, key=lambda part: part.source)),
    )


def _copies(
    parts: Sequence[_Part], windows: Sequence[np.ndarray], blocks: Mapping[int, np.ndarray]
) -> list[Copy]:
    return [
        (blocks[tile][tile_index], windows[source][source_index])
        for tile, source, tile_index, source_index in parts
    ]


def _copy_and_free(
    handle: Handle,
    parts: Sequence[_Part],
    windows: list[np.ndarray],
    blocks: Mapping[int, np.ndarray],
) -> None:
    """Copy buffer by buffer; blocks take up memory only as they are written."""
    by_source: dict[int, list[_Part]] = {n: [] for n in range(len(windows))}
    for part in parts:
        by_source[part.source].append(part)
    buffers = split(handle)
    for number, group in by_source.items():
        copy_all(_copies(group, windows, blocks))
        windows[number] = np.empty(0, handle.dtype)
        buffers[number].delete()
        collect_garbage()
