"""Reads of values: every distinct tile is transferred once, all of them at the same time.

`to_host` also reads arrays that several processes hold.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from xlashard._jax.runtime.global_state import (
    Transfer,
    active_guards,
    guarded,
    inside_device_get,
)
from xlashard._jax.runtime.transfer import Handle, bits_of, host_view, split, start_host_copy
from xlashard.core.array.array_class.base import ArrayBase, check_alive, type_text
from xlashard.core.array.array_class.shard import index_text
from xlashard.core.array.placement.copying import copy_all
from xlashard.core.array.placement.target import resolve_sharding
from xlashard.core.array.reshard.execute import reshard
from xlashard.core.sharding import GSPMDSharding, Sharding, from_jax
from xlashard.errors import (
    ArgumentError,
    NotAddressableError,
    ProcessesError,
    UnreducedError,
    counted,
)
from xlashard.geometry import Index, Tiling
from xlashard.support.formatting import format_by_process
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.core import processes
else:
    processes = deferred("xlashard.core.processes")


class Distinct(NamedTuple):
    """Buffers of this process that hold tiles which no earlier buffer holds.

    Attributes:
        buffers: Their numbers among the buffers of this process.
        positions: Their device positions.
        complete: Whether they are all tiles of the array.
    """

    buffers: tuple[int, ...]
    positions: tuple[int, ...]
    complete: bool


@lru_cache(maxsize=4096)
def _distinct(tiling: Tiling, positions: tuple[int, ...]) -> Distinct:
    first: dict[int, int] = {}
    for number, tile in enumerate(tiling.tile_ids(positions).tolist()):
        first.setdefault(tile, number)
    buffers = tuple(first.values())
    return Distinct(buffers, tuple(positions[n] for n in buffers), len(first) == tiling.num_tiles)


def distinct_here(handle: Handle) -> tuple[Tiling, Distinct]:
    """Return the tiling of an array and the distinct tiles of this process.

    Raises:
        UnreducedError: The array is unreduced.
    """
    check_reduced(handle)
    sharding = from_jax(handle.sharding)
    tiling = sharding.tiling(handle.shape)
    return tiling, _distinct(tiling, sharding.addressable_positions)


def check_reduced(handle: Handle) -> None:
    """Check that an array is not unreduced.

    Raises:
        UnreducedError: The array is unreduced.
    """
    sharding = from_jax(handle.sharding)
    if not sharding.is_unreduced:
        return
    tiling = sharding.tiling(handle.shape)
    raise UnreducedError(
        f"the value of an Array {type_text(handle)} can't be read: each of its devices holds one "
        f"of {tiling.addends} partial results of a {tiling.reduction}, by {sharding}; reduce it "
        "first, for example by device_put(x, x.sharding.reduced_sharding)"
    )


def start_read(array: ArrayBase, *, explicit: bool = False) -> None:
    """Start the transfers that reading the value waits for.

    Args:
        array: The array.
        explicit: Whether the transfer is explicit, for transfer guards.
    """
    check_alive(array)
    handle = array._handle
    if array._value_cache is not None:
        return
    with reading_allowed(handle, explicit):
        buffers = split(handle)
        if handle.is_fully_replicated:
            # A process without a device of the array has no buffer.
            for buffer in buffers[:1]:
                start_host_copy(buffer)
            return
        for number in distinct_here(handle)[1].buffers:
            start_host_copy(buffers[number])


def reading_allowed(handle: Handle, explicit: bool) -> AbstractContextManager[None]:
    """Return the context of a transfer to the host, if transfer guards allow it."""
    guards = active_guards()
    if guards is None or _lies_open(handle):
        return _FREE
    explicit_form = "" if explicit or inside_device_get() else "device_get(x)"
    what = f"the value of an Array {type_text(handle)}"
    return guarded(guards, Transfer.DEVICE_TO_HOST, what, explicit_form)


_FREE = nullcontext()


def _lies_open(handle: Handle) -> bool:
    """Return True if the host can read the value in place, as one block."""
    if not handle.is_fully_replicated or bits_of(handle.dtype) < 8:
        return False
    return handle.platform() == "cpu" or handle.sharding.memory_kind in _HOST_KINDS


_HOST_KINDS = ("pinned_host", "unpinned_host")


def may_read(array: ArrayBase) -> bool:
    """Return True if transfer guards allow an implicit transfer of the value to the host."""
    guards = active_guards()
    return (
        guards is None
        or array._value_cache is not None
        or _lies_open(array._handle)
        or not guards.request("disallow", Transfer.DEVICE_TO_HOST, explicit=False)
    )


def is_unreduced(handle: Handle) -> bool:
    """Return True if the devices hold partial results, so that the value can't be read."""
    return from_jax(handle.sharding).is_unreduced


