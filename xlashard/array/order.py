"""The same buffers under another sharding of the same devices; nothing moves.

JAX's own programs fail on some placements that XLA can do. Under Shardy they take tiles only where
a mesh of the devices, in their order, has them: any tiles have one if the devices stand in the
order of the tiles. Under GSPMD they want to name every result on the mesh of an argument, even one
that no spec there says; from an argument that is given as bare tiles, results are bare tiles.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xlashard._jax.shardings import Device
from xlashard._jax.transfer import (
    Handle,
    HandleType,
    UnnamedResultError,
    assemble,
    dressed,
    make_aval,
    split,
)
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


def asked_otherwise(array: Holder, error: Exception, call: Callable[[Handle], Any]) -> Any:
    """What a function of JAX gives for an array that it failed on, said in another way.

    Args:
        array: The array.
        error: What the function raised; raised again if saying it otherwise won't help.
        call: The function.
    """
    handle = array._handle
    if isinstance(error, UnnamedResultError):
        sharding = from_jax(handle.sharding)
        tiles = sharding.tiling(handle.shape).to_tile_assignment()
        bare = GSPMDSharding(sharding.devices, tiles, memory_kind=sharding.memory_kind)
        return call(dressed(handle, bare.twin(handle.shape)))
    if not is_out_of_order(handle):
        raise error
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
