"""Plan a reshard as a sequence of steps; `execute.py` runs it."""

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.shardings import Device, default_memory_kind
from xlashard._jax.runtime.transfer import bits_of
from xlashard.core.array.placement.target import ResolvedSharding, resolve_sharding
from xlashard.core.sharding import GSPMDSharding, NamedSharding, partition_spec
from xlashard.geometry import Spec, Tiling, refine, transfer_load
from xlashard.support.lazily import dataclass

# XLA compiles no program for CPU devices on six bits.
_UNCOMPILED = (6,)

# Its collectives between CPU devices write past the end of their buffers for two bits, and some of
# its programs store one bit as a byte.
_UNSENT = (1, 2, *_UNCOMPILED)

# Bits of the elements that the host cannot slice.
_PACKED = (4, 6)

_COMPARISONS_KEPT = 512
_PLANS_KEPT = 512


class Strategy(StrEnum):
    """Strategy of one step of a reshard."""

    KEEP = "keep"
    """Every shard is in place; the buffers stay."""
    COPY = "copy"
    """Every shard is copied to another memory of its device."""
    HOST_MEMORY = "host memory"
    """The devices are emulated: missing parts are copied within the memory of the host."""
    COMPILED = "compiled"
    """The same devices hold other tiles: a compiled program, whose collectives XLA chooses."""
    SPLIT = "split"
    """Whole shards become partial results: of a sum one device keeps each shard, with zeros around
    it if the result has larger ones, and the others get zeros; of a maximum or minimum all keep
    theirs.
    """
    CARRY = "carry"
    """Whole shards are copied, each to another device."""
    P2P = "p2p"
    """Shards are sliced, copied to other devices, and joined there."""
    PERMUTE = "permute"
    """The same between processes: in each round a compiled permutation sends pieces."""
    TO_BYTES = "to bytes"
    """Every element is copied into a byte, by way of the host; the shards stay in place."""
    FROM_BYTES = "from bytes"
    """Every byte is copied back into an element."""


@dataclass(frozen=True)
class Step:
    """One step of a reshard.

    Attributes:
        strategy: The strategy.
        target: The sharding after the step.
    """

    strategy: Strategy
    target: ResolvedSharding


def in_one_memory(*shardings: ResolvedSharding) -> bool:
    """Return True if all devices share the memory of this process."""
    return all(
        resolved.on_host and resolved.sharding.is_fully_addressable for resolved in shardings
    )


def plan_steps(source: ResolvedSharding, target: ResolvedSharding, dtype: Any) -> tuple[Step, ...]:
    """Return the steps of a reshard; each begins at the target of the one before.

    Args:
        source: The sharding of the array.
        target: The sharding of the result.
        dtype: The dtype of the array. Elements of less than a byte take other steps.
    """
    bits = 8 if jnp.issubdtype(dtype, jax.dtypes.extended) else bits_of(dtype)
    if bits in _UNSENT and _goes_as_bytes(source, target, bits):
        as_bytes = _steps(source, target, in_one_memory(source, target))
        return Step(Strategy.TO_BYTES, source), *as_bytes, Step(Strategy.FROM_BYTES, target)
    return _steps(source, target, bits not in _PACKED and in_one_memory(source, target))


def _goes_as_bytes(source: ResolvedSharding, target: ResolvedSharding, bits: int) -> bool:
    """Return True if CPU devices exchange shards that no program can exchange as they are."""
    if not source.on_host or same_shards(source, target):
        return False
    return bits in _UNCOMPILED or not _in_one_process(source, target)


