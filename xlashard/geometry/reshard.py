"""Transfers between devices for a change of tiling.

Between processes a piece can only go by a program that the devices of both run: a permutation, in
which each device sends at most one piece and receives at most one, all of one shape. `Round`s are
such permutations.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xlashard.errors import TilingError
from xlashard.geometry.strides import Index, prime_factors
from xlashard.geometry.tiling import Tiling
from xlashard.support.lazily import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """One block that a destination device takes from one source device.

    Attributes:
        destination: Id of the device that takes it.
        source: Id of the device that has it; equal to `destination` where no transfer is needed.
        destination_index: Where it goes in the destination's shard.
        source_index: Where it lies in the source's shard.
        nbytes: Its size, in bytes.
    """

    destination: int
    source: int
    destination_index: Index
    source_index: Index
    nbytes: int


@dataclass(frozen=True)
class ReshardPlan:
    """Blocks that turn shards of one tiling into shards of another. Made by `reshard_plan`.

    All members are computed on first use: `pieces_for` costs one device's own pieces, the
    two totals a few array operations, and only `pieces` and `bytes_by_pair` walk through all
    devices. Each device takes what it holds already from itself; for the rest, the devices that
    hold a copy take turns.

    Attributes:
        shape: Global shape, in elements.
        itemsize: Size of an element, in bytes.
        src: Tiling of the source shards.
        src_devices: Device id per position of `src`.
        dst: Tiling of the destination shards.
        dst_devices: Device id per position of `dst`.
    """

    shape: tuple[int, ...]
    itemsize: int
    src: Tiling
    src_devices: tuple[int, ...]
    dst: Tiling
    dst_devices: tuple[int, ...]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Return all pieces, in the order of `dst_devices` and then of the places in the shard."""
        return tuple(piece for device in self.dst_devices for piece in self.pieces_for(device))

    def pieces_for(self, device: int) -> list[Piece]:
        """Return the pieces that make up one destination device's shard, in row-major order.

        Raises:
            TilingError: The device is not among `dst_devices`.
        """
        position = self._dst_positions.get(device)
        if position is None:
            raise TilingError(f"device {device} is not a destination of this plan")
        coordinates = self.dst.coordinates([position])
        starts, stops = (edge[0].tolist() for edge in _edges(self.dst, self.shape, coordinates))
        extents = self.src.shard_shape(self.shape, uneven=True)
        blocks = product(*map(_blocks, starts, stops, extents))
        return [self._piece(device, position, starts, block) for block in blocks]

    @property
    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """Return the bytes to move per `(source, destination)` pair of different devices."""
        moved: dict[tuple[int, int], int] = {}
        for piece in self.pieces:
            if piece.source != piece.destination:
                pair = (piece.source, piece.destination)
                moved[pair] = moved.get(pair, 0) + piece.nbytes
        return moved

    @property
    def bytes_moved(self) -> int:
        """Return the bytes that move from one device to another."""
        needed = math.prod(self.shape) * self.dst.num_replicas * self.itemsize
        return needed - self.bytes_kept

    @cached_property
    def bytes_kept(self) -> int:
        """Return the bytes of destination shards that are on their device already."""
        shared = [d for d in self.dst_devices if d in self._src_positions]
        src = self.src.coordinates([self._src_positions[d] for d in shared])
        dst = self.dst.coordinates([self._dst_positions[d] for d in shared])
        src_starts, src_stops = _edges(self.src, self.shape, src)
        dst_starts, dst_stops = _edges(self.dst, self.shape, dst)
        common = np.minimum(src_stops, dst_stops) - np.maximum(src_starts, dst_starts)
        return int(np.maximum(common, 0).prod(axis=-1).sum()) * self.itemsize

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _src_positions(self) -> dict[int, int]:
        return {device: position for position, device in enumerate(self.src_devices)}

    @cached_property
    def _dst_positions(self) -> dict[int, int]:
        return {device: position for position, device in enumerate(self.dst_devices)}

    @cached_property
    def _routes(self) -> dict[int, "_Route"]:
        return {}

    def _piece(
        self, device: int, position: int, starts: Sequence[int], blocks: Sequence["_Block"]
    ) -> Piece:
        tile = 0
        for count, block in zip(self.src.counts, blocks, strict=True):
            tile = tile * count + block.coordinate
        return Piece(
            device,
            self._source(tile, device, position),
            tuple(slice(b.start - a, b.stop - a) for a, b in zip(starts, blocks, strict=True)),
            tuple(slice(b.start - b.origin, b.stop - b.origin) for b in blocks),
            math.prod(b.stop - b.start for b in blocks) * self.itemsize,
        )

    def _source(self, tile: int, device: int, position: int) -> int:
        """Return the device that sends (a part of) a source tile to a destination device."""
        route = self._routes.get(tile)
        if route is None:
            route = self._routes[tile] = self._route(tile)
        if device in route.holders:
            return device
        rank = route.receiver_rank(self.dst, position)
        rank -= bisect_left(route.own_ranks, rank)
        return route.order[rank % len(route.order)]

    def _route(self, tile: int) -> "_Route":
        order = tuple(self.src_devices[p] for p in self.src.replicas(tile))
        coordinates = self.src.coordinates(self.src.replicas(tile)[:1])
        starts, stops = (e[0].tolist() for e in _edges(self.src, self.shape, coordinates))
        extents = self.dst.shard_shape(self.shape, uneven=True)
        low = tuple(a // k for a, k in zip(starts, extents, strict=True))
        high = tuple((b - 1) // k for b, k in zip(stops, extents, strict=True))
        route = _Route(order, frozenset(order), low, high, ())
        own = (self._dst_positions.get(device) for device in order)
        ranks = [route.receiver_rank(self.dst, p) for p in own if p is not None]
        return replace(route, own_ranks=tuple(sorted(rank for rank in ranks if rank >= 0)))


@dataclass(frozen=True, slots=True)
class _Route:
    """Devices that hold a source tile, and the destination tiles that overlap with it.

    Attributes:
        order: Devices that hold it, in turn.
        holders: The same, as a set.
        low: First coordinates of the destination tiles.
        high: Last coordinates of the destination tiles.
        own_ranks: The ranks of receivers that hold the tile themselves, sorted.
    """

    order: tuple[int, ...]
    holders: frozenset[int]
    low: tuple[int, ...]
    high: tuple[int, ...]
    own_ranks: tuple[int, ...]

    def receiver_rank(self, dst: Tiling, position: int) -> int:
        """Return the rank of a destination among the tile's receivers; -1 if it is no receiver."""
        rank = 0
        coordinates = dst.coordinates([position])[0].tolist()
        for low, coordinate, high in zip(self.low, coordinates, self.high, strict=True):
            if not low <= coordinate <= high:
                return -1
            rank = rank * (high - low + 1) + coordinate - low
        return rank * dst.num_replicas + int(dst.replica_ids([position])[0])


class _Block(NamedTuple):
    """A stretch of one dimension that lies in one source tile.

    Attributes:
        coordinate: The source tile's coordinate.
        origin: Where the source tile starts in the global dimension.
        start: Where the stretch starts in the global dimension.
        stop: Where it stops.
    """

    coordinate: int
    origin: int
    start: int
    stop: int


def _blocks(start: int, stop: int, extent: int) -> list[_Block]:
    """Cut `start .. stop` at the borders of source tiles of `extent`."""
    if start == stop:
        return []
    return [
        _Block(c, c * extent, max(start, c * extent), min(stop, (c + 1) * extent))
        for c in range(start // extent, (stop - 1) // extent + 1)
    ]


def _edges(
    tiling: Tiling, shape: Sequence[int], coordinates: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return starts and stops `[..., dims]` of the tiles at coordinates `[..., dims]`."""
    extents = np.array(tiling.shard_shape(shape, uneven=True), np.int64)
    sizes = np.array(shape, np.int64)
    starts = np.minimum(coordinates * extents, sizes)
    return starts, np.minimum(starts + extents, sizes)


def reshard_plan(
    shape: Sequence[int],
    itemsize: int,
    src: Tiling,
    src_devices: Sequence[int],
    dst: Tiling,
    dst_devices: Sequence[int],
) -> ReshardPlan:
    """Plan how shards of one tiling become shards of another, on the same or other devices.

    Dimensions that don't divide are cut as XLA does it, with smaller or empty last tiles.

    Arguments are the attributes of `ReshardPlan`.

    Raises:
        RankError: A tiling is for another rank.
        TilingError: The devices don't fit their tiling, or one repeats.

    Example:
        >>> whole = Tiling.replicated(1, 1)
        >>> plan = reshard_plan((6,), 4, whole, [0], Tiling.replicated(2, 1), [0, 1])
        >>> plan.bytes_kept, plan.bytes_by_pair
        (24, {(0, 1): 24})
    """
    plan = ReshardPlan(
        tuple(int(n) for n in shape), itemsize, src, tuple(src_devices), dst, tuple(dst_devices)
    )
    for what, tiling, devices in (
        ("source", src, plan.src_devices),
        ("destination", dst, plan.dst_devices),
    ):
        tiling.shard_shape(plan.shape, uneven=True)
        if len(devices) != tiling.num_devices:
            raise TilingError(
                f"{len(devices)} {what} devices for a tiling of {tiling.num_devices} positions"
            )
        if len(set(devices)) != len(devices):
            raise TilingError(f"a {what} device repeats in {list(devices)}")
    return plan


@dataclass(frozen=True)
class Round:
    """Pieces of one shape that go at the same time.

    Attributes:
        shape: Of each piece.
        by_sender: The piece that each device sends.
        by_receiver: The piece that each device receives.
    """

    shape: tuple[int, ...]
    by_sender: dict[int, Piece] = field(default_factory=dict)
    by_receiver: dict[int, Piece] = field(default_factory=dict)

    def try_add(self, piece: Piece) -> bool:
        """Add a piece, unless its sender or its receiver is busy."""
        if piece.source in self.by_sender or piece.destination in self.by_receiver:
            return False
        self.by_sender[piece.source] = self.by_receiver[piece.destination] = piece
        return True

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the devices that take part, in ascending order."""
        return tuple(sorted({*self.by_sender, *self.by_receiver}))

    def permutation(self) -> list[int]:
        """Return the receiver for each of `devices`, as a permutation.

        A device that sends nothing is paired with one that receives nothing; the block of such a
        transfer is ignored.
        """
        idle = iter([device for device in self.devices if device not in self.by_receiver])
        return [
            self.by_sender[device].destination if device in self.by_sender else next(idle)
            for device in self.devices
        ]


def schedule_rounds(pieces: Iterable[Piece]) -> tuple[Round, ...]:
    """Assign each piece to the first round in which its sender and receiver are idle.

    Args:
        pieces: All pieces, in their order.
    """
    by_shape: dict[tuple[int, ...], list[Round]] = {}
    order: list[Round] = []
    for piece in pieces:
        shape = tuple(s.stop - s.start for s in piece.source_index)
        rounds = by_shape.setdefault(shape, [])
        if not any(one.try_add(piece) for one in rounds):
            rounds.append(Round(shape))
            rounds[-1].try_add(piece)
            order.append(rounds[-1])
    return tuple(order)


def refine(tiling: Tiling, shape: Sequence[int], num_devices: int) -> Tiling | None:
    """Return a refinement of a tiling in which every device holds another part.

    Args:
        tiling: The tiling to refine; its copies don't count.
        shape: Of the array, in elements, which may be cut only evenly.
        num_devices: Number of devices.

    Returns:
        The tiling, or None where no even cut exists.

    Example:
        >>> refine(Tiling.replicated(2, 2), (8, 6), 4).counts
        (2, 2)
    """
    factor, left = divmod(num_devices, tiling.num_tiles)
    if left or 0 in shape:
        return None
    counts = list(tiling.counts)
    for prime in prime_factors(factor):
        extents = [n // k for n, k in zip(shape, counts, strict=True)]
        free = [dim for dim, extent in enumerate(extents) if extent % prime == 0]
        if not free:
            return None
        counts[max(free, key=lambda dim: extents[dim])] *= prime
    steps = ((num_devices, 1),) if num_devices > 1 else ()
    return Tiling(tuple(counts), num_devices, steps)


@dataclass(frozen=True)
class TransferLoad:
    """Approximate load of the busiest device in a reshard.

    Attributes:
        rounds: Number of pieces that it sends or receives.
        elements: Number of elements of these pieces.
    """

    rounds: int
    elements: int


def transfer_load(shape: Sequence[int], source: Tiling, target: Tiling) -> TransferLoad:
    """Return the load of the busiest device of a reshard from one tiling to another."""
    received = sent = elements = 1
    for size, before, after in zip(shape, source.counts, target.counts, strict=True):
        received *= max(1, -(-before // after))
        sent *= max(1, -(-after // before))
        elements *= size // max(before, after)
    sent *= -(-target.num_replicas // source.num_replicas)
    rounds = max(received, sent)
    return TransferLoad(rounds, rounds * elements)
