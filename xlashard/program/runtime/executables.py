"""Executables by what the compiler was given: programs of equal text share one.

Tracing is told apart by more than can reach a program. A mesh in force that a function never looks
at, or a setting that none of its operations reads, makes another jaxpr of it; the module that is
written for that jaxpr says the same, and then nothing is compiled again.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from xlashard._jax.runtime import compiler, executables
from xlashard._jax.runtime.global_state import cleared_with_jax

type Source = Literal[
    "the compiler",
    "the persistent cache",
    "a program that says the same",
    "a file",
    "another process",
]
"""Where a program got its executable from."""


class LoadedExecutable:
    """A loaded executable. It is kept while a program runs on it.

    Args:
        executable: The executable; None until `load` makes it.
        code: The bytes that it comes from, where it was not compiled here.
    """

    __slots__ = ("__weakref__", "_again", "_code", "_lock", "executable", "module")

    def __init__(
        self, executable: compiler.Executable | None = None, *, code: bytes | None = None
    ) -> None:
        self.executable: Any = executable
        # What it was compiled of here. A program that shares it says the same in other places.
        self.module: Any = None
        self._code = code
        self._again: Callable[[], compiler.Executable] | None = None
        self._lock = threading.Lock()

    def load(self, make: Callable[[], compiler.Executable]) -> bool:
        """Load unless this is done, by the first of several threads; return True in this thread.

        What `make` raises leaves it as it was.
        """
        with self._lock:
            if self.executable is not None:
                return False
            self.executable = make()
            return True

    def take(self, executable: compiler.Executable, code: bytes) -> None:
        """Set the executable that another process has compiled, and its bytes."""
        with self._lock:
            self.executable, self._code = executable, code

    def compile(self, module: Any, request: compiler.CompileRequest) -> Source:
        """Compile a module unless this is done, and return the source of the executable."""
        source: Source = "a program that says the same"

        def make() -> compiler.Executable:
            nonlocal source
            with compiler.persistent_cache_hits() as hits:
                executable = compiler.compile_module(module, request)
            self.module = module
            source = "the persistent cache" if hits else "the compiler"
            if hits and compiler.drops_cached_code(request):
                self._again = partial(compiler.compile_uncached, module, request)
            return executable

        self.load(make)
        return source

    def to_bytes(self) -> bytes:
        """Return the bytes from which PJRT loads it.

        Raises:
            RuntimeError: If the platform's plugin can't give it.
        """
        if self._code is not None:
            return self._code
        executable = self.executable if self._again is None else self._again()
        return executables.to_bytes(executable)


class Executables:
    """The executables that live, by a digest of what they were compiled from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_text: weakref.WeakValueDictionary[Any, LoadedExecutable] = (
            weakref.WeakValueDictionary()
        )

    def slot(self, key: Any) -> LoadedExecutable:
        """Return the entry of a key, which may still be empty."""
        with self._lock:
            loaded = self._by_text.get(key)
            if loaded is None:
                loaded = self._by_text[key] = LoadedExecutable()
            return loaded

    def forget(self, chosen: LoadedExecutable) -> None:
        """Remove an executable from the cache; programs that have it keep it."""
        with self._lock:
            for key, loaded in list(self._by_text.items()):
                if loaded is chosen:
                    del self._by_text[key]

    def cache_clear(self) -> None:
        """Remove all executables from the cache."""
        with self._lock:
            self._by_text = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        with self._lock:
            return len(self._by_text)


EXECUTABLES = cleared_with_jax(Executables())
"""The shared executables of this process."""
