"""Arrays: constructors, shards, host transfer and placement."""

import typing as _typing

from xlashard.array.array import Array, wrap, wrap_kinds, wrap_tree
from xlashard.array.moving import device_put
from xlashard.lazily import on_demand as _on_demand

if _typing.TYPE_CHECKING:
    from xlashard.array.buffer_makers import make_device_array, make_sharded_device_array
    from xlashard.array.constructors import make_array_from_callback
    from xlashard.array.dlpack import from_dlpack
    from xlashard.array.getting import device_get
    from xlashard.array.keys import key_shards
    from xlashard.array.live import live_arrays
    from xlashard.array.makers import device_put_replicated, device_put_sharded
    from xlashard.array.movement import DevicePair, ReshardReport, reshard_plan
    from xlashard.array.process_local import make_array_from_process_local_data
    from xlashard.array.shard import Shard
    from xlashard.array.singles import make_array_from_single_device_arrays
    from xlashard.array.unstacked import UnstackedShard, unstacked_shards
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.array.buffer_makers": (
                "make_device_array",
                "make_sharded_device_array",
            ),
            "xlashard.array.constructors": ("make_array_from_callback",),
            "xlashard.array.dlpack": ("from_dlpack",),
            "xlashard.array.getting": ("device_get",),
            "xlashard.array.keys": ("key_shards",),
            "xlashard.array.live": ("live_arrays",),
            "xlashard.array.makers": (
                "device_put_replicated",
                "device_put_sharded",
            ),
            "xlashard.array.process_local": ("make_array_from_process_local_data",),
            "xlashard.array.singles": ("make_array_from_single_device_arrays",),
            "xlashard.array.unstacked": (
                "UnstackedShard",
                "unstacked_shards",
            ),
            "xlashard.array.shard": ("Shard",),
            "xlashard.array.movement": ("DevicePair", "ReshardReport", "reshard_plan"),
        },
    )

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
    "wrap_kinds",
    "wrap_tree",
]
