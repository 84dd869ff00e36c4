"""Which way an array goes from one placement to another: said first, and gone by `reshard`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from xlashard._jax.shardings import Device, default_memory_kind
from xlashard.array.memory import in_one_memory
from xlashard.array.placement import Places, places
from xlashard.errors import PlacementError
from xlashard.geometry import Tiling
from xlashard.sharding import GSPMDSharding, Sharding

_COMPARISONS_KEPT = 512


class Way(StrEnum):
    """How shards get to a placement."""

    KEEP = "keep"
    """Every shard is where it should be; the buffers stay."""
    COPY = "copy"
    """Every shard is on its device, and goes to another memory there."""
    HOST_MEMORY = "host memory"
    """The devices are emulated: what is not in place yet is copied within the host's memory."""
    PROGRAM = "program"
    """The same devices hold other tiles: a compiled program, whose collectives XLA chooses."""
    CARRY = "carry"
    """Whole shards go, each to another device."""
    PIECES = "pieces"
    """Shards are cut up, the pieces carried, and put together where they belong."""


@dataclass(frozen=True)
class Step:
    """One part of a route.

    Attributes:
        way: How.
        to: Where it ends.
    """

    way: Way
    to: Places


def find_route(
    source: Places, target: Places, *, one_memory: bool | None = None
) -> tuple[Step, ...]:
    """The steps from one placement to another, each to be taken from where the one before ended.

    Args:
        source: Where the array is.
        target: Where it shall be.
        one_memory: Whether the devices share the host's memory; found out if not given.

    Raises:
        PlacementError: It would have to go between processes to other devices.
    """
    if same_shards(source, target):
        same_memory = source.memory_kind == target.memory_kind
        return (Step(Way.KEEP if same_memory else Way.COPY, target),)
    if one_memory if one_memory is not None else in_one_memory(source, target):
        return (Step(Way.HOST_MEMORY, target),)
    same_devices = set(source.sharding.devices) == set(target.sharding.devices)
    if same_devices:
        return _by_program(source, target)
    if not (source.sharding.is_fully_addressable and target.sharding.is_fully_addressable):
        raise PlacementError(
            f"an array on {_device_text(source.sharding)} can't go to "
            f"{_device_text(target.sharding)}: between processes it can only change its sharding "
            "on the devices that it is on; write a sharding over exactly those"
        )
    if len(source.devices) == len(target.devices):
        if source.tiling.same_tiles(target.tiling):
            return (Step(Way.CARRY, target),)
        if not set(source.sharding.devices) & set(target.sharding.devices):
            # On devices of its own the carried source leaves room for what the program needs.
            there = _bare(target.sharding.devices, source, source.memory_kind)
            return Step(Way.CARRY, there), *_by_program(there, target)
    return *_to_default_memory(source), Step(Way.PIECES, target)


def same_shards(source: Places, target: Places) -> bool:
    """Whether the same devices hold the same tiles, in whatever order they are listed."""
    ours, theirs = source.sharding.devices, target.sharding.devices
    if ours == theirs:
        return source.tiling.same_tiles(target.tiling)
    return _same_shards(source.tiling, ours, target.tiling, theirs)


@lru_cache(maxsize=_COMPARISONS_KEPT)
def _same_shards(
    source: Tiling, ours: tuple[Device, ...], target: Tiling, theirs: tuple[Device, ...]
) -> bool:
    if source.counts != target.counts or len(ours) != len(theirs) or set(ours) != set(theirs):
        return False
    tiles = dict(zip(theirs, target.tile_ids().tolist(), strict=True))
    held = zip(ours, source.tile_ids().tolist(), strict=True)
    return all(tiles[device] == tile for device, tile in held)


def _by_program(source: Places, target: Places) -> tuple[Step, ...]:
    """Other tiles on the same devices; programs work in the devices' own memory."""
    normal = default_memory_kind(target.sharding.devices[0])
    first = _to_default_memory(source)
    if target.memory_kind == normal:
        return *first, Step(Way.PROGRAM, target)
    there = _bare(target.sharding.devices, target, normal)
    return *first, Step(Way.PROGRAM, there), Step(Way.COPY, target)


def _to_default_memory(source: Places) -> tuple[Step, ...]:
    normal = default_memory_kind(source.sharding.devices[0])
    if source.memory_kind == normal or normal is None:
        return ()
    there = places(source.shape, source.sharding.with_memory_kind(normal))
    return (Step(Way.COPY, there),)


def _bare(devices: Sequence[Device], like: Places, memory_kind: str | None) -> Places:
    """The tiles of a placement on a list of devices."""
    tiles = like.tiling.to_tile_assignment()
    return places(like.shape, GSPMDSharding(devices, tiles, memory_kind=memory_kind))


def _device_text(sharding: Sharding) -> str:
    devices = sharding.devices
    named = ", ".join(str(d) for d in devices[:4])
    return f"{len(devices)} devices ({named}{', ...' if len(devices) > 4 else ''})"
