"""Executables by what the compiler was given: programs of equal text share one.

Tracing is told apart by more than can reach a program. A mesh in force that a function never looks
at, or a setting that none of its operations reads, makes another jaxpr of it; the module that is
written for that jaxpr says the same, and then nothing is compiled again.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

from xlashard._jax import compiling
from xlashard._jax.caches import cleared_with_jax

type Source = Literal["the compiler", "the persistent cache", "a program that says the same"]
"""Where a program got its executable from."""


class Loaded:
    """A loaded executable. It is kept while a program runs on it."""

    __slots__ = ("__weakref__", "_lock", "executable")

    def __init__(self, executable: compiling.Executable | None = None) -> None:
        self.executable: Any = executable
        self._lock = threading.Lock()

    def load(self, make: Callable[[], compiling.Executable]) -> bool:
        """Compiles unless that is done, by the first of several threads; True if it was this one.

        What `make` raises leaves it as it was.
        """
        with self._lock:
            if self.executable is not None:
                return False
            self.executable = make()
            return True


class Executables:
    """The executables that live, by a digest of what they were compiled from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_text: weakref.WeakValueDictionary[Any, Loaded] = weakref.WeakValueDictionary()

    def slot(self, key: Any) -> Loaded:
        """Where the executable of a text is, or will be."""
        with self._lock:
            loaded = self._by_text.get(key)
            if loaded is None:
                loaded = self._by_text[key] = Loaded()
            return loaded

    def forget(self, chosen: Loaded) -> None:
        """Shares an executable no longer; programs that have it keep it."""
        with self._lock:
            for key, loaded in list(self._by_text.items()):
                if loaded is chosen:
                    del self._by_text[key]

    def cache_clear(self) -> None:
        """Shares none of its executables any longer."""
        with self._lock:
            self._by_text = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_text)


EXECUTABLES = cleared_with_jax(Executables())
"""The shared executables of this process."""