def holds_value(handle: Handle) -> bool:
    """Return True if the value of a handle is wholly in this process."""
    if is_unreduced(handle):
        return False
    if handle.is_fully_addressable:
        return True
    return bool(split(handle)) and distinct_here(handle)[1].complete


def read_value(array: ArrayBase, *, explicit: bool = False) -> np.ndarray:
    """Return the value as a read-only NumPy array.

    The copy is cached. If the host can read the value in place as one block, the result is a view
    of it and nothing is cached, so that the buffer can still be donated; a scalar is copied, which
    takes less time than a second view.

    Args:
        array: The array.
        explicit: Whether the transfer is explicit, for transfer guards.

    Raises:
        DeletedError: The array is deleted.
        NotAddressableError: Tiles are in other processes.
        TransferGuardError: A transfer guard of JAX forbids it.
    """
    handle = array._handle
    if handle.is_deleted():
        array._value_cache = None
        check_alive(array)
    value = array._value_cache
    if value is not None:
        return value
    try:
        if active_guards() is None:
            value, own = _fetch(handle)
        else:
            with reading_allowed(handle, explicit):
                value, own = _fetch(handle)
    except (RuntimeError, TypeError):
        check_alive(array)  # another thread may have deleted it
        raise
    if not own and not value.shape:
        value, own = value.copy(), True
    if own:
        value.flags.writeable = False
        array._value_cache = value
    elif value.flags.writeable:
        value.flags.writeable = False
    return value


def handle_value(handle: Handle) -> np.ndarray:
    """Return the value of a handle that is wholly in this process, without caching it."""
    return _fetch(handle)[0]


BRING_HERE = (
    "bring it here by device_put(x, sharding) with a sharding that has devices of this process, "
    "called by every process that has devices of either"
)
"""Advice for an array of which this process holds no tile."""


def _fetch(handle: Handle) -> tuple[np.ndarray, bool]:
    if handle.is_fully_replicated and (handle.is_fully_addressable or split(handle)):
        return host_view(handle)
    tiling, distinct = distinct_here(handle)
    if not distinct.positions and not distinct.complete:
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"this process has no device of an Array {type_text(handle)}, and so no part of its "
            f"value: read it in a process that has one, or {BRING_HERE}"
        )
    if not distinct.complete:
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"the value of an Array {type_text(handle)} is not wholly in this process, which holds "
            f"{len(distinct.buffers)} of its {tiling.num_tiles} pieces: read those by "
            "[shard.data for shard in x.addressable_shards] or x.to_host('local'), or bring the "
            "whole array to every process by x.to_host('gather') or "
            "multihost.process_allgather(x, tiled=True)"
        )
    indices = tiling.indices(handle.shape, distinct.positions)
    return _joined(handle, distinct, handle.shape, indices), True


def _joined(
    handle: Handle, distinct: Distinct, shape: tuple[int, ...], indices: Sequence[Index]
) -> np.ndarray:
    """Return a new array with the tiles of this process, each at its index."""
    buffers = split(handle)
    for number in distinct.buffers:
        start_host_copy(buffers[number])
    out = np.empty(shape, handle.dtype)
    copy_all(
        [
            (out[index], host_view(buffers[number])[0])
            for number, index in zip(distinct.buffers, indices, strict=True)
        ]
    )
    return out


Policy = Literal["local", "gather", "replicated"]

# Tiles that an error lists.
_LISTED = 4


