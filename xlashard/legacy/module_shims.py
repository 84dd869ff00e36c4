"""Shims of removed modules, and patches that can be undone."""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

from xlashard.legacy.entries.entry import REMOVED, Entry, RemovedApi
from xlashard.support.tracebacks import short_tracebacks

type Listener = Callable[[Entry, Any, FrameType], None]
"""Called on each access, with the entry, its object and the accessing frame."""


def resolve_source(source: str) -> Any:
    """Import the object of an entry's `source`.

    Args:
        source: `module:attribute`, `module` or `module:` for a module, or `removed:name` for the
            placeholder of a removed name.

    Example:
        >>> resolve_source("math:pi")
        3.141592653589793
    """
    home, _, member = source.partition(":")
    if home == REMOVED:
        return RemovedApi(member)
    value = importlib.import_module(home)
    for part in filter(None, member.split(".")):
        value = getattr(value, part)
    return value


@dataclass
class ModuleMembers:
    """Attributes of a shim or of a patched module.

    Attributes:
        module: The module's name.
        whole: The module's own entry, if any; all attributes of its source are members.
        entries: The entry of each name.
        values: The shims of submodules, by their last name, and the objects resolved so far.
        behind: Returns the module's original attributes, which JAX's own code keeps getting.
        listener: Called on each access.
        migrated: The files whose code gets the module as it is without the removed names.
    """

    module: str
    whole: Entry | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    behind: Callable[[str], Any] | None = None
    listener: Listener | None = None
    migrated: frozenset[str] = frozenset()

    @property
    def can_cache(self) -> bool:
        """True if an access is the same for every file, and of no interest later."""
        return self.listener is None and not self.migrated

    def get(self, name: str, frame: FrameType) -> Any:
        """Return the value of a name.

        Args:
            name: The name.
            frame: The accessing frame.

        Raises:
            AttributeError: The module has no such attribute.
        """
        is_hidden = frame.f_code.co_filename in self.migrated or (
            self.behind is not None and _is_of_jax(frame)
        )
        value = MISSING if is_hidden else self._find(name)
        if value is not MISSING:
            if self.listener is not None:
                self._notify(self.listener, name, value, frame)
            return value
        if self.behind is not None:
            return self.behind(name)
        # no-catalogue: Python's own message for a missing attribute
        raise AttributeError(f"module {self.module!r} has no attribute {name!r}", name=name)

    def names(self) -> set[str]:
        """All names that are served."""
        names = {*self.entries, *self.values}
        if self.whole is not None:
            home = importlib.import_module(self.whole.source)
            names |= {name for name in dir(home) if not _is_private(name)}
        return names

    def _find(self, name: str) -> Any:
        if name in self.entries and name not in self.values:
            self.values[name] = resolve_source(self.entries[name].source)
        if name in self.values:
            return self.values[name]
        if self.whole is None or _is_private(name):
            return MISSING
        return getattr(importlib.import_module(self.whole.source), name, MISSING)

    def _notify(self, listener: Listener, name: str, value: Any, frame: FrameType) -> None:
        entry = self.entries.get(name)
        if isinstance(value, ModuleShim):
            entry = value._members.whole
        elif entry is None and self.whole is not None:
            entry = replace(self.whole, name=f"{self.module}.{name}")
        if entry is not None:
            listener(entry, value, frame)


def _is_private(name: str) -> bool:
    """Return True for attributes that each module defines itself: `__file__`, `__spec__`."""
    return name.startswith("__")


def _is_of_jax(frame: FrameType) -> bool:
    """Return True if the frame runs code of JAX, or of this package outside `legacy`."""
    package, _, rest = (frame.f_globals.get("__name__") or "").partition(".")
    if package == "xlashard":
        return rest.partition(".")[0] != "legacy"
    return package in ("jax", "jaxlib")


class ModuleShim(ModuleType):
    """Module of 2022 or 2023 that replaces a missing or different one of today.

    Its attributes are those of the entries, imported on first access.

    Args:
        members: Its attributes.
        today: The module that it replaces, if JAX still has one.
    """

    _members: ModuleMembers
    _today: ModuleType | None
    _read_elsewhere: dict[tuple[ModuleType, str], Any]

    def __init__(self, members: ModuleMembers, today: ModuleType | None = None) -> None:
        super().__init__(members.module, members.whole and f"Today: {members.whole.today}")
        # Assigned and accessed attributes are also stored in the dictionary.
        self.__dict__.update(_members=members, _today=today, _read_elsewhere={})
        # A module-level `__getattr__`: Python would call a method of the class only after it has
        # formatted an error message, which takes ten times as long.
        self.__dict__.update(__getattr__=self._member)
        path = getattr(today, "__path__", None) or ([] if members.values else None)
        if path is not None:
            self.__dict__.update(__path__=path)
        if today is not None:
            self.__dict__.update(__spec__=today.__spec__)

    def _member(self, name: str) -> Any:
        members = self._members
        if name == "__all__":
            return [name for name in dir(self) if not name.startswith("_")]
        with short_tracebacks:
            value = members.get(name, sys._getframe(1))
        if members.can_cache and members.behind is None:
            self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an attribute, also in the modules of JAX that read it."""
        for holder in self._readers_of(name):
            self._read_elsewhere.setdefault((holder, name), getattr(holder, name))
            setattr(holder, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Undo the assignments of an attribute."""
        for holder in self._readers_of(name):
            if (holder, name) in self._read_elsewhere:
                setattr(holder, name, self._read_elsewhere.pop((holder, name)))
        super().__delattr__(name)

    def _readers_of(self, name: str) -> Sequence[ModuleType]:
        whole = self._members.whole
        if whole is None or _is_private(name):
            return ()
        return getattr(importlib.import_module(whole.source), "READERS", {}).get(name, ())

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._members.names(), *dir(self._today)})


MISSING: Any = object()
"""Value of a missing attribute."""


def patch(holder: Any, name: str, new: Any) -> Callable[[], None]:
    """Change an attribute or a dictionary entry, and return a function that undoes the change.

    The function has no effect if other code has changed the attribute since.

    Args:
        holder: The dictionary, or the object with the attribute.
        name: The key or the attribute.
        new: The new value; `MISSING` to remove it.

    Example:
        >>> ages = {"Ada": 36}
        >>> undo = patch(ages, "Ada", 37)
        >>> undo()
        >>> ages
        {'Ada': 36}
    """
    old = _get(holder, name)
    _set(holder, name, new)

    def undo() -> None:
        if _get(holder, name) is new:
            _set(holder, name, old)

    return undo


def _get(holder: Any, name: str) -> Any:
    return (holder if isinstance(holder, dict) else vars(holder)).get(name, MISSING)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        if value is MISSING:
            holder.pop(name, None)
        else:
            holder[name] = value
    elif value is MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def has_module(name: str) -> bool:
    """Return True if a module is imported or can be found, without importing it.

    Example:
        >>> has_module("json.tool"), has_module("json.no_such")
        (True, False)
    """
    return name in sys.modules or _spec(name) is not None


def _spec(name: str) -> ModuleSpec | None:
    parent, _, last = name.rpartition(".")
    if not parent:
        return PathFinder.find_spec(name)
    if parent in sys.modules:
        path = getattr(sys.modules[parent], "__path__", None)
    else:
        above = _spec(parent)
        path = above and above.submodule_search_locations
    # By its last name: the path of a namespace package reads the modules around its full name.
    return PathFinder.find_spec(last, path) if path is not None else None
