"""Entries of removed names, and the placeholders of those without an equivalent."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
        source: The installed object, imported on first access: `module:attribute`, `module:` for
            a module, `removed:name` for a `RemovedApi`; or `module` for the home of all
            attributes of a removed module.
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
    def is_module(self) -> bool:
        """True if the name is a module, which a shim replaces."""
        return ":" not in self.source

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


type _Today = str | tuple[str, str]
"""Today's code, or today's code and the note."""


def works(parent: str, gone: str, source: str = "", /, **today: _Today) -> Iterator[Entry]:
    """Yield entries of one module that were removed together and work.

    Args:
        parent: The module.
        gone: The release that removed them.
        source: The module, or `module:attribute`, that has them under the same names; empty for
            names whose today's code is the full name of the object.
        **today: Today's code by name, or a tuple of today's code and the note.

    Example:
        >>> [entry.source for entry in works("jax.numpy", "0.4.16", alltrue="jax.numpy.all")]
        ['jax.numpy:all']
    """
    return _entries(parent, gone, "works", source, today)


def differs(parent: str, gone: str, source: str, /, **today: _Today) -> Iterator[Entry]:
    """Yield entries of one module that were removed together and work with differences.

    Args:
        parent: The module.
        gone: The release that removed them.
        source: The module that has them under the same names.
        **today: Today's code and the difference, by name.
    """
    return _entries(parent, gone, "differs", source, today)


def _entries(
    parent: str, gone: str, treatment: Treatment, source: str, today: Mapping[str, _Today]
) -> Iterator[Entry]:
    for name, value in today.items():
        code, note = (value, "") if isinstance(value, str) else value
        home, last = (source, name) if source else code.rsplit(".", 1)
        yield _entry(parent, name, gone, treatment, home, last, code, note)


def _entry(
    parent: str, name: str, gone: str, treatment: Treatment, home: str, attribute: str, *about: str
) -> Entry:
    separator = "." if ":" in home else ":"
    return Entry(f"{parent}.{name}", gone, treatment, f"{home}{separator}{attribute}", *about)


def works_in(parent: str, homes: Mapping[str, Sequence[tuple[str, ...]]]) -> Iterator[Entry]:
    """Yield entries of one module that work, by the modules that define them.

    Args:
        parent: The module.
        homes: For each module, or `module:attribute`, that defines objects: the name of each, the
            release that removed it, today's code, and the object's name unless it is the same
            without a leading underscore.

    Example:
        >>> rows = [("pi", "0.4.1", "math.pi"), ("_root", "0.4.1", "math.sqrt", "sqrt")]
        >>> [entry.source for entry in works_in("jax.util", {"math": rows})]
        ['math:pi', 'math:sqrt']
    """
    for home, rows in homes.items():
        for name, gone, today, *source in rows:
            attribute = source[0] if source else name.removeprefix("_")
            yield _entry(parent, name, gone, "works", home, attribute, today)


def moved(parent: str, gone: str, to: str, /, *names: str) -> Iterator[Entry]:
    """Yield entries of names that another module has today.

    Args:
        parent: The module that had them.
        gone: The release that removed them.
        to: The module that has them.
        *names: The names.
    """
    return works(parent, gone, **{name: f"{to}.{name}" for name in names})


def refused(parent: str, gone: str, today: str, note: str, /, *names: str) -> Iterator[Entry]:
    """Yield entries of names of one module that are refused for the same reason.

    Args:
        parent: The module.
        gone: The release that removed them.
        today: Today's code.
        note: The reason.
        *names: The names.
    """
    for name in names:
        full = f"{parent}.{name}"
        yield Entry(full, gone, "refused", f"{REMOVED}:{full}", today, note)


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


def imports(module: str, gone: str) -> Iterator[Entry]:
    """Yield entries of the modules that a module of 2022 imported.

    While the removed names are installed, they resolve to the installed shims.

    Args:
        module: The full name of the module.
        gone: The release that removed it.
    """
    for name in IMPORTED[module]:
        home = _HOMES[name]
        today = f"import {_TODAY.get(name, home)}"
        yield Entry(f"{module}.{name}", gone, "works", f"{home}:", today)


_PACKAGE = __name__.rpartition(".")[0]


@lru_cache(maxsize=1)
def entries_by_module() -> dict[str, tuple[Entry, ...]]:
    """Return the entries of each file of this package, by its dotted name below the package.

    Example:
        >>> listed = entries_by_module()["util"]
        >>> [entry.today for entry in listed if entry.name == "jax.tree_map"]
        ['jax.tree.map']
    """
    names = [info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])]
    listed = {name: importlib.import_module(f"{_PACKAGE}.{name}") for name in names}
    return {name: home.ENTRIES for name, home in listed.items() if hasattr(home, "ENTRIES")}


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
