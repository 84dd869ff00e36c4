"""The names of the era, one entry each: what the installer installs and the page shows.

Each module here lists the names of one area as its `ENTRIES`, except `entry`, which says what an
entry is.
"""

import importlib
import pkgutil
from collections import Counter
from functools import lru_cache

from xlashard.legacy.table.entry import Entry, Treatment

__all__ = ["Entry", "Treatment", "areas", "entries"]


@lru_cache(maxsize=1)
def areas() -> dict[str, tuple[Entry, ...]]:
    """The entries of each area, by the area's name.

    Example:
        >>> [entry.today for entry in areas()["everyday"] if entry.name == "jax.tree_map"]
        ['jax.tree.map']
    """
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "entry")
    return {name: importlib.import_module(f"{__name__}.{name}").ENTRIES for name in names}


@lru_cache(maxsize=1)
def entries() -> dict[str, Entry]:
    """All entries, by the name that programs know.

    Raises:
        AssertionError: Two entries are about one name, so that it isn't clear what to install.
    """
    listed = [entry for area in areas().values() for entry in area]
    twice = [name for name, count in Counter(entry.name for entry in listed).items() if count > 1]
    assert not twice, f"in the table more than once: {', '.join(twice)}"
    return {entry.name: entry for entry in listed}
