"""Programs of 2022 and 2023 on today's JAX.

| module | contents |
|---|---|
| `entries` | every removed name: since when, and what to write today |
| `modules` | their definitions |
| `installer` | installs the removed names into JAX's modules, and uninstalls them |
| `libraries` | names that other libraries than JAX removed, for `--libraries` |
| `module_shims` | modules that replace removed ones, and patches of modules |
| `install` | installs them on import |
| `run_command` | `xlashard legacy -- python script.py`, and `python -m xlashard.legacy` |
| `recorder`, `usage_report` | recording uses of removed names, and printing them |
| `migration` | `xlashard legacy --migrate`, which rewrites a program |
| `modes` | flags, and `pjit` with `jax_array` on and off |
| `arrays` | `GlobalDeviceArray` and the device arrays |
| `shardings` | partition specs, `OpSharding`s and `ShardingSpec`s |
| `serialization` | checkpoints of single arrays in TensorStore |
| `historic_errors` | errors with the built-in classes that JAX raised in 2022 |

Names of the era that can be imported from `xlashard` too, such as `PmapSharding`, are listed here
alone.

Importing this package imports no JAX: `migration` works without. Each name is imported when it is
first read. That registers its array class with JAX and makes `jax.pmap` refuse `GlobalDeviceArray`,
or adds the flags and `positional semantics` to the key of JAX's caches.
Everything else in JAX changes between `install()` and `uninstall()`, or in a process of the runner.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from xlashard.core.pjit.shardings.resources import FROM_GDA
    from xlashard.core.sharding import XLACompatibleSharding
    from xlashard.legacy.arrays.buffer_arrays import make_device_array, make_sharded_device_array
    from xlashard.legacy.arrays.device_arrays import DeviceArray, ShardedDeviceArray
    from xlashard.legacy.arrays.gda import GlobalDeviceArray
    from xlashard.legacy.arrays.stacked import (
        device_put_replicated,
        device_put_sharded,
        unstacked_shards,
    )
    from xlashard.legacy.installer import installed, uninstall
    from xlashard.legacy.modes.config_flags import (
        ArrayMode,
        config,
        current_array_mode,
        hide_flags,
        jax_array,
        parallel_functions_output_gda,
        pmap_no_rank_reduction,
        show_flags,
    )
    from xlashard.legacy.modes.pjit import pjit, with_sharding_constraint
    from xlashard.legacy.shardings.op_shardings import OpShardingSharding
    from xlashard.legacy.shardings.pmap import PmapSharding
    from xlashard.legacy.shardings.sharding_spec import (
        Chunked,
        NoSharding,
        Replicated,
        ShardedAxis,
        ShardingSpec,
        Unstacked,
    )
else:
    from xlashard.support.lazily import on_demand as _on_demand

    __getattr__, __dir__ = _on_demand(
        __name__,
        globals(),
        {
            "xlashard.core.pjit.shardings.resources": ("FROM_GDA",),
            "xlashard.core.sharding": ("XLACompatibleSharding",),
            "xlashard.legacy.arrays.buffer_arrays": (
                *("make_device_array", "make_sharded_device_array"),
            ),
            "xlashard.legacy.arrays.stacked": (
                *("device_put_replicated", "device_put_sharded", "unstacked_shards"),
            ),
            "xlashard.legacy.shardings.op_shardings": ("OpShardingSharding",),
            "xlashard.legacy.shardings.pmap": ("PmapSharding",),
            "xlashard.legacy.shardings.sharding_spec": (
                *("Chunked", "NoSharding", "Replicated", "ShardedAxis", "ShardingSpec"),
                "Unstacked",
            ),
            "xlashard.legacy.arrays.device_arrays": ("DeviceArray", "ShardedDeviceArray"),
            "xlashard.legacy.arrays.gda": ("GlobalDeviceArray",),
            "xlashard.legacy.installer": ("installed", "uninstall"),
            "xlashard.legacy.modes.config_flags": (
                *("ArrayMode", "config", "current_array_mode"),
                *("hide_flags", "jax_array", "parallel_functions_output_gda"),
                *("pmap_no_rank_reduction", "show_flags"),
            ),
            "xlashard.legacy.modes.pjit": ("pjit", "with_sharding_constraint"),
        },
    )

__all__ = [
    "FROM_GDA",
    "ArrayMode",
    "Chunked",
    "DeviceArray",
    "GlobalDeviceArray",
    "NoSharding",
    "OpShardingSharding",
    "PmapSharding",
    "Replicated",
    "ShardedAxis",
    "ShardedDeviceArray",
    "ShardingSpec",
    "Unstacked",
    "XLACompatibleSharding",
    "config",
    "current_array_mode",
    "device_put_replicated",
    "device_put_sharded",
    "hide_flags",
    "installed",
    "jax_array",
    "make_device_array",
    "make_sharded_device_array",
    "parallel_functions_output_gda",
    "pjit",
    "pmap_no_rank_reduction",
    "show_flags",
    "uninstall",
    "unstacked_shards",
    "with_sharding_constraint",
]
