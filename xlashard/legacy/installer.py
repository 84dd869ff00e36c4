"""Install the removed names where programs import them from, and uninstall them.

JAX's files stay unchanged. A shim in `sys.modules` replaces each module that is removed or has
another meaning today. A module that only lacks names gets a `__getattr__` with these names.
Modules of JAX that are not imported yet are patched after their import. The objects behind the
names are imported on first access.
"""

import builtins
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from types import ModuleType
from typing import Any

import jax

from xlashard._jax.legacy_api import concrete_class, watch_computations
from xlashard._jax.trace.tracing import Tracer
from xlashard.core.array import Array
from xlashard.legacy.entries.entry import ALIASES
from xlashard.legacy.entries.keywords import SIGNATURES
from xlashard.legacy.modes.config_flags import check_computation, hide_flags, show_flags
from xlashard.legacy.module_shims import (
    MISSING,
    Listener,
    ModuleMembers,
    ModuleShim,
    has_module,
    patch,
    resolve_source,
)
from xlashard.legacy.modules import Entry, entries
from xlashard.legacy.modules.keywords import EarlierFunction, make_method
from xlashard.support.import_hook import ImportHook
from xlashard.support.tracebacks import short_tracebacks

_OTHER_NAMES = {**ALIASES, **{name: alias for alias, name in ALIASES.items()}}


