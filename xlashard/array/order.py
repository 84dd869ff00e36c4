"""The same buffers under another sharding of the same devices; nothing moves."""

from collections.abc import Sequence
from functools import lru_cache

from xlashard._jax.shardings import Device
from xlashard._jax.transfer import Handle, assemble, make_aval, split
from xlashard.geometry import Tiling
from xlashard.sharding import GSPMDSharding, NamedSharding, from_jax

_ORDERS_KEPT = 512


def in_order(handle: Handle, devices: Sequence[Device]) -> Handle:
    """The handle under a sharding that lists its devices so."""
    sharding = from_jax(handle.sharding)
    if sharding.devices == tuple(devices):
        return handle
    tiling = _in_order(sharding.tiling(handle.shape), sharding.devices, tuple(devices))
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


@lru_cache(maxsize=_ORDERS_KEPT)
def _in_order(tiling: Tiling, listed: tuple[Device, ...], wanted: tuple[Device, ...]) -> Tiling:
    positions = {device: position for position, device in enumerate(listed)}
    return tiling.reordered([positions[device] for device in wanted])


def is_out_of_order(handle: Handle) -> bool:
    """Whether no mesh of the devices in their order has the tiles."""
    sharding = from_jax(handle.sharding)
    if isinstance(sharding, NamedSharding) or sharding.num_devices == 1:
        return False
    return bool(sharding.tiling(handle.shape).listed)
