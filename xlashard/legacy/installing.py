"""Puts the era's names where programs import them from, and takes them away again.

No file of JAX is touched. Modules that are gone are put into the module table, and so are modules
of the era in place of those that are something else today; modules that only lack names get a
`__getattr__` that knows those. What a name stands for is imported when somebody first asks for it.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from xlashard._jax.era import concrete_class
from xlashard.legacy.flags import hide_flags, show_flags
from xlashard.legacy.stand_ins import Listener, Members, StandIn, find
from xlashard.legacy.table import Entry, entries

_LACKING: Any = object()


@dataclass(frozen=True)
class Change:
    """One attribute, or one entry of a dictionary, that was changed.

    Attributes:
        holder: The dictionary, or what has the attribute.
        name: The key or the attribute.
        old: What was there before, if anything.
        new: What is there now, if anything.
    """

    holder: Any
    name: str
    old: Any
    new: Any

    @classmethod
    def make(cls, holder: Any, name: str, new: Any) -> "Change":
        """Makes a change, and remembers it."""
        change = cls(holder, name, _get(holder, name), new)
        _set(holder, name, new)
        return change

    def undo(self) -> None:
        """Takes it back, unless somebody else has changed it since."""
        if _get(self.holder, self.name) is self.new:
            _set(self.holder, self.name, self.old)


def _get(holder: Any, name: str) -> Any:
    return (holder if isinstance(holder, dict) else vars(holder)).get(name, _LACKING)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        if value is _LACKING:
            holder.pop(name, None)
        else:
            holder[name] = value
    elif value is _LACKING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


class Installation:
    """The era's names in JAX, from `start` to `end`.

    Args:
        table: The names.
        listener: Is told of every name that a program asks for.
    """

    def __init__(self, table: Mapping[str, Entry], listener: Listener | None = None) -> None:
        self._table = table
        self._listener = listener
        self._lock = threading.RLock()
        self._ended = False
        self._changes: list[Change] = []
        self._stand_ins: dict[str, StandIn] = {}
        self._own = _own_modules(table)

    def start(self) -> None:
        """Puts the names in place; after an exception nothing has changed."""
        try:
            show_flags()
            for name in sorted(self._own, key=lambda name: name.count("."), reverse=True):
                self._stand_ins[name] = self._make_stand_in(name)
            for name, module in self._stand_ins.items():
                self._change(sys.modules, name, module)
            for parent, members in self._members_of_parents().items():
                self._patch(parent, members)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Takes them away; what a program has imported goes on working."""
        with self._lock:
            self._ended = True
            for change in reversed(self._changes):
                change.undo()
            self._changes.clear()
        _return_modules()
        hide_flags()

    def _make_stand_in(self, name: str) -> StandIn:
        """The module of the era of that name; those below it are there already."""
        today = _module(name)
        members = Members(
            name,
            self._table.get(name),
            self._entries_in(name),
            self._children_of(name),
            today and _getter(today),
            self._listener,
        )
        return StandIn(members, today)

    def _entries_in(self, module: str) -> dict[str, Entry]:
        return {
            name.rpartition(".")[2]: entry
            for name, entry in self._table.items()
            if name.rpartition(".")[0] == module and name not in self._own
        }

    def _children_of(self, module: str) -> dict[str, StandIn]:
        return {
            name.rpartition(".")[2]: child
            for name, child in self._stand_ins.items()
            if name.rpartition(".")[0] == module
        }

    def _members_of_parents(self) -> dict[str, Members]:
        """What is to be served by each module of JAX, or class there, that stays as it is."""
        parents = {name.rpartition(".")[0] for name in self._table} - self._own
        return {
            parent: Members(
                parent,
                None,
                self._entries_in(parent),
                self._children_of(parent),
                None,
                self._listener,
            )
            for parent in sorted(parents)
            if not self._is_inside(parent)
        }

    def _is_inside(self, parent: str) -> bool:
        """Whether it is something that the table puts there, or a member of it."""
        parts = parent.split(".")
        heads = {".".join(parts[: n + 1]) for n in range(len(parts))}
        return not heads.isdisjoint(self._table.keys() | self._own)

    def _patch(self, parent: str, members: Members) -> None:
        module = _module(parent)
        if module is not None:
            self._patch_module(module, members)
        else:
            home, _, owner = parent.rpartition(".")
            self._patch_class(concrete_class(find(f"{home}:{owner}")), members)

    def _patch_module(self, module: ModuleType, members: Members) -> None:
        there = vars(module)
        for name in list(members.children):
            if not isinstance(there.get(name, module), ModuleType):
                # `jax.config` is an object, beside the module that it was imported from.
                del members.children[name]
        hidden = {name: there[name] for name in sorted(members.names()) if name in there}
        before = there.get("__getattr__")

        def behind(name: str) -> Any:
            if name in hidden:
                return hidden[name]
            if before is None:
                raise AttributeError(
                    f"module {module.__name__!r} has no attribute {name!r}", name=name
                )
            return before(name)

        members.behind = behind
        for name in hidden:
            self._change(there, name, _LACKING)
        self._change(there, "__getattr__", self._member_function(there, members, hidden))
        if "__dir__" not in there:
            self._change(there, "__dir__", lambda: sorted({*there, *members.names()}))

    def _member_function(
        self, there: dict[str, Any], members: Members, hidden: Mapping[str, Any]
    ) -> Callable[[str], Any]:
        def member(name: str) -> Any:
            value = members.get(name, sys._getframe(1))
            new = name in members.entries or name in members.children
            if new and name not in hidden and self._listener is None:
                self._change(there, name, value)
            return value

        return member

    def _patch_class(self, owner: type, members: Members) -> None:
        for name, entry in members.entries.items():
            member = find(entry.source)
            if self._listener is not None and isinstance(member, property):
                member = _told_of(entry, member, self._listener)
            self._change(owner, name, member)

    def _change(self, holder: Any, name: str, new: Any) -> None:
        with self._lock:
            if not self._ended:
                self._changes.append(Change.make(holder, name, new))


