"""From some devices to others: cut on the source, carry, join on the destination."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import Handle, copy_to, make_aval, put, split
from xlashard.array.host.put import put_on, put_value
from xlashard.array.placement.target import ResolvedSharding
from xlashard.geometry import Index, Piece, ReshardPlan, Tiling, reshard_plan
from xlashard.lazily import dataclass

_EXCHANGES_KEPT = 512


class Exchange(NamedTuple):
    """What goes where between two placements.

    Attributes:
        givers: The number of each source device, as pieces name it.
        wanted: For each destination device the pieces that make up its shard.
    """

    givers: tuple[int, ...]
    wanted: tuple[tuple[Piece, ...], ...]


type TilingOnDevices = tuple[Tiling, tuple[Device, ...]]
"""Tiles, and the devices that hold them."""


def numbered(
    shape: tuple[int, ...], itemsize: int, source: TilingOnDevices, target: TilingOnDevices
) -> tuple[ReshardPlan, tuple[Device, ...]]:
    """What has to move, and the devices by their numbers in the plan."""
    numbers: dict[Device, int] = {}
    for device in (*source[1], *target[1]):
        numbers.setdefault(device, len(numbers))
    givers, takers = (tuple(numbers[d] for d in devices) for _, devices in (source, target))
    return reshard_plan(shape, itemsize, source[0], givers, target[0], takers), tuple(numbers)


def plan_between(
    shape: tuple[int, ...], itemsize: int, source: ResolvedSharding, target: ResolvedSharding
) -> tuple[ReshardPlan, tuple[Device, ...]]:
    """What has to move between two placements, and the devices by their numbers in the plan."""
    ends = ((places.tiling, places.sharding.devices) for places in (source, target))
    return numbered(shape, itemsize, *ends)


@lru_cache(maxsize=_EXCHANGES_KEPT)
def exchange(
    shape: tuple[int, ...],
    itemsize: int,
    source: TilingOnDevices,
    target: TilingOnDevices,
    positions: tuple[int, ...] | None = None,
) -> Exchange:
    """What goes where, to some positions of the target's devices; to all, if not given."""
    plan, _ = numbered(shape, itemsize, source, target)
    chosen = range(len(plan.dst_devices)) if positions is None else positions
    takers = [plan.dst_devices[position] for position in chosen]
    return Exchange(plan.src_devices, tuple(tuple(plan.pieces_for(taker)) for taker in takers))


def carry_shards(like: Handle, shards: Any, target: ResolvedSharding, fresh: bool) -> Handle:
    """One handle of shards, each brought to its device first where it isn't there.

    Args:
        like: Whose dtype it has.
        shards: Per device of the target, in order, the shard on any device.
        target: Where to.
        fresh: Copies also those that are there.
    """
    aval = make_aval(like.shape, like.dtype, target.jax_sharding, like.weak_type)
    # Handles on their device are shared only where host memory could be, too.
    return put(aval, target.jax_sharding, shards, target.devices, alias=not fresh, fresh=fresh)


def reshard_by_pieces(
    handle: Handle,
    source: ResolvedSharding,
    target: ResolvedSharding,
    *,
    donate: bool = False,
    fresh: bool = False,
) -> Handle:
    """The same value on other devices of this process; nothing passes through the host.

    Pieces go between all devices at once, but never so many that a device needs more memory for
    them than the larger of its two shards takes.

    Args:
        handle: The source, in its devices' default memory.
        source: Where it is, wholly in this process.
        target: Where to; of devices of other processes nothing is done.
        donate: Deletes each buffer of the source as soon as all of it is on its way.
        fresh: Copies also shards that are there already; otherwise those are shared.
    """
    if 0 in handle.shape:
        return put_value(np.empty(handle.shape, handle.dtype), target, weak_type=handle.weak_type)
    ends = ((places.tiling, places.sharding.devices) for places in (source, target))
    givers, wanted = exchange(handle.shape, handle.itemsize, *ends, target.positions)
    buffers = dict(zip(givers, split(handle), strict=True))
    room = max(math.prod(source.shard_shape), math.prod(target.shard_shape)) * handle.itemsize
    traffic = TransferWindow(room)
    left = Counter(piece.source for pieces in wanted for piece in pieces)
    shards: list[Any] = [None] * len(wanted)
    for number, piece in in_turn(givers, wanted):
        buffer, device = buffers[piece.source], target.devices[number]
        whole = _Whole(_extent(piece.source_index) == buffer.shape, len(wanted[number]) == 1)
        if not traffic.admits(piece, whole):
            jax.block_until_ready(shards)
            traffic = TransferWindow(room)
            traffic.admits(piece, whole)
        block = _taken(buffer, piece, whole, device)
        if not whole.target:
            block = pasted(shards[number], block, piece, target.shard_shape)
        elif block is buffer and (donate or fresh):
            block = copy_to(block, block.sharding, fresh=True)
        shards[number] = block
        left[piece.source] -= 1
        if donate and not left[piece.source]:
            buffer.delete()
    return carry_shards(handle, shards, target, fresh=False)


