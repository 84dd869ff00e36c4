"""Entries of removed names, and the placeholders of those without an equivalent."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from xlashard.errors import RefusedError
from xlashard.support.tracebacks import shortened

type Treatment = Literal["works", "differs", "refused"]


@dataclass(frozen=True)
class Entry:
    """Name that programs of 2022 and 2023 use, and JAX has removed or changed.

    Attributes:
        name: The full name: `jax.experimental.maps.Mesh`.
        gone: The release that removed or changed it: `0.4.14`.
        treatment: `works`, `differs` (works with differences) or `refused` (raises an error).
        home: The module that defines it, as in `works`.
        today: Today's code.
        note: The difference, or the reason of the refusal; empty if it works unchanged.
        module: The module of this package that implements the names of its table.
        path: The name below the removed module; empty for the module itself.
        library: The library that removed or changed it.
    """

    name: str
    gone: str
    treatment: Treatment
    home: str
    today: str
    note: str = ""
    module: str = ""
    path: str = ""
    library: str = "JAX"

    def noting(self, note: str) -> "Entry":
        """Return the entry with what else users should know."""
        return replace(self, note=note)

    def but(self, note: str) -> "Entry":
        """Return the entry as that of a name which works with a difference."""
        return replace(self, treatment="differs", note=note)

    because = noting
    """Return the entry with the reason of the refusal."""

    @property
    def is_module(self) -> bool:
        """True if the name is a module, which a shim replaces."""
        return not self.path and ":" not in self.home

    @cached_property
    def source(self) -> str:
        """Return the installed object, which is imported on first access.

        It is `module:attribute`, `module:` for a module, or `removed:name` for a `RemovedApi`; or
        `module` for the home of all attributes of a removed module.
        """
        source, name = self.home, self.path.rpartition(".")[2].removeprefix("_")
        if not source and self.path and not hasattr(importlib.import_module(self.module), name):
            module, _, name = self.today.partition("(")[0].rpartition(".")
            return f"{module}:{name}"
        source = source or self.module
        if not self.path or (":" in source and not source.endswith(".")):
            return source
        return f"{source}{name}" if source.endswith(".") else f"{source}:{name}"

    @property
    def stays(self) -> bool:
        """True if a program may keep the name, because today's JAX has it too."""
        parent = self.name.rpartition(".")[0]
        above, _, module = parent.rpartition(".")
        if self.name in _STAYING or _MULTIHOST in (self.name, parent):
            return True
        return self.today in (self.name, f"from {above} import {module}")


ALIASES = {
    "jax.pxla": "jax.interpreters.pxla",
    "jax.xla": "jax.interpreters.xla",
    "jax._src.lib.xla_bridge": "jax.lib.xla_bridge",
    "jax._src.prng": "jax.prng",
    "jax.experimental.gda_serialization.serialization": (
        "jax.experimental.array_serialization.serialization"
    ),
}
"""Modules that JAX had under two names; each of them has the entries of the other."""

_MULTIHOST = "jax.experimental.multihost_utils"
_STAYING = frozenset(
    {
        "jax.config",
        "jax.pmap",
        "jax.sharding.Mesh",
        "jax.experimental.array_serialization.serialization",
    }
)


type EntryTable = Mapping[str, Mapping[str, Entry]]
"""Entries without names, by module and by path below it; the path of the module itself is empty."""


def works(gone: str, today: str, home: str = "") -> Entry:
    """Return the entry of a name that works; `but` adds a difference.

    Args:
        gone: The release that removed it.
        today: Today's code.
        home: The module that defines it, under the same name without a leading underscore;
            `module:object.` for an attribute of an object, and `module:object` for an object of
            another name. If empty, the module of this package with the name of the table defines
            it; if that does not, today's code is the object's full name, or calls it.
    """
    return Entry("", gone, "works", home, today)


def refused(gone: str, today: str) -> Entry:
    """Return the entry of a name whose use raises an error; `because` adds the reason."""
    return Entry("", gone, "refused", REMOVED, today)


def moved(gone: str, to: str, *names: str) -> dict[str, Entry]:
    """Return the entries of names that another module has today, by name.

    Args:
        gone: The release that removed them.
        to: The module that has them.
        *names: The names.
    """
    return {name: works(gone, f"{to}.{name}") for name in names}


