"""Installation of the names of other libraries for a run of a program."""

import sys
import warnings
from types import FrameType, ModuleType
from typing import Any

from xlashard.legacy.entries.entry import Entry
from xlashard.legacy.installer import Installation
from xlashard.legacy.libraries.entries import find_missing_entries
from xlashard.legacy.libraries.frozen_dicts import return_frozen_dicts
from xlashard.legacy.libraries.mutable_defaults import accept_mutable_defaults
from xlashard.legacy.module_shims import Listener, ModuleMembers

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
