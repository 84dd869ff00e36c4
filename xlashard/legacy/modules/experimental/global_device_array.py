"""`jax.experimental.global_device_array`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xlashard.legacy.arrays.device_arrays import DeviceArray
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.arrays.shards import (
    Device,
    Index,
    MeshAxes,
    Shape,
    Shard,
    get_shard_indices,
    get_shard_indices_replica_ids,
    get_shard_shape,
)
from xlashard.legacy.arrays.shards import (
    get_shard_indices_replica_ids_uncached as _get_shard_indices_replica_ids_uncached,
)
from xlashard.legacy.modules.entry import Entry
from xlashard.legacy.shardings.partition_spec import PartitionSpec

ArrayLike = np.ndarray | DeviceArray


def _hashed_index(x: Index) -> int:
    """Return a hash of an index, by the bounds of its slices."""
    return hash(tuple((entry.start, entry.stop) for entry in x))


class _GdaFastPathArgs(NamedTuple):
    """Precomputed arguments of the constructor, which ignores them."""

    global_indices_replica_ids: Mapping[Device, tuple[Index, int]]
    local_devices: Sequence[Device]


_GDA = "jax.experimental.global_device_array"
_DEVICE_ARRAYS = "xlashard.legacy.arrays.device_arrays"
_MAKE = "jax.make_array_from_callback(shape, NamedSharding(mesh, P(...)), data_callback)"
_KEPT = "The mapping is immutable, because it is cached."


def _gda(name: str, today: str, note: str = "") -> Entry:
    treatment = "differs" if note else "works"
    return Entry(f"{_GDA}.{name}", "0.4.7", treatment, f"{__name__}:{name}", today, note)


def _member(name: str, gone: str, today: str) -> Entry:
    source = f"{_DEVICE_ARRAYS}:AddedMembers.{name}"
    return Entry(f"jax.Array.{name}", gone, "works", source, today)


# Today's arrays are instances of the classes of 2022, so they need their members.
_MEMBERS = (
    ("device_buffer", "0.4.22", "x.addressable_data(0)"),
    ("device_buffers", "0.4.22", "[shard.data for shard in x.addressable_shards]"),
    ("sharding_spec", "0.4.7", "x.sharding"),
    ("indices", "0.4.7", "x.sharding.devices_indices_map(x.shape)"),
    ("one_replica_buffer_indices", "0.4.7", "shard.replica_id == 0"),
    ("to_py", "0.4.7", "np.asarray(x)"),
)

ENTRIES: tuple[Entry, ...] = (
    Entry(_GDA, "0.4.7", "works", __name__, "jax.Array"),
    _gda(
        "GlobalDeviceArray",
        _MAKE,
        "It is also an Array: operations on it return Arrays. The constructor checks its arguments "
        "even with `_enable_checks=False`, and pickling includes the mesh.",
    ),
    _gda("Shard", "x.addressable_shards", "Shards are equal if device, index and replica id are."),
    _gda("get_shard_indices", "NamedSharding(mesh, P(...)).devices_indices_map(shape)", _KEPT),
    _gda(
        "get_shard_indices_replica_ids",
        "[(s.index, s.replica_id) for s in x.global_shards]",
        _KEPT,
    ),
    _gda(
        "get_shard_shape",
        "NamedSharding(mesh, P(...)).shard_shape(shape)",
        "A dimension that is not divisible is an error; its size was rounded down.",
    ),
    _gda("_get_shard_indices_replica_ids_uncached", "x.global_shards"),
    _gda("_GdaFastPathArgs", _MAKE),
    _gda("_hashed_index", "hash(tuple((s.start, s.stop) for s in index))"),
    _gda("Device", "jax.Device"),
    _gda("DeviceArray", "jax.Array"),
    _gda("ArrayLike", "jax.typing.ArrayLike"),
    _gda("Index", "tuple[slice, ...]"),
    _gda("Shape", "tuple[int, ...]"),
    _gda("MeshAxes", "jax.sharding.PartitionSpec"),
    Entry(
        "jax.numpy.DeviceArray",
        "0.4.14",
        "differs",
        f"{_DEVICE_ARRAYS}:DeviceArray",
        "jax.Array",
        "`isinstance` is True for every fully addressable array, including today's.",
    ),
    *(_member(name, gone, today) for name, gone, today in _MEMBERS),
    Entry(
        "jax.Device.__call__",
        "0.4.27",
        "works",
        f"{_DEVICE_ARRAYS}:device_itself",
        "x.device",
        "`x.device()` was a method; `x.device` is the device today, and calling it returns it.",
    ),
)
