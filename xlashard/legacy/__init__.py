"""The migration era: programs of 2022 and 2023 on today's JAX.

| modules | what is in them |
|---|---|
| `specs` | the era's `PartitionSpec`, which is a tuple |
| `positional` | whether shapes are this process's part of an array or all of it |
| `table` | every name of the era: since when it is gone, and what is done about it |
| `flags`, `worlds` | the era's flags, and the three worlds that they choose from |
"""

from xlashard.legacy.flags import (
    config,
    hide_flags,
    jax_array,
    parallel_functions_output_gda,
    pmap_no_rank_reduction,
    show_flags,
)
from xlashard.legacy.worlds import World, world_in_force

__all__ = [
    "World",
    "config",
    "hide_flags",
    "jax_array",
    "parallel_functions_output_gda",
    "pmap_no_rank_reduction",
    "show_flags",
    "world_in_force",
]
