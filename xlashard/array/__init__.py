"""Arrays: constructors, shards, host transfer and placement."""

from xlashard.array.array import Array, wrap, wrap_tree
from xlashard.array.constructors import (
    make_array_from_callback,
    make_array_from_single_device_arrays,
)
from xlashard.array.dlpack import from_dlpack
from xlashard.array.keys import key_shards
from xlashard.array.moving import device_get, device_put, live_arrays
from xlashard.array.process_local import make_array_from_process_local_data
from xlashard.array.shard import Shard

__all__ = [
    "Array",
    "Shard",
    "device_get",
    "device_put",
    "from_dlpack",
    "key_shards",
    "live_arrays",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "wrap",
    "wrap_tree",
]
