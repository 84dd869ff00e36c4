"""Between devices whose memory is the host's own: emulated devices on a CPU.

There a block that one device holds can be read where it lies, and where it lies as the
destination wants it, it is the destination's too. What is left costs one copy of each distinct
byte, and no program.
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
    make_aval,
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
    """The same value in another place; waits until the source is computed.

    Args:
        handle: The source.
        source: Where it is.
        target: Where to.
        donate: Frees each buffer of the source as soon as all of it is in its new place.
        fresh: Copies also blocks that lie there as they are wanted.
    """
    deal = _copy_plan(
        handle.shape,
        handle.itemsize,
        (source.tiling, source.sharding.devices),
        (target.tiling, target.sharding.devices),
    )
    windows = [host_view(buffer)[0] for buffer in split(handle)]
    blocks: dict[int, np.ndarray] = {}
    if not fresh:
        for part in deal.whole:
            window = windows[part.source][part.source_index]
            if is_takeable(window):
                blocks[part.tile] = window
    missing = [number for number in range(deal.num_tiles) if number not in blocks]
    parts = deal.parts if len(missing) == deal.num_tiles else _parts_of(deal, missing)
    blocks |= zip(missing, _blank(len(missing), target.shard_shape, handle.dtype), strict=True)
    if donate:
        _copy_and_free(handle, parts, windows, blocks)
    else:
        copy_all(_copies(parts, windows, blocks))
    aval = make_aval(target.shape, handle.dtype, target.jax_sharding, handle.weak_type)
    return put(
        aval, target.jax_sharding, [blocks[n] for n in deal.taken], target.devices, alias=True
    )


def _blank(count: int, shape: tuple[int, ...], dtype: np.dtype) -> Sequence[np.ndarray]:
    """Blocks that devices can take, each in memory of its own where that matters."""
    if count * math.prod(shape) * dtype.itemsize < _SMALL_BYTES:
        # They go together, when the last of them goes.
        return [block[...] for block in aligned_blocks(count, shape, dtype)] if count else []
    return [aligned_empty(shape, dtype) for _ in range(count)]


class _Part(NamedTuple):
    """A part of a tile, and where it lies in the source.

    Attributes:
        tile: The number of the tile.
        source: The number of the source's buffer.
        tile_index: Where it goes in the tile. The dots in both keep a window on an array without
            dimensions a window.
        source_index: Where it lies in the source's buffer.
    """

    tile: int
    source: int
    tile_index: tuple[Any, ...]
    source_index: tuple[Any, ...]


class _CopyPlan(NamedTuple):
    """What goes where between devices that share memory: a tile is made once for all of them.

    Attributes:
        num_tiles: How many distinct tiles the target has.
        taken: For each device of the target the number of its tile.
        whole: Tiles that lie in one source buffer.
        parts: The parts of all tiles, source by source.
    """

    num_tiles: int
    taken: tuple[int, ...]
    whole: tuple[_Part, ...]
    parts: tuple[_Part, ...]


@lru_cache(maxsize=_PLANS_KEPT)
def _copy_plan(
    shape: tuple[int, ...], itemsize: int, source: TilingOnDevices, target: TilingOnDevices
) -> _CopyPlan:
    givers, wanted = exchange(shape, itemsize, source, target)
    numbers: dict[int, int] = {}
    first: list[int] = []
    tiles = target[0].tile_ids().tolist()
    for device, tile in enumerate(tiles):
        if tile not in numbers:
            numbers[tile] = len(first)
            first.append(device)
    position = {giver: n for n, giver in enumerate(givers)}
    parts = [
        _Part(n, position[p.source], (*p.destination_index, ...), (*p.source_index, ...))
        for n, device in enumerate(first)
        for p in wanted[device]
    ]
    return _CopyPlan(
        num_tiles=len(first),
        taken=tuple(numbers[tile] for tile in tiles),
        whole=tuple(part for part in parts if len(wanted[first[part.tile]]) == 1),
        parts=tuple(sorted(parts, key=lambda part: part.source)),
    )


def _parts_of(deal: _CopyPlan, tiles: Sequence[int]) -> list[_Part]:
    wanted = set(tiles)
    return [part for part in deal.parts if part.tile in wanted]


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
    """Copies source by source. Blocks are written in as it goes, and take up memory only then."""
    by_source: dict[int, list[_Part]] = {n: [] for n in range(len(windows))}
    for part in parts:
        by_source[part.source].append(part)
    buffers = split(handle)
    for number, its in by_source.items():
        copy_all(_copies(its, windows, blocks))
        windows[number] = np.empty(0, handle.dtype)
        buffers[number].delete()
        collect_garbage()
