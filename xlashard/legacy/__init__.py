"""The migration era: programs of 2022 and 2023 on today's JAX.

| modules | what is in them |
|---|---|
| `table` | every name of the era: since when it is gone, and what is done about it |
| `era` | what the era's modules had, one module for each |
| `installing`, `stand_ins`, `arrivals`, `changes` | puts them into JAX's modules, and back |
| `install` | does so when it is imported |
| `refusals` | names that say, when used, what to write instead |
| `command`, `running`, `joining`, `children` | runs a program with these names, also in a pod |
| `uses`, `watched`, `report` | which of the names it used, and at which lines |
| `migration` | writes today's names into a program |
| `flags`, `worlds`, `positional` | what a call may be told by flags and by thread: three worlds |
| `pjit`, `constraint` | the era's `pjit`, whose calls choose their world |
| `world_function`, `world_stages`, `kinds` | what a world asks of a call, and gives |
| `host_local` | calls with this process's part of each array |
| `gda`, `gda_making`, `shards` | `GlobalDeviceArray`, and which part of it each device holds |
| `device_arrays`, `device_makers` | `DeviceArray` and `ShardedDeviceArray` |
| `pmap` | the era's `pmap`, whose results lie on their devices as they did |
| `specs`, `markers` | the era's `PartitionSpec`, a tuple, and what may stand in its place |
| `meshes`, `thread_resources` | the era's `Mesh`, and the one in force |
| `shardings`, `sharding_specs`, `positional_sharding` | placements by the era's names |
| `parsed`, `pjit_internals` | specs and XLA's shardings taken apart, as the era's pjit did |
| `serialization` | checkpoints of single arrays, over TensorStore, which it asks for |
| `multihost_utils` | values between processes |

To import it tells JAX of its three classes of arrays, lets `jax.pmap` ask about the first of them,
and makes the flags and `positional` part of what JAX's caches tell calls apart by. All else that it
changes in JAX is changed by `installing`, from `install()` to `uninstall()`; and in a pod by
`joining`, in a process that runs one program and ends with it.
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