def read_table(module: str, table: EntryTable) -> Iterator[Entry]:
    """Yield the entries of a table.

    Args:
        module: The module that implements its names.
        table: The table.

    Example:
        >>> names = {"_pi": works("0.4.1", "3.14"), "cwd": works("0.4.1", "os.getcwd()")}
        >>> [(entry.name, entry.source) for entry in read_table("math", {"jax.util": names})]
        [('jax.util._pi', 'math:pi'), ('jax.util.cwd', 'os:getcwd')]
    """
    for parent, names in table.items():
        for path, entry in names.items():
            full = f"{parent}.{path}".rstrip(".")
            home = f"{REMOVED}:{full}" if entry.home == REMOVED else entry.home
            yield replace(entry, name=full, home=home, module=module, path=path)


REMOVED = "removed"
"""Module part of the `source` of names that a `RemovedApi` replaces."""

_HOMES = {
    "ad": "jax.interpreters.ad",
    "batching": "jax.interpreters.batching",
    "core": "jax.core",
    "lu": "jax.linear_util",
    "maps": "jax.experimental.maps",
    "mlir": "jax.interpreters.mlir",
    "np": "numpy",
    "pe": "jax.interpreters.partial_eval",
    "pxla": "jax.interpreters.pxla",
    "xb": "jax.lib.xla_bridge",
    "xla": "jax.interpreters.xla",
}

_TODAY = {
    "lu": "jax.extend.linear_util",
    "maps": "jax.sharding",
    "pxla": "jax.sharding",
    "xb": "jax.extend.backend",
}

IMPORTED = {
    "jax.experimental.maps": ("ad", "batching", "core", "lu", "mlir", "np", "pe", "pxla", "xla"),
    "jax.experimental.pjit": (
        *("ad", "batching", "core", "lu", "maps", "mlir", "np", "pe", "pxla", "xb", "xla"),
    ),
    "jax.interpreters.pxla": ("ad", "batching", "lu", "mlir", "np", "pe", "xb", "xla"),
    "jax.interpreters.xla": ("ad", "lu", "np", "pe", "xb"),
}
"""The imported modules of each module of 2022, by its name."""


def imports(module: str, gone: str) -> dict[str, Entry]:
    """Return the entries of the modules that a module of 2022 imported, by their short names.

    While the removed names are installed, they resolve to the installed shims.

    Args:
        module: The full name of the module.
        gone: The release that removed it.
    """
    homes = {name: _HOMES[name] for name in IMPORTED[module]}
    return {
        name: works(gone, f"import {_TODAY.get(name, home)}", f"{home}:")
        for name, home in homes.items()
    }


_WITHOUT_NAMES = ("entry", "keywords")
"""Files of this folder that have no table of names."""


@lru_cache(maxsize=1)
def entries_by_module() -> dict[str, tuple[Entry, ...]]:
    """Return the entries of each table, by the name of the module that implements its names.

    Example:
        >>> listed = entries_by_module()["toplevel"]
        >>> [entry.today for entry in listed if entry.name == "jax.tree_map"]
        ['jax.tree.map']
    """
    listed = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if info.name not in _WITHOUT_NAMES:
            file = importlib.import_module(f"{__package__}.{info.name}")
            listed[info.name] = tuple(
                read_table(f"xlashard.legacy.modules.{info.name}", file.ENTRIES)
            )
    return listed


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


def raise_removed(name: str) -> NoReturn:
    """Raise the error for a removed name that has no equivalent.

    Args:
        name: The name of its entry, which has the reason and the advice.

    Raises:
        RefusedError: Always.
    """
    entry = entries()[name]
    reason = entry.note.rstrip(".")
    raise RefusedError(f"{name} was removed from JAX: {reason}. Write: {entry.today}", name=name)


class RemovedApi:
    """Placeholder for a function or class that cannot be provided.

    Importing it, comparing it and `isinstance` (always False) work. Calling it, deriving from it
    and reading its attributes raise `RefusedError` with the advice of its entry.

    Args:
        name: The name of its entry.

    Example:
        >>> xmap = RemovedApi("jax.core.new_main")
        >>> isinstance(1, xmap)
        False
        >>> xmap(None)
        Traceback (most recent call last):
            ...
        xlashard.errors.RefusedError: jax.core.new_main was removed from JAX: ...
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.__name__ = self.__qualname__ = name.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"<removed API {self._name}>"

    @shortened
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `RefusedError` with the advice of the entry."""
        raise_removed(self._name)

    @shortened
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # Python itself looks up special attributes.
            raise AttributeError(name)  # no-catalogue: Python's own message for a missing attribute
        raise_removed(self._name)

    __getitem__ = __setitem__ = __mro_entries__ = __call__

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False
