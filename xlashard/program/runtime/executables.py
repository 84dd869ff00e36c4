"""Cache of executables, keyed by the compiler's input: programs of equal text share one.

The cache key of a trace contains more than reaches the program: a mesh or setting that the function
never reads causes another trace. Its module is equal, and the executable is shared.
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
    "an equal program",
    "a file",
    "another process",
]
"""Source of a program's executable."""


class LoadedExecutable:
    """A loaded executable, kept alive by its programs.

    Args:
        executable: The executable; None until `load` makes it.
        code: Its bytes, if it was not compiled by this process.
    """

    __slots__ = ("__weakref__", "_again", "_code", "_lock", "executable", "module")

    def __init__(
        self, executable: compiler.Executable | None = None, *, code: bytes | None = None
    ) -> None:
        self.executable: Any = executable
        # The module that this process compiled; those of other programs differ in locations.
        self.module: Any = None
        self._code = code
        self._again: Callable[[], compiler.Executable] | None = None
        self._lock = threading.Lock()

    def load(self, make: Callable[[], compiler.Executable]) -> bool:
        """Load unless this is done, by the first of several threads; return True in this thread.

        An error of `make` leaves it unchanged.
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
        source: Source = "an equal program"

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
            RuntimeError: The platform's plugin has no bytes.
        """
        if self._code is not None:
            return self._code
        executable = self.executable if self._again is None else self._again()
        return executables.to_bytes(executable)


class ExecutableCache:
    """Cache of live executables, keyed by a digest of the compiler's input."""

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


EXECUTABLES = cleared_with_jax(ExecutableCache())
"""The shared executables of this process."""