def _told_of(entry: Entry, member: property, listener: Listener) -> property:
    """A property that says when it is read."""

    def get(instance: Any) -> Any:
        listener(entry, member, sys._getframe(1))
        return member.__get__(instance)

    return property(get, doc=member.__doc__)


def _return_modules() -> None:
    """Gives JAX's modules of today back to those of JAX that were loaded meanwhile."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "jax" or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, StandIn) and value._today is not None:
                setattr(module, key, value._today)


def _module(name: str) -> ModuleType | None:
    """A module of JAX; None if it has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _getter(module: ModuleType) -> Callable[[str], Any]:
    return lambda name: getattr(module, name)


def _own_modules(table: Mapping[str, Entry]) -> set[str]:
    """The modules that the table has entries of, and the packages that these need around them."""
    own = {name for name, entry in table.items() if ":" not in entry.source}
    parts = [name.split(".") for name in own]
    around = {".".join(p[:n]) for p in parts for n in range(1, len(p))}
    return own | {name for name in around - own if _module(name) is None}


class Installer:
    """At most one installation at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._current: Installation | None = None

    def install(self, listener: Listener | None = None) -> bool:
        """Puts the names in place.

        Returns:
            Whether they were not there before.
        """
        with self._lock:
            if self._current is not None:
                return False
            installation = Installation(entries(), listener)
            installation.start()
            self._current = installation
            return True

    def uninstall(self) -> None:
        """Takes them away, if they are there."""
        with self._lock:
            if self._current is not None:
                self._current.end()
                self._current = None


INSTALLER = Installer()
"""That of this process."""


def install() -> None:
    """Puts the names of 2022 and 2023 where programs import them from. Twice is once.

    Example:
        >>> from xlashard.legacy import installing
        >>> installing.install()
        >>> jax.tree_map(lambda x: x + 1, {"w": 1})
        {'w': 2}
        >>> installing.uninstall()
        >>> hasattr(jax, "tree_map")
        False
    """
    INSTALLER.install()


def uninstall() -> None:
    """Takes them away again: JAX is as it was. What a program has imported goes on working."""
    INSTALLER.uninstall()


@contextmanager
def installed() -> Iterator[None]:
    """The names of 2022 and 2023 are there inside; outside of it as before.

    Example:
        >>> from xlashard import legacy
        >>> with legacy.installed():
        ...     from jax.experimental.maps import Mesh
        >>> isinstance(Mesh(jax.devices()[:1], "x"), jax.sharding.Mesh)
        True
    """
    new = INSTALLER.install()
    try:
        yield
    finally:
        if new:
            INSTALLER.uninstall()
