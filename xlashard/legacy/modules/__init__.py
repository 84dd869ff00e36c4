"""The removed names of JAX: one file per module that programs of 2022 and 2023 import.

Each file defines the names that today's JAX lacks, and lists them as its `ENTRIES`: since which
release a name is gone, whether it works, differs or is refused, and what to write today. The
installer, the report, `--migrate` and docs/legacy.md read those entries.

| files | JAX modules |
|---|---|
| `toplevel` | `jax` itself, and single names elsewhere |
| `core`, `linear_util`, `abstract_arrays`, `util` | the building blocks of jaxprs |
| `tree_util`, `random`, `prng`, `numpy`, `config` | of the same names |
| `sharding` | `jax.sharding`, and `PartitionSpec` in each of its modules |
| `device_array`, `xla_bridge` | `jax._src.device_array`, `jax.lib.xla_bridge` |
| `experimental`, `interpreters` | the modules of these packages |
| `entry` | `Entry`, which describes one name |
"""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from xlashard.legacy.modules.entry import Entry, Treatment

__all__ = ["Entry", "Treatment", "entries", "entries_by_module"]


@lru_cache(maxsize=1)
def entries_by_module() -> dict[str, tuple[Entry, ...]]:
    """Return the entries of each file of this package, by its dotted name below the package.

    Example:
        >>> listed = entries_by_module()["tree_util"]
        >>> [entry.today for entry in listed if entry.name == "jax.tree_map"]
        ['jax.tree.map']
    """
    listed = {name: getattr(importlib.import_module(name), "ENTRIES", ()) for name in _modules()}
    return {name.removeprefix(f"{__name__}."): found for name, found in listed.items() if found}


def _modules() -> Iterator[str]:
    for info in pkgutil.walk_packages(__path__, f"{__name__}."):
        if not info.ispkg:
            yield info.name


@lru_cache(maxsize=1)
def entries() -> dict[str, Entry]:
    """Return all entries, by the name that programs use.

    Raises:
        AssertionError: Two entries have one name, so the installer could not choose.
    """
    listed = [entry for of_module in entries_by_module().values() for entry in of_module]
    twice = [name for name, count in Counter(entry.name for entry in listed).items() if count > 1]
    assert not twice, f"in the table more than once: {', '.join(twice)}"
    return {entry.name: entry for entry in listed}
