"""Installation of the names of other libraries for a run of a program.

Results of flax are `FrozenDict`s then, as before 0.7.1, and fields of dataclasses may have
unhashable defaults, such as arrays, as before Python 3.11.
"""

import dataclasses
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from xlashard.legacy.entries.entry import Entry
from xlashard.legacy.installer import Installation
from xlashard.legacy.libraries.entries import find_missing_entries
from xlashard.legacy.module_shims import Listener, ModuleMembers, patch

_FLAG = "flax_return_frozendict"
FROZEN_DICTS = Entry(
    f"flax.config.{_FLAG}",
    "0.7.1",
    "works",
    "",
    f"flax.config.update('{_FLAG}', True)",
    "Module.init and Module.apply return FrozenDicts",
    library="flax",
)
"""Entry of the flag, for the report."""


def return_frozen_dicts(configurations: ModuleType, listener: Listener) -> Callable[[], None]:
    """Make flax return `FrozenDict`s, unless the environment has set the flag.

    Args:
        configurations: The module `flax.configurations`.
        listener: Called with `FROZEN_DICTS`, and the frame that imports flax.

    Returns:
        A function that undoes it.
    """
    config = configurations.config
    if _FLAG.upper() in os.environ or getattr(config, _FLAG, True):
        return lambda: None
    config.update(_FLAG, True)
    listener(FROZEN_DICTS, config, find_importing_frame(configurations.__name__.partition(".")[0]))
    return lambda: config.update(_FLAG, False)


def find_importing_frame(package: str) -> FrameType:
    """Return the innermost frame outside of a package, of importlib and of this package."""
    frame = sys._getframe(1)
    within = (package, importlib.__name__, "xlashard")
    while frame.f_back is not None:
        name = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if name not in within and not frame.f_code.co_filename.startswith("<frozen "):
            break
        frame = frame.f_back
    return frame


_FLAX = "flax.configurations"


class LibraryInstallation(Installation):
    """Installed names of Python, NumPy, optax, flax and others, from `start` to `end`.

    A name that the installed library has stays that library's.

    Args:
        listener: Called on each access to a name.
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__(find_missing_entries(), listener)
        self._notify = listener

    def start(self) -> None:
        """Install the names; after an exception all modules are unchanged."""
        if _FLAX in sys.modules:
            self._freeze_results(sys.modules[_FLAX])
        else:
            self._waiting[_FLAX] = self._freeze_results
        self._undo_patches.append(accept_mutable_defaults(self._notify))
        super().start()

    def _freeze_results(self, configurations: ModuleType) -> None:
        undo = return_frozen_dicts(configurations, self._notify)
        with self._lock:
            self._undo_patches.append(undo)

    def _members_of(self, module: str) -> ModuleMembers:
        members = super()._members_of(module)
        today = sys.modules.get(module)
        members.entries = {
            name: entry for name, entry in members.entries.items() if not _has(today, name)
        }
        return members


def _has(module: ModuleType | None, name: str) -> bool:
    """Return whether a module has an attribute, without the warning of a deprecated one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return module is not None and hasattr(module, name)


class UsedNames:
    """Listener that collects the names that a program has read."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def listen(self, entry: Entry, value: Any, frame: FrameType) -> None:
        """Collect a name.

        Args:
            entry: The entry of the name.
            value: The object.
            frame: The accessing frame.
        """
        self._entries.setdefault(entry.name, entry)

    def describe(self) -> str:
        """Return the names with the release that lacks them; empty if none was read."""
        names = (
            f"{entry.name} (until {entry.library} {entry.gone})"
            for _, entry in sorted(self._entries.items())
        )
        return ", ".join(names)


MUTABLE_DEFAULTS = Entry(
    "dataclasses.dataclass(default)",
    "3.11",
    "works",
    "",
    "dataclasses.field(default_factory=...)",
    "fields may have unhashable defaults, such as arrays",
    library="Python",
)
"""Entry of unhashable defaults, for the report."""


def accept_mutable_defaults(listener: Listener) -> Callable[[], None]:
    """Let fields have every default but a list, a dictionary or a set.

    Python has no public hook for its check, and libraries of 2022 define such classes when they
    are imported.

    Args:
        listener: Called with `MUTABLE_DEFAULTS`, the default, and the frame of the class.

    Returns:
        A function that undoes it.
    """
    read_field: Any = vars(dataclasses).get("_get_field")
    if read_field is None:
        return lambda: None

    @functools.wraps(read_field)
    def read(cls: type, name: str, *rest: Any) -> Any:
        attribute = getattr(cls, name, dataclasses.MISSING)
        is_field = isinstance(attribute, dataclasses.Field)
        default = attribute.default if is_field else attribute
        if type(default).__hash__ is not None or isinstance(default, list | dict | set):
            return read_field(cls, name, *rest)
        stand_in: Any = attribute if is_field else dataclasses.field()
        stand_in.default = None
        setattr(cls, name, stand_in)
        try:
            result = read_field(cls, name, *rest)
        finally:
            setattr(cls, name, attribute)
        result.default = default
        listener(MUTABLE_DEFAULTS, default, find_importing_frame(dataclasses.__name__))
        return result

    return patch(dataclasses, "_get_field", read)
