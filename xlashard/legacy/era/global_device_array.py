"""`jax.experimental.global_device_array`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xlashard.legacy.device_arrays import DeviceArray
from xlashard.legacy.gda import GlobalDeviceArray
from xlashard.legacy.shards import (
    Device,
    Index,
    MeshAxes,
    Shape,
    Shard,
    get_shard_indices,
    get_shard_indices_replica_ids,
    get_shard_shape,
)
from xlashard.legacy.shards import (
    get_shard_indices_replica_ids_uncached as _get_shard_indices_replica_ids_uncached,
)
from xlashard.legacy.specs import PartitionSpec

__all__ = [
    "ArrayLike",
    "Device",
    "DeviceArray",
    "GlobalDeviceArray",
    "Index",
    "MeshAxes",
    "PartitionSpec",
    "Shape",
    "Shard",
    "_GdaFastPathArgs",
    "_get_shard_indices_replica_ids_uncached",
    "_hashed_index",
    "get_shard_indices",
    "get_shard_indices_replica_ids",
    "get_shard_shape",
]


ArrayLike = np.ndarray | DeviceArray


def _hashed_index(x: Index) -> int:
    """Return a hash of an index, by the bounds of its slices."""
    return hash(tuple((entry.start, entry.stop) for entry in x))


class _GdaFastPathArgs(NamedTuple):
    """What the constructor was spared; it may be given, and is not looked at."""

    global_indices_replica_ids: Mapping[Device, tuple[Index, int]]
    local_devices: Sequence[Device]
