"""From some devices to others: cut on the source, carry, join on the destination."""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xlashard._jax.shardings import Device
from xlashard._jax.transfer import Handle, make_aval, put, split
from xlashard.array.placement import Places
from xlashard.geometry import Index, Piece, Tiling, reshard_plan
from xlashard.sharding import SingleDeviceSharding

_EXCHANGES_KEPT = 512


class Exchange(NamedTuple):
    """What goes where between two placements.

    Attributes:
        givers: The number of each source device, as pieces name it.
        wanted: For each destination device the pieces that make up its shard.
    """

    givers: tuple[int, ...]
    wanted: tuple[tuple[Piece, ...], ...]


@lru_cache(maxsize=_EXCHANGES_KEPT)
def _exchange(
    shape: tuple[int, ...],
    itemsize: int,
    source: tuple[Tiling, tuple[Device, ...]],
    target: tuple[Tiling, tuple[Device, ...]],
) -> Exchange:
    numbers: dict[Device, int] = {}
    for device in (*source[1], *target[1]):
        numbers.setdefault(device, len(numbers))
    givers, takers = (tuple(numbers[d] for d in devices) for _, devices in (source, target))
    plan = reshard_plan(shape, itemsize, source[0], givers, target[0], takers)
    return Exchange(givers, tuple(tuple(plan.pieces_for(taker)) for taker in takers))


def exchange(handle: Handle, source: Places, target: Places) -> Exchange:
    """What goes where between placements that are wholly in this process."""
    return _exchange(
        handle.shape,
        handle.itemsize,
        (source.tiling, source.sharding.devices),
        (target.tiling, target.sharding.devices),
    )


def carry(like: Handle, shards: Any, target: Places, fresh: bool) -> Handle:
    """One handle of shards, each brought to its device first where it isn't there.

    Args:
        like: Whose dtype it has.
        shards: Per device of the target, in order, the shard on any device.
        target: Where to.
        fresh: Copies also those that are there.
    """
    aval = make_aval(like.shape, like.dtype, target.twin, like.weak_type)
    return put(aval, target.twin, shards, target.devices, fresh=fresh)


def move_in_pieces(handle: Handle, source: Places, target: Places, fresh: bool) -> Handle:
    """The same value on other devices, all in this process; nothing passes through the host."""
    givers, wanted = exchange(handle, source, target)
    by_source: dict[int, dict[_Bounds, None]] = {}
    for pieces in wanted:
        for piece in pieces:
            by_source.setdefault(piece.source, {})[_bounds(piece.source_index)] = None
    buffers = dict(zip(givers, split(handle), strict=True))
    blocks: dict[tuple[int, _Bounds], Handle] = {}
    for giver, cuts in by_source.items():
        for cut, block in zip(cuts, _cut(buffers[giver], tuple(cuts)), strict=True):
            blocks[giver, cut] = block
    shards = [
        _joined(
            [blocks[piece.source, _bounds(piece.source_index)] for piece in pieces],
            tuple(tuple(s.start for s in piece.destination_index) for piece in pieces),
            target.shard_shape,
            device,
        )
        for device, pieces in zip(target.devices, wanted, strict=True)
    ]
    return carry(handle, shards, target, fresh)


type _Shape = tuple[int, ...]
type _Starts = tuple[_Shape, ...]
type _Bounds = tuple[tuple[int, int], ...]


def _bounds(index: Index) -> _Bounds:
    return tuple((s.start, s.stop) for s in index)


def _cut(buffer: Handle, cuts: tuple[_Bounds, ...]) -> list[Handle]:
    """Blocks of a buffer, on its device."""
    if len(cuts) == 1 and cuts[0] == tuple((0, n) for n in buffer.shape):
        return [buffer]
    return _slices(buffer, cuts)


@partial(jax.jit, static_argnums=1)
def _slices(x: Any, cuts: tuple[_Bounds, ...]) -> list[Any]:
    return [jax.lax.slice(x, [a for a, _ in cut], [b for _, b in cut]) for cut in cuts]


def _joined(blocks: list[Handle], starts: _Starts, shape: _Shape, device: Device) -> Handle:
    """A shard made of blocks, on its device; a single block stays where it is."""
    if len(blocks) == 1:
        return blocks[0]
    single = SingleDeviceSharding(device).twin()
    moved = [
        put(make_aval(b.shape, b.dtype, single, b.weak_type), single, [b], [device]) for b in blocks
    ]
    return _pasted(moved, starts, shape)


@partial(jax.jit, static_argnums=(1, 2))
def _pasted(blocks: list[Any], starts: _Starts, shape: _Shape) -> Any:
    out = jnp.zeros(shape, blocks[0].dtype)
    for block, start in zip(blocks, starts, strict=True):
        out = jax.lax.dynamic_update_slice(out, block, start)
    return out