def to_host(array: ArrayBase, policy: Policy, timeout: float) -> np.ndarray:
    """Return the value, or this process's part of it; see `Array.to_host`."""
    if policy not in get_args(Policy):
        raise ArgumentError(
            "policy must be 'local' (the part in this process), 'gather' (the whole value, from "
            "all processes) or 'replicated' (the whole value, if this process holds it), not "
            f"{policy!r}"
        )
    check_alive(array)
    if policy == "replicated" or array._handle.is_fully_addressable:
        return read_value(array, explicit=True)  # raises an error that names the missing tiles
    if policy == "local":
        return read_value(array, explicit=True) if holds_value(array._handle) else _local_box(array)
    sharding = from_jax(array._handle.sharding)
    if not sharding.addressable_positions:
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"this process has no device of an Array {type_text(array)}, and takes no part in "
            "gathering it: call x.to_host('gather') only in processes that have one"
        )
    if _all_have_it(sharding, array.shape):
        return read_value(array, explicit=True)
    return _gathered(array, sharding, timeout)


def _all_have_it(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Return True if every process with a device of the array holds all of its tiles."""
    tiling = sharding.tiling(shape)
    tiles = tiling.tile_ids()
    owners = np.array([device.process_index for device in sharding.devices])
    return all(
        len(np.unique(tiles[owners == process])) == tiling.num_tiles
        for process in np.unique(owners)
    )


def _local_box(array: ArrayBase) -> np.ndarray:
    """Return the block of the array that the tiles of this process form, or None."""
    handle = array._handle
    tiling, distinct = distinct_here(handle)
    if not distinct.positions:
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"this process holds no piece of an Array {type_text(handle)}: write "
            "x.to_host('gather') in every process that does, or put the array on devices of this "
            "one as well"
        )
    coordinates = tiling.coordinates(distinct.positions)
    low, high = coordinates.min(axis=0), coordinates.max(axis=0) + 1
    if math.prod((high - low).tolist()) != len(distinct.positions):
        shown = tiling.indices(handle.shape, distinct.positions[:_LISTED])
        more = len(distinct.positions) - len(shown)
        listed = ", ".join(map(index_text, shown))
        if more:
            listed += f" and {counted(more, 'other')}"
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"this process's pieces of an Array {type_text(handle)} are no one block of it: "
            f"{listed}; read them by "
            "[(shard.index, shard.data) for shard in x.addressable_shards], or the whole array by "
            "x.to_host('gather') in every process"
        )
    extents = tiling.shard_shape(handle.shape)
    shape = tuple(((high - low) * extents).tolist())
    indices = [
        tuple(slice(n * extent, (n + 1) * extent) for n, extent in zip(tile, extents, strict=True))
        for tile in (coordinates - low).tolist()
    ]
    with reading_allowed(handle, explicit=True):
        out = _joined(handle, distinct, shape, indices)
    out.flags.writeable = False
    return out


def _gathered(array: ArrayBase, sharding: Sharding, timeout: float) -> np.ndarray:
    """Gather the whole value by a program that all processes of the array run."""
    handle = array._handle
    _meet(handle, sharding, timeout)
    everywhere = GSPMDSharding.get_replicated(sharding.devices)
    whole = reshard(handle, resolve_sharding(handle.shape, everywhere))
    with reading_allowed(handle, explicit=True):
        value = host_view(whole)[0]
    value.flags.writeable = False
    array._value_cache = value
    return value


def _meet(handle: Handle, sharding: Sharding, timeout: float) -> None:
    group = processes.processes_of(sharding.devices)
    subject = f"{type_text(handle)} under {sharding}"
    try:
        values = processes.RENDEZVOUS.exchange(
            processes.Barrier(group, "to_host", timeout, what="to_host('gather')"), subject
        )
    except processes.BarrierTimeoutError as error:
        raise ProcessesError(  # no-catalogue: needs several processes
            f"x.to_host('gather') of an Array {type_text(handle)} "
            f"{error.after(timeout, len(group))}: every process with a device of the array "
            "must, in the same order; x.to_host('local') needs no other process",
            processes=error.processes,
        ) from None
    if len(set(values.values())) > 1:
        raise ProcessesError(  # no-catalogue: needs several processes
            f"x.to_host('gather') was called with different arrays at the same time: "
            f"{format_by_process(values)}; "
            "let all processes gather the same arrays in the same order",
            processes=tuple(values),
        )
