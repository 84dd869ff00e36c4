"""Entries of removed names, and the placeholders of those without an equivalent."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

from xlashard._jax.runtime.tracebacks import shortened
from xlashard.errors import RefusedError

type Treatment = Literal["works", "differs", "refused"]


@dataclass(frozen=True)
class Entry:
    """Name that programs of 2022 and 2023 use, and JAX has removed or changed.

    Attributes:
        name: The full name: `jax.experimental.maps.Mesh`.
        gone: The release of JAX that removed or changed it: `0.4.14`.
        treatment: `works`, `differs` (works with differences) or `refused` (raises an error).
        source: The installed object, imported on first access: `module:attribute`, or `module`
            for a whole module.
        today: Today's code.
        note: The difference, or the reason of the refusal; empty if it works unchanged.
    """

    name: str
    gone: str
    treatment: Treatment
    source: str
    today: str
    note: str = ""

    @property
    def stays(self) -> bool:
        """True if a program may keep the name, because today's JAX has it too."""
        parent = self.name.rpartition(".")[0]
        above, _, module = parent.rpartition(".")
        if self.name in _STAYING or _MULTIHOST in (self.name, parent):
            return True
        return self.today in (self.name, f"from {above} import {module}")


_MULTIHOST = "jax.experimental.multihost_utils"
_STAYING = frozenset(
    {
        "jax.config",
        "jax.pmap",
        "jax.sharding.Mesh",
        "jax.experimental.array_serialization.serialization",
    }
)


def members(parent: str, gone: str, source: str, today: Mapping[str, str]) -> Iterator[Entry]:
    """Yield entries of one module that were removed together and work unchanged.

    Args:
        parent: The module.
        gone: The release that removed them.
        source: The module that defines them, under the same names.
        today: Today's code, by name.
    """
    for name, code in today.items():
        yield Entry(f"{parent}.{name}", gone, "works", f"{source}:{name}", code)


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


def imports(module: str) -> dict[str, str]:
    """Map each imported module's short name to the statement that imports it today.

    Args:
        module: The full name of the module.
    """
    return {name: f"import {_TODAY.get(name, _HOMES[name])}" for name in IMPORTED[module]}


def imported_modules(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which imports the modules of `IMPORTED` when they are read.

    While the removed names are installed, they resolve to the installed shims.

    Args:
        module: The full name of the module.

    Example:
        >>> imported_modules("jax.experimental.pjit")("np").__name__
        'numpy'
    """

    def attribute(name: str) -> Any:
        if name not in IMPORTED[module]:
            # no-catalogue: Python's own message for a missing attribute
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        return importlib.import_module(_HOMES[name])

    return attribute


_PACKAGE = __name__.rpartition(".")[0]


@lru_cache(maxsize=1)
def entries_by_module() -> dict[str, tuple[Entry, ...]]:
    """Return the entries of each file of this package, by its dotted name below the package.

    Example:
        >>> listed = entries_by_module()["util"]
        >>> [entry.today for entry in listed if entry.name == "jax.tree_map"]
        ['jax.tree.map']
    """
    listed = {name: getattr(importlib.import_module(name), "ENTRIES", ()) for name in _modules()}
    return {name.removeprefix(f"{_PACKAGE}."): found for name, found in listed.items() if found}


def _modules() -> Iterator[str]:
    for info in pkgutil.walk_packages([str(Path(__file__).parent)], f"{_PACKAGE}."):
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

    @shortened
    def __getitem__(self, key: Any) -> NoReturn:
        raise_removed(self._name)

    @shortened
    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise_removed(self._name)

    @shortened
    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise_removed(self._name)

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False
