"""From some devices to others, in several processes: cut on the source, send in rounds, join.

A process reaches the devices of another only by a program that both run. So what stays within a
process is carried as ever, and what doesn't goes in rounds: compiled permutations of the devices
that have something to send or to take, of which all processes with such devices take part.
Everybody works the rounds out alone, from the two placements, and comes to the same.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import Handle, assemble, copy_to, make_aval, split
from xlashard.array.core.buffer_shape import reshape_by_program as in_shape
from xlashard.array.host.put import put_on
from xlashard.array.placement.target import ResolvedSharding, resolve_sharding
from xlashard.array.reshard.compiled import reshard_by_program, unusual_layout
from xlashard.array.reshard.p2p import TilingOnDevices, cut, in_turn, numbered, pasted
from xlashard.geometry import Piece, Round, TileAssignment, schedule_rounds
from xlashard.sharding import GSPMDSharding

_SCHEDULES_KEPT = 512


class Schedule(NamedTuple):
    """What goes where between two placements.

    Attributes:
        devices: The devices by the numbers that pieces have for them.
        givers: The number of each source device.
        takers: The number of each destination device.
        within: By process the pieces that don't leave it.
        rounds: The others.
    """

    devices: tuple[Device, ...]
    givers: tuple[int, ...]
    takers: tuple[int, ...]
    within: Mapping[int, Sequence[Piece]]
    rounds: tuple[Round, ...]


@lru_cache(maxsize=_SCHEDULES_KEPT)
def schedule(
    shape: tuple[int, ...], itemsize: int, source: TilingOnDevices, target: TilingOnDevices
) -> Schedule:
    """What goes where, worked out for all processes alike."""
    plan, devices = numbered(shape, itemsize, source, target)
    givers, takers = plan.src_devices, plan.dst_devices
    tiles = dict(zip(givers, source[0].tile_ids().tolist(), strict=True))
    holders: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, tile in tiles.items():
        holders[devices[number].process_index, tile].append(number)

    def nearest(piece: Piece) -> Piece:
        near = holders.get((devices[piece.destination].process_index, tiles[piece.source]))
        if near is None or piece.source in near:
            return piece
        return replace(piece, source=near[piece.destination % len(near)])

    wanted = [[nearest(piece) for piece in plan.pieces_for(taker)] for taker in takers]
    within: dict[int, list[Piece]] = defaultdict(list)
    crossing = []
    for _, piece in in_turn(givers, wanted):
        process = devices[piece.destination].process_index
        if process == devices[piece.source].process_index:
            within[process].append(piece)
        else:
            crossing.append(piece)
    return Schedule(devices, givers, takers, within, schedule_rounds(crossing))


def reshard_by_permutes(
    handle: Handle,
    source: ResolvedSharding,
    target: ResolvedSharding,
    *,
    donate: bool = False,
    fresh: bool = False,
) -> Handle:
    """The same value on other devices. All processes that have some of either must call it.

    Args:
        handle: The source, in its devices' default memory. In a process that has none of its
            devices it holds no buffers.
        source: Where it is.
        target: Where to, in the devices' default memory.
        donate: Deletes each buffer of the source as soon as all of it is on its way.
        fresh: Copies also shards that are there already; otherwise those are shared.
    """
    return _Move(handle, source, target, donate, fresh).made()


class _Move:
    """One array on its way, as this process sees it."""

    def __init__(
        self,
        handle: Handle,
        source: ResolvedSharding,
        target: ResolvedSharding,
        donate: bool,
        fresh: bool,
    ) -> None:
        ends = ((p.tiling, p.sharding.devices) for p in (source, target))
        self._schedule = schedule(handle.shape, handle.itemsize, *ends)
        self._like = handle
        self._target = target
        self._donate = donate
        self._fresh = donate or fresh
        here = [self._schedule.givers[position] for position in source.positions]
        self._buffers = dict(zip(here, split(handle), strict=True))
        self._takers = [self._schedule.takers[position] for position in target.positions]
        self._shards: dict[int, Handle | None] = dict.fromkeys(self._takers)
        self._left = Counter(piece.source for piece in self._own_pieces())
        self._blanks: dict[tuple[int, tuple[int, ...]], Handle] = {}
        sizes = (math.prod(p.shard_shape) for p in (source, target))
        self._room = max(sizes) * handle.itemsize
        self._under_way = 0

    def _own_pieces(self) -> list[Piece]:
        """The pieces that this process's devices give."""
        sent = [piece for one in self._schedule.rounds for piece in one.by_sender.values()]
        return [p for p in (*self._within(), *sent) if p.source in self._buffers]

    def _within(self) -> Sequence[Piece]:
        return self._schedule.within.get(jax.process_index(), ())

    def made(self) -> Handle:
        """The array where it should be."""
        if 0 not in self._like.shape:
            for piece in self._within():
                self._wait_for_room(piece.nbytes)
                block = self._taken(piece)
                if piece.source != piece.destination:
                    device = self._schedule.devices[piece.destination]
                    block = put_on(device, block, weak_type=block.weak_type)
                self._put_in_place(piece, block)
                self._given(piece)
            for one in self._schedule.rounds:
                self._send(one)
        like, target = self._like, self._target
        aval = make_aval(like.shape, like.dtype, target.jax_sharding, like.weak_type)
        shards = [self._shards[number] for number in self._takers]
        if 0 in like.shape:
            empty = np.empty(target.shard_shape, like.dtype)
            shards = [put_on(device, empty) for device in target.devices]
        return assemble(aval, target.jax_sharding, shards)

    def _send(self, one: Round) -> None:
        """Takes part in a round, if this process has any of its devices."""
        devices = [self._schedule.devices[number] for number in one.devices]
        me = jax.process_index()
        here = [n for n, d in zip(one.devices, devices, strict=True) if d.process_index == me]
        if not here:
            return
        shape = one.shape or (1,)
        itemsize = self._like.itemsize
        self._wait_for_room(2 * math.prod(shape) * itemsize)
        blocks = []
        for number in here:
            piece = one.by_sender.get(number)
            block = self._blank(number, shape) if piece is None else self._taken(piece)
            blocks.append(block if block.shape == shape else in_shape(block, shape))
        received = dict(zip(here, split(_permuted(blocks, devices, one, shape)), strict=True))
        for number in here:
            if number in one.by_receiver:
                block = received[number]
                if not one.shape:
                    block = in_shape(block, ())
                self._put_in_place(one.by_receiver[number], block)
            if number in one.by_sender:
                self._given(one.by_sender[number])

    def _taken(self, piece: Piece) -> Handle:
        """A piece where it comes from."""
        buffer = self._buffers[piece.source]
        index = piece.source_index
        extent = tuple(s.stop - s.start for s in index)
        # All send what is laid out alike, whatever the source's own order of dimensions is.
        if extent == buffer.shape and unusual_layout(buffer) is None:
            return buffer
        return cut(buffer, index)

    def _put_in_place(self, piece: Piece, block: Handle) -> None:
        shape = self._target.shard_shape
        if block.shape != shape:
            self._shards[piece.destination] = pasted(
                self._shards[piece.destination], block, piece, shape
            )
            return
        if self._fresh and block is self._buffers.get(piece.source):
            block = copy_to(block, block.sharding, fresh=True)
        self._shards[piece.destination] = block

    def _given(self, piece: Piece) -> None:
        """A piece is on its way; after the last one of a buffer that can go."""
        self._left[piece.source] -= 1
        if self._donate and not self._left[piece.source]:
            self._buffers[piece.source].delete()

    def _wait_for_room(self, nbytes: int) -> None:
        """Lets what is under way arrive where, with more, it would fill a shard's room."""
        if self._under_way and self._under_way + nbytes > self._room:
            jax.block_until_ready([shard for shard in self._shards.values() if shard is not None])
            self._under_way = 0
        self._under_way += nbytes

    def _blank(self, number: int, shape: tuple[int, ...]) -> Handle:
        """What a device gives that has nothing to give."""
        key = number, shape
        if key not in self._blanks:
            device = self._schedule.devices[number]
            self._blanks[key] = put_on(device, np.zeros(shape, self._like.dtype))
        return self._blanks[key]


