"""The removed names of JAX: one file per module that programs of 2022 and 2023 import.

Each file defines the names that today's JAX lacks, and lists them as its `ENTRIES`: since which
release a name is gone, whether it works, differs or is refused, and what to write today. The
installer, the report, `--migrate` and docs/guides/legacy.md read those entries.

| files | JAX modules |
|---|---|
| `toplevel` | `jax` itself, `jax.config`, and single names elsewhere |
| `core`, `linear_util`, `util` | the building blocks of jaxprs and of trees |
| `random`, `numpy` | keys, and functions of arrays |
| `sharding` | `jax.sharding`, and `PartitionSpec` in each of its modules |
| `device_array`, `xla_bridge` | `jax._src.device_array`, `jax.lib.xla_bridge` |
| `experimental`, `interpreters` | the modules of these packages |
| `entry` | `Entry`, which describes one name, and `RemovedApi`, whose use raises an error |
"""

from xlashard.legacy.modules.entry import Entry, Treatment, entries, entries_by_module

__all__ = ["Entry", "Treatment", "entries", "entries_by_module"]
