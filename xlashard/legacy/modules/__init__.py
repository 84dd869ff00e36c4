"""The removed names of JAX, by the modules from which programs of 2022 and 2023 import them.

Each file has a table of its names in `entries`: since which release a name is gone, whether it
works, differs or is refused, what to write today, and where the object is defined: in the file
here, unless another part of this package has it. The installer, the report, `--migrate` and
docs/guides/legacy.md read those entries.

| files | JAX modules |
|---|---|
| `toplevel` | `jax` itself, `jax.tree_util`, `jax.config`, and single names elsewhere |
| `core` | `jax.core`, `jax.abstract_arrays`, `jax.linear_util`, `jax.util` |
| `keywords` | functions that have lost keyword arguments, in all modules |
| `numpy` | functions of arrays, and the keys of `jax.random` |
| `arrays` | the array classes before `jax.Array`, and their checkpoints |
| `sharding` | `jax.sharding`, and `PartitionSpec` in each of its modules |
| `interpreters`, `pjit` | `jax.interpreters` and `jax.lib`; `jax.experimental.pjit` |
| `rule_tables` | the rules of primitives, in `jax.interpreters` |
| `maps`, `multihost_utils`, `host_callback` | other modules of `jax.experimental` |
"""

from xlashard.legacy.entries.entry import Entry, Treatment, entries, entries_by_module

__all__ = ["Entry", "Treatment", "entries", "entries_by_module"]