class _Whole(NamedTuple):
    """Whether a piece is all of a shard.

    Attributes:
        source: Of the one that it comes from, so that it need not be cut out.
        target: Of the one that it is for, so that it need not be put together with others.
    """

    source: bool
    target: bool


@dataclass
class TransferWindow:
    """The bytes of pieces that devices hold besides their shards.

    Attributes:
        room: How many each may hold.
        held: How many each does.
    """

    room: int
    held: Counter[int] = field(default_factory=Counter)

    def admits(self, piece: Piece, whole: _Whole) -> bool:
        """Counts a piece that is going to be cut and carried, if there is room for it."""
        needed: Counter[int] = Counter()
        if not whole.source:
            needed[piece.source] += piece.nbytes
        if not whole.target and (whole.source or piece.source != piece.destination):
            needed[piece.destination] += piece.nbytes
        if any(self.held[d] and self.held[d] + n > self.room for d, n in needed.items()):
            return False
        self.held += needed
        return True


def in_turn(
    givers: Sequence[int], wanted: Sequence[Sequence[Piece]]
) -> Iterator[tuple[int, Piece]]:
    """All pieces with the number of their taker: in each round all take from different devices."""
    turns = {giver: number for number, giver in enumerate(givers)}
    queues = [
        sorted(pieces, key=lambda piece: (turns[piece.source] - number) % len(turns))
        for number, pieces in enumerate(wanted)
    ]
    for pieces in zip_longest(*queues):
        yield from ((n, piece) for n, piece in enumerate(pieces) if piece is not None)


type _Shape = tuple[int, ...]


def _extent(index: Index) -> _Shape:
    return tuple(s.stop - s.start for s in index)


def _starts(index: Index) -> np.ndarray:
    return np.array([s.start for s in index], np.int32)


def _taken(buffer: Handle, piece: Piece, whole: _Whole, device: Device) -> Handle:
    """A piece, on its destination."""
    index = piece.source_index
    block = buffer if whole.source else cut(buffer, index)
    if piece.source == piece.destination:
        return block
    return put_on(device, block, weak_type=block.weak_type)


def cut(buffer: Handle, index: Index) -> Handle:
    """A part of a buffer, on its device."""
    return _cut(buffer, _starts(index), _extent(index))


def pasted(shard: Handle | None, block: Handle, piece: Piece, shape: _Shape) -> Handle:
    """A shard with one more of its pieces."""
    starts = _starts(piece.destination_index)
    return _begun(block, starts, shape) if shard is None else _continued(shard, block, starts)


# Where a piece lies is an argument, so that a device has one program for all pieces of a shape.


@partial(jax.jit, static_argnums=2)
def _cut(x: Any, starts: Any, sizes: _Shape) -> Any:
    return jax.lax.dynamic_slice(x, list(starts), sizes)


@partial(jax.jit, static_argnums=2)
def _begun(block: Any, starts: Any, shape: _Shape) -> Any:
    return jax.lax.dynamic_update_slice(jnp.zeros(shape, block.dtype), block, list(starts))


@partial(jax.jit, donate_argnums=0)
def _continued(shard: Any, block: Any, starts: Any) -> Any:
    return jax.lax.dynamic_update_slice(shard, block, list(starts))
