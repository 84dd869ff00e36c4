"""The same buffers under another order of the same devices; nothing moves.

JAX's own programs under Shardy take tiles only where a mesh of the devices, in their order, has
them. Any tiles have a mesh if the devices stand in the order of the tiles.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xlashard._jax.shardings import Device
from xlashard._jax.transfer import Handle, HandleType, assemble, make_aval, split
from xlashard.array.holder import Holder
from xlashard.geometry import Tiling
from xlashard.sharding import GSPMDSharding, NamedSharding, from_jax


def in_order(handle: Handle, devices: Sequence[Device]) -> Handle:
    """The handle under a sharding that lists its devices so."""
    sharding = from_jax(handle.sharding)
    if sharding.devices == tuple(devices):
        return handle
    indices = dict(
        zip(sharding.devices, sharding.tiling(handle.shape).indices(handle.shape), strict=True)
    )
    tiling = Tiling.from_indices(handle.shape, [indices[device] for device in devices])
    there = GSPMDSharding(devices, tiling.to_tile_assignment(), memory_kind=sharding.memory_kind)
    twin = there.twin(handle.shape)
    here = [sharding.devices[i] for i in sharding.addressable_positions]
    buffers = dict(zip(here, split(handle), strict=True))
    return assemble(
        make_aval(handle.shape, handle.dtype, twin, handle.weak_type),
        twin,
        [buffers[there.devices[i]] for i in there.addressable_positions],
        committed=handle.committed,
    )


def is_out_of_order(handle: Handle) -> bool:
    """Whether no mesh of the devices in their order has the tiles."""
    sharding = from_jax(handle.sharding)
    if isinstance(sharding, NamedSharding) or sharding.num_devices == 1:
        return False
    return bool(sharding.tiling(handle.shape).listed)


def in_tile_order(array: Holder, call: Callable[[Handle], Any]) -> Any:
    """What a function of JAX gives for an array that is out of order.

    It is asked with the devices in the order of the tiles, and its results are put in the array's
    own order again.
    """
    handle = array._handle
    sharding = from_jax(handle.sharding)
    by_tile = np.argsort(sharding.tiling(handle.shape).tile_ids(), kind="stable")
    out = call(in_order(handle, [sharding.devices[i] for i in by_tile.tolist()]))
    return _ordered(out, sharding.devices)


def _ordered(out: Any, devices: tuple[Device, ...]) -> Any:
    if type(out) in (tuple, list):
        return type(out)(_ordered(part, devices) for part in out)
    if type(out) is HandleType and out.sharding.device_set == set(devices):
        return in_order(out, devices)
    return out