@cleared_with_jax
@lru_cache(maxsize=_PLANS_KEPT)
def _steps(
    source: ResolvedSharding, target: ResolvedSharding, one_memory: bool
) -> tuple[Step, ...]:
    if same_shards(source, target):
        same_memory = source.memory_kind == target.memory_kind
        return (Step(Strategy.KEEP if same_memory else Strategy.COPY, target),)
    if source.tiling.is_partial:
        return _reduced(source, target, one_memory)
    if target.tiling.is_partial:
        first = _steps(source, sharding_before_split(source, target), one_memory)
        # A step that keeps the buffers would share them with the source.
        return *(step for step in first if step.strategy is not Strategy.KEEP), Step(
            Strategy.SPLIT, target
        )
    if one_memory:
        return (Step(Strategy.HOST_MEMORY, target),)
    same_devices = set(source.sharding.devices) == set(target.sharding.devices)
    if same_devices:
        return _by_program(source, target)
    if not _in_one_process(source, target):
        return _between_processes(source, target)
    if len(source.sharding.devices) == len(target.sharding.devices):
        if source.tiling.same_tiles(target.tiling):
            return (Step(Strategy.CARRY, target),)
        if not set(source.sharding.devices) & set(target.sharding.devices):
            # On devices of its own the copied source leaves room for the buffers of the program.
            devices = target.sharding.devices
            intermediate = _with_tiles(devices, source.shape, source.tiling, source.memory_kind)
            return Step(Strategy.CARRY, intermediate), *_by_program(intermediate, target)
    return *_to_default_memory(source), Step(Strategy.P2P, target)


def _reduced(
    source: ResolvedSharding, target: ResolvedSharding, one_memory: bool
) -> tuple[Step, ...]:
    """Reduce partial results in place, then plan the reduced array's reshard.

    XLA aborts on a program that does both at once, on two meshes or from one set of unreduced axes
    to another.
    """
    intermediate = resolve_sharding(source.shape, source.sharding.reduced_sharding)
    rest = _steps(intermediate, target, one_memory)
    if (
        rest == (Step(Strategy.KEEP, target),)
        and target.sharding.devices == source.sharding.devices
    ):
        return _by_program(source, target)
    return *_by_program(source, intermediate), *rest


def sharding_before_split(source: ResolvedSharding, target: ResolvedSharding) -> ResolvedSharding:
    """Return the sharding of the whole values that become partial results on each device.

    A dimension that the source shards further, over unreduced axes of a sum, stays so: each device
    adds zeros around the tile that it has.
    """
    before, after = source.sharding, target.sharding
    whole = after.reduced_sharding
    if (
        isinstance(before, NamedSharding)
        and isinstance(after, NamedSharding)
        and before.mesh == after.mesh
        and target.tiling.reduction == "sum"
    ):
        ndim, unreduced = len(target.shape), after.normal_spec.unreduced
        pairs = zip(
            before.normal_spec.for_rank(ndim), after.normal_spec.for_rank(ndim), strict=True
        )
        dims = [
            old if old[: len(new)] == new and unreduced.issuperset(old[len(new) :]) else new
            for old, new in ((old or (), new or ()) for old, new in pairs)
        ]
        whole = after.with_spec(partition_spec(Spec(tuple(dims))))
    return resolve_sharding(target.shape, whole)


def keeps_tile(source: ResolvedSharding, target: ResolvedSharding) -> list[bool]:
    """Return for each device whether its partial result holds its tile.

    Of a sum it does on the first of the devices that have the tile for one result.
    """
    if target.tiling.reduction != "sum":
        return [True] * target.tiling.num_devices  # the maximum of replicas is the value
    keys = list(zip(target.tiling.whole.tile_ids(), source.tiling.tile_ids(), strict=True))
    addends = target.tiling.addend_ids().tolist()
    # In descending order, so that the first device comes last.
    first = dict(sorted(zip(keys, addends, strict=True), key=itemgetter(1), reverse=True))
    return [first[keys[i]] == addends[i] for i in range(len(keys))]


def same_shards(source: ResolvedSharding, target: ResolvedSharding) -> bool:
    """Return True if the same devices hold the same tiles, in any order of devices."""
    before, after = source.sharding.devices, target.sharding.devices
    if before == after or source.tiling.is_partial or target.tiling.is_partial:
        return before == after and source.tiling.same_tiles(target.tiling)
    return _same_shards(source.tiling, before, target.tiling, after)


