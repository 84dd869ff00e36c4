"""Reshards in one process: peer to peer, or within the host memory that emulated devices share.

Peer to peer, shards are sliced on the source, copied, and joined on the target. Blocks in host
memory are read in place, and shared by the target where they equal one of its tiles; the rest costs
one copy of each distinct byte and no program.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax import originals
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import (
    Handle,
    aligned_blocks,
    aligned_empty,
    collect_garbage,
    copy_to,
    host_view,
    is_takeable,
    put,
    split,
)
from xlashard._jax.trace.tracing import no_mesh_in_force
from xlashard.core.array.placement.copying import Copy, copy_all
from xlashard.core.array.placement.put import put_on, put_value
from xlashard.core.array.reshard import ReshardTask, TilingOnDevices
from xlashard.geometry import Index, Piece, ReshardPlan, reshard_plan
from xlashard.support.lazily import dataclass

_PLANS_KEPT = 512


def numbered(
    shape: tuple[int, ...], itemsize: int, source: TilingOnDevices, target: TilingOnDevices
) -> tuple[ReshardPlan, tuple[Device, ...]]:
    """Return the plan of a reshard, and the devices by their numbers in the plan."""
    numbers: dict[Device, int] = {}
    for device in (*source[1], *target[1]):
        numbers.setdefault(device, len(numbers))
    senders, receivers = (tuple(numbers[d] for d in devices) for _, devices in (source, target))
    return reshard_plan(shape, itemsize, source[0], senders, target[0], receivers), tuple(numbers)


@lru_cache(maxsize=_PLANS_KEPT)
def exchange(
    shape: tuple[int, ...],
    itemsize: int,
    source: TilingOnDevices,
    target: TilingOnDevices,
    positions: tuple[int, ...] | None = None,
) -> tuple[tuple[int, ...], tuple[tuple[Piece, ...], ...]]:
    """Return the number of each source device, and the pieces of the shard of each target device.

    Pieces are those of some positions of the target's devices; of all by default.
    """
    plan, _ = numbered(shape, itemsize, source, target)
    chosen = range(len(plan.dst_devices)) if positions is None else positions
    receivers = [plan.dst_devices[position] for position in chosen]
    return plan.src_devices, tuple(tuple(plan.pieces_for(receiver)) for receiver in receivers)


def carry_shards(task: ReshardTask, shards: Any, *, fresh: bool) -> Handle:
    """Return one handle of shards, each copied to its device if it is on another.

    Args:
        task: The reshard.
        shards: Shard of each device of the target, in order, on any device.
        fresh: Whether shards that are in place are copied.
    """
    target = task.target
    # A shared handle in host memory would alias memory that others write.
    return put(task.aval, target.jax_sharding, shards, target.devices, alias=not fresh, fresh=fresh)


@no_mesh_in_force()
def reshard_by_pieces(task: ReshardTask) -> Handle:
    """Reshard to other devices of this process, without the host.

    Pieces move between all devices at once, but a device never needs more memory for them than its
    larger shard takes. If the array is donated, each buffer is deleted as soon as it is sent.

    Args:
        task: The array, wholly in this process and in the default memory of its devices; devices
            of other processes are skipped in the target.
    """
    handle, _, target, donate, fresh = task
    if 0 in handle.shape:
        return put_value(np.empty(handle.shape, handle.dtype), target, weak_type=handle.weak_type)
    senders, pieces_by_target = exchange(
        handle.shape, handle.itemsize, *task.ends, target.positions
    )
    buffers = dict(zip(senders, split(handle), strict=True))
    traffic = TransferWindow(task.room)
    left = Counter(piece.source for pieces in pieces_by_target for piece in pieces)
    shards: list[Any] = [None] * len(pieces_by_target)
    for number, piece in in_turn(senders, pieces_by_target):
        buffer, device = buffers[piece.source], target.devices[number]
        whole = _WholeShards(
            extent_of(piece.source_index) == buffer.shape, len(pieces_by_target[number]) == 1
        )
        if not traffic.admits(piece, whole):
            jax.block_until_ready(shards)
            traffic = TransferWindow(task.room)
            traffic.admits(piece, whole)
        block = _moved_piece(buffer, piece, whole, device)
        if not whole.target:
            block = pasted(shards[number], block, piece, target.shard_shape)
        elif block is buffer and (donate or fresh):
            block = copy_to(block, block.sharding, fresh=True)
        shards[number] = block
        left[piece.source] -= 1
        if donate and not left[piece.source]:
            buffer.delete()
    return carry_shards(task, shards, fresh=False)


class _WholeShards(NamedTuple):
    """Extent of a piece, in comparison with the shards of both sides.

    Attributes:
        source: True for a whole shard of the source, which is not sliced.
        target: True for a whole shard of the target, which is not joined with others.
    """

    source: bool
    target: bool


@dataclass
class TransferWindow:
    """Bytes of pieces in transit on each device.

    Attributes:
        room: Limit per device.
        held: Bytes in transit per device.
    """

    room: int
    held: Counter[int] = field(default_factory=Counter)

    def admits(self, piece: Piece, whole: _WholeShards) -> bool:
        """Admit a piece that is going to be sliced and copied, if there is room for it."""
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
    senders: Sequence[int], pieces_by_target: Sequence[Sequence[Piece]]
) -> Iterator[tuple[int, Piece]]:
    """Yield pieces with the number of their target; each round reads from different devices."""
    turns = {sender: number for number, sender in enumerate(senders)}
    queues = [
        sorted(pieces, key=lambda piece: (turns[piece.source] - number) % len(turns))
        for number, pieces in enumerate(pieces_by_target)
    ]
    for pieces in zip_longest(*queues):
        yield from ((n, piece) for n, piece in enumerate(pieces) if piece is not None)


type _Shape = tuple[int, ...]


def extent_of(index: Index) -> _Shape:
    """Return the shape of a slice."""
    return tuple(s.stop - s.start for s in index)


def _starts(index: Index) -> np.ndarray:
    return np.array([s.start for s in index], np.int32)


def _moved_piece(buffer: Handle, piece: Piece, whole: _WholeShards, device: Device) -> Handle:
    """Return a piece on its target device."""
    block = buffer if whole.source else cut(buffer, piece.source_index)
    if piece.source == piece.destination:
        return block
    return put_on(device, block, weak_type=block.weak_type)


def cut(buffer: Handle, index: Index) -> Handle:
    """Return a slice of a buffer, on its device."""
    return _cut(buffer, _starts(index), extent_of(index))


def pasted(shard: Handle | None, block: Handle, piece: Piece, shape: _Shape) -> Handle:
    """Return a shard with one more of its pieces."""
    starts = _starts(piece.destination_index)
    return enlarge(block, starts, shape) if shard is None else _updated_shard(shard, block, starts)


# The position is an argument, so that a device has one program for all pieces of a shape.


@partial(originals.jit, static_argnums=2)
def _cut(x: Any, starts: Any, sizes: _Shape) -> Any:
    return jax.lax.dynamic_slice(x, list(starts), sizes)


@partial(originals.jit, static_argnums=2)
def enlarge(block: Any, starts: Any, shape: _Shape) -> Any:
    """Return a block with zeros around it, on its device."""
    return jax.lax.dynamic_update_slice(jnp.zeros(shape, block.dtype), block, list(starts))


@partial(originals.jit, donate_argnums=0)
def _updated_shard(shard: Any, block: Any, starts: Any) -> Any:
    return jax.lax.dynamic_update_slice(shard, block, list(starts))


_SMALL_BYTES = 1 << 20


def reshard_in_host_memory(task: ReshardTask) -> Handle:
    """Reshard by copies within host memory; waits until the source is computed.

    If the array is donated, each of its buffers is freed as soon as it is copied.
    """
    handle, _, target, donate, fresh = task
    plan = _copy_plan(handle.shape, handle.itemsize, *task.ends)
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
    tiles = [blocks[number] for number in plan.tile_numbers]
    return put(task.aval, target.jax_sharding, tiles, target.devices, alias=True)


def _blank(count: int, shape: tuple[int, ...], dtype: np.dtype) -> Sequence[np.ndarray]:
    """Return blocks that devices can use, each in memory of its own where that matters."""
    if count * math.prod(shape) * dtype.itemsize < _SMALL_BYTES:
        # Pooled blocks are freed together.
        return [block[...] for block in aligned_blocks(count, shape, dtype)] if count else []
    return [aligned_empty(shape, dtype) for _ in range(count)]


class _TilePart(NamedTuple):
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
    whole: tuple[_TilePart, ...]
    parts: tuple[_TilePart, ...]


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
        _TilePart(n, position[p.source], (*p.destination_index, ...), (*p.source_index, ...))
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
    parts: Sequence[_TilePart], windows: Sequence[np.ndarray], blocks: Mapping[int, np.ndarray]
) -> list[Copy]:
    return [
        (blocks[tile][tile_index], windows[source][source_index])
        for tile, source, tile_index, source_index in parts
    ]


def _copy_and_free(
    handle: Handle,
    parts: Sequence[_TilePart],
    windows: list[np.ndarray],
    blocks: Mapping[int, np.ndarray],
) -> None:
    """Copy buffer by buffer; blocks take up memory only as they are written."""
    by_source: dict[int, list[_TilePart]] = {n: [] for n in range(len(windows))}
    for part in parts:
        by_source[part.source].append(part)
    buffers = split(handle)
    for number, group in by_source.items():
        copy_all(_copies(group, windows, blocks))
        windows[number] = np.empty(0, handle.dtype)
        buffers[number].delete()
        collect_garbage()
