"""Snapshots of all that other packages can replace in JAX."""

import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_PACKAGES = ("jax", "jaxlib")
# Python writes it: which warnings a module has shown.
_OF_PYTHON = "__warningregistry__"

_HOOKS = ("_update_global_hook", "_update_thread_local_hook")
"""Functions that a setting of JAX calls when it changes."""


def _entry(key: Any) -> str:
    """Return the name of a dictionary's entry: two keys, such as primitives, may look the same."""
    return f"[{key!r:.80}]" if isinstance(key, str | type) else f"[{key!r:.80} {id(key)}]"


class JaxState:
    """State of JAX at one time, by dotted name. It keeps the values alive, so identities stay.

    Attributes:
        values: Attributes of modules, of their classes and of settings; entries of dictionaries.
        lists: Length and members of lists and sets, such as listeners of events.
        loggers: Level, handlers and filters of JAX's loggers.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.lists: dict[str, tuple[Any, ...]] = {}
        self.loggers: dict[str, tuple[Any, ...]] = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _PACKAGES and isinstance(module, ModuleType):
                self._add_module(name, module)
        for name, logger in list(logging.Logger.manager.loggerDict.items()):
            if name.partition(".")[0] in _PACKAGES and isinstance(logger, logging.Logger):
                self.loggers[name] = (logger.level, *logger.handlers, *logger.filters)

    def _add_module(self, name: str, module: ModuleType) -> None:
        for key, value in list(vars(module).items()):
            if key == _OF_PYTHON or isinstance(value, ModuleType):
                continue
            path = f"{name}.{key}"
            self.values[path] = value
            if isinstance(value, type) and value.__module__ == name:
                self._add(path, vars(value))
            elif isinstance(value, dict):
                self._add(path, {_entry(key): entry for key, entry in list(value.items())})
            elif isinstance(value, list | set):
                self.lists[path] = tuple(value)
            elif type(value).__module__ == "jax._src.config":
                self._add(path, {hook: getattr(value, hook, None) for hook in _HOOKS})

    def _add(self, path: str, members: Mapping[str, Any]) -> None:
        self.values.update({f"{path}.{key}": value for key, value in list(members.items())})

    def replaced(self) -> set[str]:
        """Return the names of functions, classes, hooks and members that are others now, or gone.

        Other values are left out: JAX keeps its own state, such as its default backend, in them.
        """
        now = JaxState()
        changed = {
            name
            for name, value in self.values.items()
            if callable(value) or name.endswith(_HOOKS)
            if now.values.get(name) is not value
        }
        for mine, others in ((self.lists, now.lists), (self.loggers, now.loggers)):
            for name, members in mine.items():
                if not set(map(id, members)) <= set(map(id, others.get(name, ()))):
                    changed.add(name)
        return changed

    def added(self) -> set[str]:
        """Return the names, entries, listeners and filters that the same modules have in addition.

        Modules that were imported since are left out.
        """
        now = JaxState()
        modules = {name.rpartition(".")[0] for name in self.values}
        names = {
            name
            for name in now.values.keys() - self.values.keys()
            if name.rpartition(".")[0] in modules
        }
        for mine, others in ((self.lists, now.lists), (self.loggers, now.loggers)):
            names |= {name for name in mine if len(others.get(name, ())) > len(mine[name])}
        return names
