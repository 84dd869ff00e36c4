"""From one placement to another, on the devices: which way to go, and going it.

Where source and destination have the same devices, a compiled identity lets XLA choose the
collectives, also across processes. Otherwise buffers go from device to device: as they are where
there are equally many, in the pieces of a reshard plan where not. Emulated devices are the host's
memory, and are served from there.
"""

import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.shardings import default_memory_kind
from xlashard._jax.transfer import Handle, assemble, copy_to, make_aval, split
from xlashard.array.host_put import put_value
from xlashard.array.memory import in_one_memory, move_in_memory
from xlashard.array.order import in_order
from xlashard.array.pieces import carry, move_in_pieces
from xlashard.array.placement import Places, places
from xlashard.array.retile import retile
from xlashard.errors import PlacementError
from xlashard.sharding import GSPMDSharding, Sharding, from_jax


def reshard(handle: Handle, target: Places, *, donate: bool = False, fresh: bool = False) -> Handle:
    """The same value in another place, committed.

    Args:
        handle: The source.
        target: Where to.
        donate: Lets the source's memory be used for the result. The source may be deleted
            afterwards, and if it isn't, its buffers may be in use by the result no more.
        fresh: Copies also what is there already; otherwise that is shared.

    Raises:
        PlacementError: It would have to go between processes to other devices.
    """
    source = places(handle.shape, from_jax(handle.sharding))
    if source.sharding.devices != target.sharding.devices:
        if set(source.sharding.devices) != set(target.sharding.devices):
            return _to_other_devices(handle, source, target, donate or fresh)
        handle = in_order(handle, target.sharding.devices)
        source = places(handle.shape, from_jax(handle.sharding))
    if not source.tiling.same_tiles(target.tiling):
        if in_one_memory(source, target):
            return move_in_memory(handle, source, target)
        return _to_other_tiles(handle, source, target, donate)
    if source.memory_kind != target.memory_kind:
        return copy_to(handle, target.twin)
    if donate:
        return retile(handle, source, target, None, donate=True)
    if fresh:
        return copy_to(handle, target.twin, fresh=True)
    if handle.committed and handle.sharding == target.twin:
        return handle
    aval = make_aval(handle.shape, handle.dtype, target.twin, handle.weak_type)
    return assemble(aval, target.twin, split(handle))


def relayout(handle: Handle, layout: Layout | None, where: Places) -> Handle:
    """The same value in the same place, its dimensions in another order in memory.

    Raises:
        PlacementError: The place is not the devices' default memory.
    """
    if layout is None or handle.format.layout == layout:
        return handle
    if where.memory_kind != default_memory_kind(where.sharding.devices[0]):
        raise PlacementError(
            f"a layout can only be chosen in the devices' default memory, not in "
            f"{where.memory_kind!r}: give the sharding alone"
        )
    return retile(handle, where, where, layout, donate=False)


def _to_other_tiles(handle: Handle, source: Places, target: Places, donate: bool) -> Handle:
    """Other tiles on the same devices; programs work in the devices' own memory."""
    handle, source = _to_default_memory(handle, source)
    normal = default_memory_kind(target.sharding.devices[0])
    if target.memory_kind == normal:
        # XLA can only use memory again for shards of the same size.
        donate = donate and source.shard_shape == target.shard_shape
        return retile(handle, source, target, None, donate=donate)
    between = GSPMDSharding(
        target.sharding.devices, target.tiling.to_tile_assignment(), memory_kind=normal
    )
    there = places(target.shape, between)
    return copy_to(retile(handle, source, there, None, donate=False), target.twin)


def _to_default_memory(handle: Handle, source: Places) -> tuple[Handle, Places]:
    normal = default_memory_kind(source.sharding.devices[0])
    if source.memory_kind == normal or normal is None:
        return handle, source
    there = places(source.shape, source.sharding.with_memory_kind(normal))
    return copy_to(handle, there.twin), there


def _to_other_devices(handle: Handle, source: Places, target: Places, fresh: bool) -> Handle:
    if not (source.sharding.is_fully_addressable and target.sharding.is_fully_addressable):
        raise PlacementError(
            f"an array on {_device_text(source.sharding)} can't go to "
            f"{_device_text(target.sharding)}: between processes it can only change its sharding "
            "on the devices that it is on; write a sharding over exactly those"
        )
    if 0 in handle.shape:
        return put_value(np.empty(handle.shape, handle.dtype), target, weak_type=handle.weak_type)
    carried = len(source.devices) == len(target.devices)
    if carried and source.tiling.same_tiles(target.tiling):
        return carry(handle, split(handle), target, fresh)
    if in_one_memory(source, target):
        return move_in_memory(handle, source, target)
    if carried:
        there = GSPMDSharding(target.sharding.devices, source.tiling.to_tile_assignment())
        carried_over = carry(handle, split(handle), places(handle.shape, there), fresh)
        return reshard(carried_over, target)
    handle, source = _to_default_memory(handle, source)
    return move_in_pieces(handle, source, target, fresh)


def _device_text(sharding: Sharding) -> str:
    devices = sharding.devices
    named = ", ".join(str(d) for d in devices[:4])
    return f"{len(devices)} devices ({named}{', ...' if len(devices) > 4 else ''})"
