"""Reshards between processes: slice on the source, send by collective permutes, join on the target.

A process reaches the devices of another only by a program that both run. Pieces that stay in a
process are copied peer to peer; the others are sent in rounds of compiled permutations, in which
all processes with a source or target device of the round take part. Every process computes the same
schedule from the two shardings independently.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import Handle, assemble, copy_to, make_aval, split
from xlashard._jax.trace.tracing import no_mesh_in_force
from xlashard.core.array.placement.put import put_on
from xlashard.core.array.placement.reshape import reshape_by_program
from xlashard.core.array.placement.target import resolve_sharding
from xlashard.core.array.reshard import ReshardTask, TilingOnDevices
from xlashard.core.array.reshard.compiled import reshard_by_program, unusual_layout
from xlashard.core.array.reshard.p2p import cut, extent_of, in_turn, numbered, pasted
from xlashard.core.sharding import GSPMDSharding
from xlashard.geometry import Piece, Round, TileAssignment, schedule_rounds

_SCHEDULES_KEPT = 512


class Schedule(NamedTuple):
    """Pieces to move between two shardings.

    Attributes:
        devices: Devices by the numbers that pieces have for them.
        senders: Number of each source device.
        receivers: Number of each target device.
        within: By process the pieces that stay in it.
        rounds: Rounds of the other pieces.
    """

    devices: tuple[Device, ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    within: Mapping[int, Sequence[Piece]]
    rounds: tuple[Round, ...]


@lru_cache(maxsize=_SCHEDULES_KEPT)
def schedule(
    shape: tuple[int, ...], itemsize: int, source: TilingOnDevices, target: TilingOnDevices
) -> Schedule:
    """Return the cached schedule, equal in all processes."""
    plan, devices = numbered(shape, itemsize, source, target)
    senders, receivers = plan.src_devices, plan.dst_devices
    tiles = dict(zip(senders, source[0].tile_ids().tolist(), strict=True))
    holders: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, tile in tiles.items():
        holders[devices[number].process_index, tile].append(number)

    def nearest(piece: Piece) -> Piece:
        near = holders.get((devices[piece.destination].process_index, tiles[piece.source]))
        if near is None or piece.source in near:
            return piece
        return replace(piece, source=near[piece.destination % len(near)])

    pieces_by_target = [
        [nearest(piece) for piece in plan.pieces_for(receiver)] for receiver in receivers
    ]
    within: dict[int, list[Piece]] = defaultdict(list)
    crossing = []
    for _, piece in in_turn(senders, pieces_by_target):
        process = devices[piece.destination].process_index
        if process == devices[piece.source].process_index:
            within[process].append(piece)
        else:
            crossing.append(piece)
    return Schedule(devices, senders, receivers, within, schedule_rounds(crossing))


class PermuteReshard:
    """One reshard to other devices, as this process runs it; its array is in default memory.

    Every process with a device of either sharding must run it. If the array is donated, each buffer
    is deleted as soon as it is sent.

    Args:
        task: The reshard.
    """

    def __init__(self, task: ReshardTask) -> None:
        handle, source, target, *_ = task
        self._task = task
        self._schedule = schedule(handle.shape, handle.itemsize, *task.ends)
        self._within = self._schedule.within.get(jax.process_index(), ())
        own_numbers = [self._schedule.senders[position] for position in source.positions]
        self._buffers = dict(zip(own_numbers, split(handle), strict=True))
        self._receivers = [self._schedule.receivers[position] for position in target.positions]
        self._shards: dict[int, Handle | None] = dict.fromkeys(self._receivers)
        sent = [piece for one in self._schedule.rounds for piece in one.by_sender.values()]
        pieces = (*self._within, *sent)
        self._left = Counter(p.source for p in pieces if p.source in self._buffers)
        self._blanks: dict[tuple[int, tuple[int, ...]], Handle] = {}
        self._under_way = 0

    @no_mesh_in_force()
    def run(self) -> Handle:
        """Run the reshard and return its result."""
        task, target = self._task, self._task.target
        if 0 in task.handle.shape:
            empty = np.empty(target.shard_shape, task.handle.dtype)
            shards = [put_on(device, empty) for device in target.devices]
            return assemble(task.aval, target.jax_sharding, shards)
        for piece in self._within:
            self._wait_for_room(piece.nbytes)
            block = self._piece_on_source(piece)
            if piece.source != piece.destination:
                device = self._schedule.devices[piece.destination]
                block = put_on(device, block, weak_type=block.weak_type)
            self._put_in_place(piece, block)
            self._count_sent(piece)
        for one in self._schedule.rounds:
            self._send(one)
        shards = [self._shards[number] for number in self._receivers]
        return assemble(task.aval, target.jax_sharding, shards)

    def _send(self, one: Round) -> None:
        """Run a round, if this process has any of its devices."""
        devices = [self._schedule.devices[number] for number in one.devices]
        me = jax.process_index()
        own_numbers = [
            n for n, d in zip(one.devices, devices, strict=True) if d.process_index == me
        ]
        if not own_numbers:
            return
        shape = one.shape or (1,)
        itemsize = self._task.handle.itemsize
        self._wait_for_room(2 * math.prod(shape) * itemsize)
        blocks = []
        for number in own_numbers:
            piece = one.by_sender.get(number)
            block = self._blank(number, shape) if piece is None else self._piece_on_source(piece)
            blocks.append(block if block.shape == shape else reshape_by_program(block, shape))
        received = dict(
            zip(own_numbers, split(_permuted(blocks, devices, one, shape)), strict=True)
        )
        for number in own_numbers:
            if number in one.by_receiver:
                block = received[number]
                if not one.shape:
                    block = reshape_by_program(block, ())
                self._put_in_place(one.by_receiver[number], block)
            if number in one.by_sender:
                self._count_sent(one.by_sender[number])

    def _piece_on_source(self, piece: Piece) -> Handle:
        """Return a piece on its source device."""
        buffer = self._buffers[piece.source]
        index = piece.source_index
        extent = extent_of(index)
        # All devices send the default layout, whatever the layout of the source is.
        if extent == buffer.shape and unusual_layout(buffer) is None:
            return buffer
        return cut(buffer, index)

    def _put_in_place(self, piece: Piece, block: Handle) -> None:
        shape = self._task.target.shard_shape
        if block.shape != shape:
            self._shards[piece.destination] = pasted(
                self._shards[piece.destination], block, piece, shape
            )
            return
        if (self._task.donate or self._task.fresh) and block is self._buffers.get(piece.source):
            block = copy_to(block, block.sharding, fresh=True)
        self._shards[piece.destination] = block

    def _count_sent(self, piece: Piece) -> None:
        """Count a piece as sent; the buffer is deleted after its last one."""
        self._left[piece.source] -= 1
        if self._task.donate and not self._left[piece.source]:
            self._buffers[piece.source].delete()

    def _wait_for_room(self, nbytes: int) -> None:
        """Wait for transfers where another one would exceed the room of a shard."""
        if self._under_way and self._under_way + nbytes > self._task.room:
            jax.block_until_ready([shard for shard in self._shards.values() if shard is not None])
            self._under_way = 0
        self._under_way += nbytes

    def _blank(self, number: int, shape: tuple[int, ...]) -> Handle:
        """Return the block of a device that has nothing to send."""
        key = number, shape
        if key not in self._blanks:
            device = self._schedule.devices[number]
            self._blanks[key] = put_on(device, np.zeros(shape, self._task.handle.dtype))
        return self._blanks[key]


def _permuted(
    blocks: Sequence[Handle], devices: Sequence[Device], one: Round, shape: tuple[int, ...]
) -> Handle:
    """Run the compiled permutation of one round."""
    position = {number: n for n, number in enumerate(one.devices)}
    order = [position[receiver] for receiver in one.permutation()]
    whole = (len(devices) * shape[0], *shape[1:])
    dims = (len(devices), *(1,) * (len(shape) - 1))
    before, after = (
        resolve_sharding(whole, GSPMDSharding(devices, assignment))
        for assignment in (
            TileAssignment.iota(dims, (len(devices),), (0,)),
            TileAssignment.listed(dims, order),
        )
    )
    handle = assemble(
        make_aval(whole, blocks[0].dtype, before.jax_sharding), before.jax_sharding, blocks
    )
    # CPU devices share the threads of the process and wait in them for other processes: with
    # several rounds at once, waiting devices could leave no thread to those that they wait for.
    one_at_a_time = devices[0].platform == "cpu"
    if one_at_a_time:
        jax.block_until_ready(blocks)
    # All rounds come from one schedule, so that processes need no check of equal programs.
    moved = reshard_by_program(ReshardTask(handle, before, after), alike=True)
    return moved.block_until_ready() if one_at_a_time else moved
