"""Arrays: constructors, shards, host transfer and placement."""

from xlashard.array.array import Array, wrap, wrap_tree
from xlashard.array.buffer_makers import make_device_array, make_sharded_device_array
from xlashard.array.constructors import (
    make_array_from_callback,
    make_array_from_single_device_arrays,
)
from xlashard.array.dlpack import from_dlpack
from xlashard.array.keys import key_shards
from xlashard.array.live import live_arrays
from xlashard.array.makers import device_put_replicated, device_put_sharded
from xlashard.array.movement import DevicePair, ReshardReport, reshard_plan
from xlashard.array.moving import device_get, device_put
from xlashard.array.process_local import make_array_from_process_local_data
from xlashard.array.shard import Shard
from xlashard.array.unstacked import UnstackedShard, unstacked_shards

__all__ = [
    "Array",
    "DevicePair",
    "ReshardReport",
    "Shard",
    "UnstackedShard",
    "device_get",
    "device_put",
    "device_put_replicated",
    "device_put_sharded",
    "from_dlpack",
    "key_shards",
    "live_arrays",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "make_device_array",
    "make_sharded_device_array",
    "reshard_plan",
    "unstacked_shards",
    "wrap",
    "wrap_tree",
]