class Installation:
    """Installed names, from `start` to `end`.

    Args:
        table: The entries, by name.
        listener: Called on each access to a name.
        signatures: The names of functions that accept their earlier arguments.
        migrated: The files whose code gets today's names alone.
    """

    def __init__(
        self,
        table: Mapping[str, Entry],
        listener: Listener | None = None,
        signatures: Iterable[str] = (),
        migrated: frozenset[str] = frozenset(),
    ) -> None:
        self._table = table
        self._migrated = migrated
        self._signatures = tuple(signatures)
        self._listener = listener
        self._lock = threading.RLock()
        self._ended = False
        self._undo_patches: list[Callable[[], None]] = []
        self._own = _replaced_modules(table)
        self._waiting: dict[str, Callable[[ModuleType], None]] = {}
        self._arrivals = ImportHook(self._waiting)

    def start(self) -> None:
        """Install the names; after an exception all modules are unchanged."""
        try:
            self._install_shims()
            owners = {_parent(name) for name in (*self._table, *self._signatures)}
            parents = owners - self._own - {""}
            for parent in sorted(parents):
                if not self._is_inside(parent):
                    self._patch_parent(parent)
            if self._waiting:
                sys.meta_path.insert(0, self._arrivals)
            if self._migrated:
                refuse = _refuse_imports(builtins.__import__, self._migrated)
                self._change(builtins, "__import__", refuse)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Uninstall the names; objects that a program has imported keep working."""
        with self._lock:
            self._ended = True
            if self._arrivals in sys.meta_path:
                sys.meta_path.remove(self._arrivals)
            for undo in reversed(self._undo_patches):
                undo()
            self._undo_patches.clear()

    def _install_shims(self) -> None:
        """Install a shim for each replaced module, submodules first."""
        for name in sorted(self._own, key=lambda name: name.count("."), reverse=True):
            today = sys.modules.get(name)
            if today is None and has_module(name):
                self._waiting[name] = partial(self._install_shim, name)
            else:
                self._install_shim(name, today)

    def _install_shim(self, name: str, today: ModuleType | None) -> None:
        members = self._members_of(name)
        if today is not None:
            members.behind = partial(getattr, today)
        self._change(sys.modules, name, ModuleShim(members, today))

    def _members_of(self, module: str) -> ModuleMembers:
        below = [name for name in self._table.keys() | self._own if _parent(name) == module]
        return ModuleMembers(
            module,
            whole=self._table.get(module),
            entries={
                **self._entries_of_alias(module),
                **{_last(name): self._table[name] for name in below if name not in self._own},
            },
            values={
                _last(name): child
                for name in below
                for child in (sys.modules.get(name),)
                if isinstance(child, ModuleShim)
            },
            listener=self._listener,
            migrated=self._migrated,
        )

    def _entries_of_alias(self, module: str) -> dict[str, Entry]:
        """Return the entries that a module has under another name, as `jax.pxla` does.

        Args:
            module: The name of the module.
        """
        other = _OTHER_NAMES.get(module)
        return {
            _last(name): replace(entry, name=f"{module}.{_last(name)}")
            for name, entry in self._table.items()
            if _parent(name) == other and name not in self._own
        }

    def _is_inside(self, parent: str) -> bool:
        """Return True if a name is an entry, or a member of one."""
        parts = parent.split(".")
        heads = {".".join(parts[: n + 1]) for n in range(len(parts))}
        return not heads.isdisjoint(self._table.keys() | self._own)

    def _patch_parent(self, parent: str) -> None:
        """Add the entries of a module or class of JAX to it."""
        if parent in sys.modules:
            self._patch(sys.modules[parent])
        elif has_module(parent):
            self._waiting[parent] = self._patch
        else:
            shown = resolve_source(f"{_parent(parent)}:{_last(parent)}")
            for name, entry in self._members_of(parent).entries.items():
                member = self._with_listener(entry, resolve_source(entry.source))
                for owner in _classes_of(shown):
                    self._change(owner, name, member)
            self._patch_methods(parent, shown)

    def _patch_methods(self, parent: str, shown: type) -> None:
        """Let methods and constructors of a class accept their earlier arguments."""
        owners = [*_classes_of(shown), *[Tracer] * (shown is jax.Array)]
        for full in filter(lambda name: _parent(name) == parent, self._signatures):
            for owner in owners:
                today = vars(owner).get(_last(full))
                if isinstance(today, staticmethod):  # a constructor
                    self._change(owner, _last(full), staticmethod(make_method(full, today)))
                elif today is not None:
                    self._change(owner, _last(full), make_method(full, today))

    def _patch(self, module: ModuleType) -> None:
        members = self._members_of(module.__name__)
        namespace = vars(module)
        self._patch_functions(module)
        for name in list(members.values):
            if not isinstance(namespace.get(name, module), ModuleType):
                # `jax.config` is both an object and a module.
                del members.values[name]
        hidden = {name: namespace[name] for name in sorted(members.names()) if name in namespace}
        members.behind = _original_attributes(module, hidden)
        for name in hidden:
            self._change(namespace, name, MISSING)
        self._change(namespace, "__getattr__", self._member_function(namespace, members, hidden))
        if "__dir__" not in namespace:
            self._change(namespace, "__dir__", lambda: sorted({*namespace, *members.names()}))

    def _patch_functions(self, module: ModuleType) -> None:
        """Let functions of a module accept their earlier arguments.

        JAX's own code calls them, too: an import through `__getattr__`, which would spare it,
        takes longer than most calls.
        """
        namespace = vars(module)
        for full in filter(lambda name: _parent(name) == module.__name__, self._signatures):
            if _last(full) in namespace and full not in self._table:
                earlier = EarlierFunction(full, namespace[_last(full)])
                self._change(namespace, _last(full), earlier)

    def _member_function(
        self, namespace: dict[str, Any], members: ModuleMembers, hidden: Mapping[str, Any]
    ) -> Callable[[str], Any]:
        new = members.names() - hidden.keys()

        def member(name: str) -> Any:
            with short_tracebacks:
                value = members.get(name, sys._getframe(1))
            if name in new and members.can_cache:
                self._change(namespace, name, value)
            return value

        return member

    def _with_listener(self, entry: Entry, member: Any) -> Any:
        """Return a member of a class that calls the listener: a property read, a method called."""
        listener = self._listener
        if listener is None:
            return member
        if not isinstance(member, property):

            @wraps(member)
            def call(*args: Any, **kwargs: Any) -> Any:
                listener(entry, member, sys._getframe(1))
                return member(*args, **kwargs)

            return call

        def get(instance: Any) -> Any:
            listener(entry, member, sys._getframe(1))
            return member.__get__(instance)

        return property(get, doc=member.__doc__)

    def _change(self, holder: Any, name: str, new: Any) -> None:
        with self._lock:
            if not self._ended:
                self._undo_patches.append(patch(holder, name, new))


class JaxInstallation(Installation):
    """Installed names of JAX, with the flags of 2022 and 2023."""

    def start(self) -> None:
        """Install the names and flags; after an exception JAX is unchanged."""
        try:
            show_flags()
            watch_computations(check_computation)
            for name, entry in self._table.items():
                if name.startswith("jax.config.define_"):
                    define = staticmethod(resolve_source(entry.source))
                    self._change(type(jax.config), _last(name), define)
        except BaseException:
            self.end()
            raise
        super().start()

    def end(self) -> None:
        """Uninstall the names and flags; objects that a program has imported keep working."""
        super().end()
        _restore_modules()
        hide_flags()
        watch_computations(None)


def _classes_of(shown: type) -> list[type]:
    """Return a public class and, of JAX, its concrete classes, which may define the same members.

    Concrete arrays define some removed members only to raise an error.
    """
    return list(dict.fromkeys([shown, concrete_class(shown), *[Array] * (shown is jax.Array)]))


def _refuse_imports(original: Callable[..., Any], files: frozenset[str]) -> Callable[..., Any]:
    """Return an `__import__` that finds no removed module for the code of some files."""

    def find(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        imported = original(name, globals, locals, fromlist, level)
        if level == 0 and sys._getframe(1).f_code.co_filename in files:
            for full in (name, *(f"{name}.{each}" for each in fromlist or ())):
                module = sys.modules.get(full)
                if isinstance(module, ModuleShim) and module._today is None:
                    # no-catalogue: Python's own message for a missing module
                    raise ModuleNotFoundError(f"No module named {full!r}", name=full)
        return imported

    return find


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _original_attributes(module: ModuleType, hidden: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a lookup of a module's attributes as they were before the patch."""
    before = vars(module).get("__getattr__")

    def behind(name: str) -> Any:
        if name in hidden:
            return hidden[name]
        if before is None:
            message = f"module {module.__name__!r} has no attribute {name!r}"
            # no-catalogue: Python's own message for a missing attribute
            raise AttributeError(message, name=name)
        return before(name)

    return behind


