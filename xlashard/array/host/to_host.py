"""`x.to_host(policy)`: the value of an array that several processes hold."""

import math
from typing import Literal, get_args

import numpy as np

from xlashard._jax.runtime.transfer import host_view, split, start_host_copy
from xlashard.array.core.base import ArrayBase, Handle, check_alive, type_text
from xlashard.array.core.repr import index_text
from xlashard.array.host.copying import copy_all
from xlashard.array.host.read import distinct_here, has_value, read_value, reading_allowed
from xlashard.array.placement.target import resolve_sharding
from xlashard.array.reshard.execute import reshard
from xlashard.errors import ArgumentError, NotAddressableError, ProcessesError, counted
from xlashard.geometry import Tiling
from xlashard.processes import (
    RENDEZVOUS,
    Barrier,
    BarrierTimeoutError,
    format_by_process,
    processes_of,
)
from xlashard.sharding import GSPMDSharding, Sharding, from_jax

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
        return read_value(array, explicit=True) if has_value(array) else _local_box(array)
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
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"this process's pieces of an Array {type_text(handle)} are no one block of it: "
            f"{_pieces_text(tiling, handle.shape, distinct.positions)}; read them by "
            "[(shard.index, shard.data) for shard in x.addressable_shards], or the whole array by "
            "x.to_host('gather') in every process"
        )
    extents = np.array(tiling.shard_shape(handle.shape), np.int64)
    out = np.empty(tuple(((high - low) * extents).tolist()), handle.dtype)
    with reading_allowed(handle, explicit=True):
        buffers = split(handle)
        for number in distinct.buffers:
            start_host_copy(buffers[number])
        copies = []
        for number, tile in zip(distinct.buffers, coordinates - low, strict=True):
            window = zip((tile * extents).tolist(), extents.tolist(), strict=True)
            index = tuple(slice(start, start + size) for start, size in window)
            copies.append((out[index], host_view(buffers[number])[0]))
        copy_all(copies)
    out.flags.writeable = False
    return out


def _pieces_text(tiling: Tiling, shape: tuple[int, ...], positions: tuple[int, ...]) -> str:
    shown = [index_text(index) for index in tiling.indices(shape, positions[:_LISTED])]
    more = len(positions) - len(shown)
    return ", ".join(shown) + (f" and {counted(more, 'other')}" if more else "")


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
    processes = processes_of(sharding.devices)
    subject = f"{type_text(handle)} under {sharding}"
    try:
        came = RENDEZVOUS.exchange(
            Barrier(processes, "to_host", timeout, what="to_host('gather')"), subject
        )
    except BarrierTimeoutError as error:
        raise ProcessesError(  # no-catalogue: needs several processes
            f"x.to_host('gather') of an Array {type_text(handle)} "
            f"{error.after(timeout, len(processes))}: every process with a device of the array "
            "must, in the same order; x.to_host('local') needs no other process",
            processes=error.processes,
        ) from None
    if len(set(came.values())) > 1:
        raise ProcessesError(  # no-catalogue: needs several processes
            f"x.to_host('gather') was called with different arrays at the same time: "
            f"{format_by_process(came)}; "
            "let all processes gather the same arrays in the same order",
            processes=tuple(came),
        )
