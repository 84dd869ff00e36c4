"""The migration era: programs of 2022 and 2023 on today's JAX.

| modules | what is in them |
|---|---|
| `specs` | the era's `PartitionSpec`, which is a tuple |
| `meshes`, `resources` | the era's `Mesh`, and the mesh in force as `thread_resources` has it |
| `parsed`, `pjit_internals`, `markers` | specs and XLA's shardings taken apart, as its pjit did |
| `shardings`, `sharding_specs`, `device_makers` | placements by its names, and arrays over them |
| `positional` | whether shapes are this process's part of an array or all of it |
| `table` | every name of the era: since when it is gone, and what is done about it |
| `installing`, `stand_ins` | puts these names into JAX's modules, and takes them away |
| `install` | does so when it is imported |
| `era` | what the era's modules had, one module for each |
| `running`, `command` | runs a program with these names in place |
| `joining` | in an emulated pod, together with the other processes |
| `refusals` | names that say, when used, what to write instead |
| `gda`, `gda_making`, `shards` | `GlobalDeviceArray`, and which part of it each device holds |
| `device_arrays` | `DeviceArray` and `ShardedDeviceArray` |
| `pmap` | the era's `pmap`, whose results lie on their devices as they did |
| `serialization` | checkpoints of single arrays, over TensorStore, which it asks for |
| `multihost_utils` | values between processes |
| `flags`, `worlds` | the era's flags, and the three worlds that they choose from |
| `pjit`, `constraint` | the era's `pjit`, whose calls choose their world |
| `kinds`, `world_function`, `world_stages` | what a world asks of a call, and gives |
| `host_local` | calls with this process's part of each array |
"""

from xlashard.legacy.constraint import with_sharding_constraint
from xlashard.legacy.device_arrays import DeviceArray, ShardedDeviceArray
from xlashard.legacy.flags import (
    config,
    hide_flags,
    jax_array,
    parallel_functions_output_gda,
    pmap_no_rank_reduction,
    show_flags,
)
from xlashard.legacy.gda import GlobalDeviceArray
from xlashard.legacy.installing import installed, uninstall
from xlashard.legacy.pjit import pjit
from xlashard.legacy.worlds import World, world_in_force

__all__ = [
    "DeviceArray",
    "GlobalDeviceArray",
    "ShardedDeviceArray",
    "World",
    "config",
    "hide_flags",
    "installed",
    "jax_array",
    "parallel_functions_output_gda",
    "pjit",
    "pmap_no_rank_reduction",
    "show_flags",
    "uninstall",
    "with_sharding_constraint",
    "world_in_force",
]