def _restore_modules() -> None:
    """Restore JAX's own modules in modules of JAX that were imported meanwhile."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "jax" or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, ModuleShim) and value._today is not None:
                setattr(module, key, value._today)


def _replaced_modules(table: Mapping[str, Entry]) -> set[str]:
    """Return the modules that are entries, and the missing packages that contain them."""
    own = {name for name, entry in table.items() if entry.is_module}
    parts = [name.split(".") for name in own]
    around = {".".join(p[:n]) for p in parts for n in range(1, len(p))}
    return own | {name for name in around - own if not has_module(name)}


class Installer:
    """Reference-counted installation of a process.

    Its users are `install()`, counted once, and every open block of `installed()`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._current: Installation | None = None
        self._is_installed = False
        self._blocks = 0

    def install(
        self, listener: Listener | None = None, migrated: frozenset[str] = frozenset()
    ) -> bool:
        """Install the names until `uninstall`.

        Args:
            listener: Called on each access to a name.
            migrated: The files whose code gets today's names alone.

        Returns:
            True if the names were not installed before.
        """
        with self._lock:
            new = self._start(listener, migrated)
            self._is_installed = True
            return new

    def uninstall(self) -> None:
        """Uninstall the names, once no block is open in any thread."""
        with self._lock:
            self._is_installed = False
            self._end_if_unused()

    @contextmanager
    def block(self) -> Iterator[None]:
        """Install the names for the duration of a block."""
        with self._lock:
            self._start(None)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                self._end_if_unused()

    def _start(self, listener: Listener | None, migrated: frozenset[str] = frozenset()) -> bool:
        if self._current is not None:
            return False
        installation = JaxInstallation(entries(), listener, SIGNATURES, migrated)
        installation.start()
        self._current = installation
        return True

    def _end_if_unused(self) -> None:
        if self._current is not None and not self._is_installed and not self._blocks:
            self._current.end()
            self._current = None


INSTALLER = Installer()
"""Installer of this process."""


def install() -> None:
    """Install the names of 2022 and 2023 where programs import them from; idempotent.

    Example:
        >>> import jax
        >>> from xlashard.legacy import installer
        >>> installer.install()
        >>> jax.tree_map(lambda x: x + 1, {"w": 1})
        {'w': 2}
        >>> installer.uninstall()
        >>> hasattr(jax, "tree_map")
        False
    """
    INSTALLER.install()


def uninstall() -> None:
    """Uninstall the names: JAX is as it was, and objects that a program has imported keep working.

    While a block of `installed()` is open, in any thread, the names stay until it ends.
    """
    INSTALLER.uninstall()


def installed() -> AbstractContextManager[None]:
    """Install the names of 2022 and 2023 for the duration of a block.

    Blocks may overlap, in one thread or in several: the last one to end uninstalls the names.

    Example:
        >>> from xlashard import legacy
        >>> with legacy.installed():
        ...     from jax.experimental.maps import Mesh
        >>> import jax, numpy as np
        >>> Mesh(np.array(jax.devices()), ("data",)).axis_names
        ('data',)
    """
    return INSTALLER.block()
