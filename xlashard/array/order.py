"""The same buffers under another sharding of the same devices; nothing moves."""

from collections.abc import Sequence

from xlashard._jax.shardings import Device
from xlashard._jax.transfer import Handle, assemble, make_aval, split
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