def _permuted(
    blocks: Sequence[Handle], devices: Sequence[Device], one: Round, shape: tuple[int, ...]
) -> Handle:
    """The blocks of a round where they are to go: a program that changes only who has which."""
    position = {number: n for n, number in enumerate(one.devices)}
    order = [position[taker] for taker in one.permutation()]
    whole = (len(devices) * shape[0], *shape[1:])
    dims = (len(devices), *(1,) * (len(shape) - 1))
    ends: list[Any] = []
    for assignment in (
        TileAssignment.iota(dims, (len(devices),), (0,)),
        TileAssignment.listed(dims, order),
    ):
        ends.append(resolve_sharding(whole, GSPMDSharding(devices, assignment)))
    before, after = ends
    handle = assemble(
        make_aval(whole, blocks[0].dtype, before.jax_sharding), before.jax_sharding, blocks
    )
    # Devices on a CPU share its threads, and wait in them for other processes: a round at a time,
    # or those that wait leave none to those that they wait for.
    one_at_a_time = devices[0].platform == "cpu"
    if one_at_a_time:
        jax.block_until_ready(blocks)
    # All rounds come from one schedule, so nobody need meet for each of them.
    moved = reshard_by_program(handle, before, after, None, donate=False, alike=True)
    return moved.block_until_ready() if one_at_a_time else moved