@lru_cache(maxsize=_COMPARISONS_KEPT)
def _same_shards(
    source: Tiling, before: tuple[Device, ...], target: Tiling, after: tuple[Device, ...]
) -> bool:
    if source.counts != target.counts or len(before) != len(after) or set(before) != set(after):
        return False
    tiles = dict(zip(after, target.tile_ids().tolist(), strict=True))
    held = zip(before, source.tile_ids().tolist(), strict=True)
    return all(tiles[device] == tile for device, tile in held)


def _in_one_process(*both: ResolvedSharding) -> bool:
    """Return True if all devices belong to one process, not necessarily this one."""
    if all(side.sharding.is_fully_addressable for side in both):
        return True
    return len({d.process_index for side in both for d in side.sharding.devices}) == 1


def _by_program(source: ResolvedSharding, target: ResolvedSharding) -> tuple[Step, ...]:
    """Plan other tiles on the same devices; programs run in default memory."""
    first = _to_default_memory(source)
    result = _in_default_memory(target)
    return *first, Step(Strategy.COMPILED, result), *_from_default_memory(result, target)


def _between_processes(source: ResolvedSharding, target: ResolvedSharding) -> tuple[Step, ...]:
    """Plan a reshard to devices of other processes with as few pieces as possible.

    If every device of one side exchanged pieces with many of the other, the tiles are changed first
    (or last) on the side with more devices, so that only whole tiles of one side, or distinct parts
    of them, are sent between the two.
    """
    first, end = _to_default_memory(source), _in_default_memory(target)
    start = first[-1].target if first else source
    direct = *first, Step(Strategy.PERMUTE, end), *_from_default_memory(end, target)
    fewer, more = sorted((start, end), key=lambda side: len(side.sharding.devices))
    fine = refine(fewer.tiling, source.shape, len(more.sharding.devices))
    if fine is None:
        return direct
    intermediate = _with_tiles(more.sharding.devices, source.shape, fine, more.memory_kind)
    straight = transfer_load(source.shape, start.tiling, end.tiling)
    if more is end:
        around = transfer_load(source.shape, start.tiling, fine)
        detour = *first, Step(Strategy.PERMUTE, intermediate), *_to_tiles(intermediate, target)
    else:
        around = transfer_load(source.shape, fine, end.tiling)
        last = Step(Strategy.PERMUTE, end), *_from_default_memory(end, target)
        detour = *first, *_to_tiles(start, intermediate), *last
    if around.rounds * 2 <= straight.rounds:
        return detour
    less = around.elements * 2 <= straight.elements and around.rounds <= straight.rounds
    return detour if less else direct


def _to_tiles(source: ResolvedSharding, target: ResolvedSharding) -> tuple[Step, ...]:
    """Plan other tiles on the same devices, if they differ."""
    if not same_shards(source, target):
        return _by_program(source, target)
    return _from_default_memory(source, target)


def _in_default_memory(target: ResolvedSharding) -> ResolvedSharding:
    normal = default_memory_kind(target.sharding.devices[0])
    if target.memory_kind == normal:
        return target
    return _with_tiles(target.sharding.devices, target.shape, target.tiling, normal)


def _from_default_memory(source: ResolvedSharding, target: ResolvedSharding) -> tuple[Step, ...]:
    return () if source.memory_kind == target.memory_kind else (Step(Strategy.COPY, target),)


def _to_default_memory(source: ResolvedSharding) -> tuple[Step, ...]:
    normal = default_memory_kind(source.sharding.devices[0])
    if source.memory_kind == normal or normal is None:
        return ()
    target = resolve_sharding(source.shape, source.sharding.with_memory_kind(normal))
    return (Step(Strategy.COPY, target),)


def _with_tiles(
    devices: Sequence[Device], shape: tuple[int, ...], tiling: Tiling, memory_kind: str | None
) -> ResolvedSharding:
    """Resolve the tiles of an array on a list of devices."""
    tiles = tiling.to_tile_assignment()
    return resolve_sharding(shape, GSPMDSharding(devices, tiles, memory_kind=memory_kind))
