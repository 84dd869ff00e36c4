"""Arrays: `Array`, constructors, host transfer, placement and resharding."""

import typing as _typing

from xlashard.array.core.array import Array, wrap, wrap_kinds, wrap_tree
from xlashard.array.device_put import device_put
from xlashard.lazily import on_demand as _on_demand

if _typing.TYPE_CHECKING:
    from xlashard.array.constructors import make_array_from_callback
    from xlashard.array.core.handles import live_arrays
    from xlashard.array.core.shard import Shard
    from xlashard.array.device_buffers import (
        UnstackedShard,
        make_device_array,
        make_sharded_device_array,
        unstacked_shards,
    )
    from xlashard.array.device_put import device_get
    from xlashard.array.dlpack import from_dlpack
    from xlashard.array.from_single_device_arrays import make_array_from_single_device_arrays
    from xlashard.array.keys import key_shards
    from xlashard.array.process_local import make_array_from_process_local_data
    from xlashard.array.reshard.report import DevicePair, ReshardReport, reshard_plan
    from xlashard.array.stacked import device_put_replicated, device_put_sharded
else:
    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.array.device_buffers": (
                "UnstackedShard",
                "make_device_array",
                "make_sharded_device_array",
                "unstacked_shards",
            ),
            "xlashard.array.constructors": ("make_array_from_callback",),
            "xlashard.array.dlpack": ("from_dlpack",),
            "xlashard.array.device_put": ("device_get",),
            "xlashard.array.keys": ("key_shards",),
            "xlashard.array.core.handles": ("live_arrays",),
            "xlashard.array.stacked": (
                "device_put_replicated",
                "device_put_sharded",
            ),
            "xlashard.array.process_local": ("make_array_from_process_local_data",),
            "xlashard.array.from_single_device_arrays": ("make_array_from_single_device_arrays",),
            "xlashard.array.core.shard": ("Shard",),
            "xlashard.array.reshard.report": ("DevicePair", "ReshardReport", "reshard_plan"),
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
