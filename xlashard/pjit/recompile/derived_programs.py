"""Programs that transformations derive from pjit-ed calls."""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xlashard._jax.lower.lowering import dtype_name
from xlashard._jax.runtime.tracebacks import calling_line
from xlashard.lazily import dataclass
from xlashard.pjit.recompile.history import CacheMiss
from xlashard.wording import in_seconds

_KEPT = 64
_SOURCES = 256


@dataclass(frozen=True)
class DerivedProgram:
    """A program that `grad`, `vmap` or another transformation derived from a call.

    Attributes:
        file: The file of the call.
        line: Its line.
        lower_seconds: Duration of lowering; None if nothing was lowered.
        compile_seconds: Duration of compiling, likewise.
        executable: Origin of the executable.
        arguments: Types of its arguments: those of the function, and residuals.
        results: Types of its results.
    """

    file: str
    line: int
    lower_seconds: float | None
    compile_seconds: float | None
    executable: str | None
    arguments: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Total duration."""
        return (self.lower_seconds or 0.0) + (self.compile_seconds or 0.0)

    def __str__(self) -> str:
        types = f"{', '.join(self.arguments)} → {', '.join(self.results)}"
        place = f"{Path(self.file).name}:{self.line}"
        seconds = in_seconds(self.seconds)
        return f"derived program of a transformed call at {place} ({seconds}): {types}"


class DerivedPrograms:
    """Last derived programs that were compiled, keyed by the source of their function."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_source: OrderedDict[str, deque[DerivedProgram]] = OrderedDict()

    def record(
        self, source: str, miss: CacheMiss, avals: tuple[Sequence[Any], Sequence[Any]]
    ) -> None:
        """Add a derived program, unless it came out of the cache.

        Args:
            source: File, line and name of its function.
            miss: The stages that it needed.
            avals: The abstract values of its arguments and results.
        """
        if not miss.stages:
            return
        arguments, results = (tuple(map(dtype_name, side)) for side in avals)
        derived = DerivedProgram(
            *calling_line(),
            lower_seconds=miss.seconds.get("lower"),
            compile_seconds=miss.seconds.get("compile"),
            executable=miss.executable_source,
            arguments=arguments,
            results=results,
        )
        with self._lock:
            self._by_source.setdefault(source, deque(maxlen=_KEPT)).append(derived)
            self._by_source.move_to_end(source)
            while len(self._by_source) > _SOURCES:
                self._by_source.popitem(last=False)

    def of(self, source: str) -> tuple[DerivedProgram, ...]:
        """Return the derived programs of a function, in order."""
        with self._lock:
            return tuple(self._by_source.get(source, ()))

    def drop(self, source: str) -> None:
        """Drop the derived programs of a function."""
        with self._lock:
            self._by_source.pop(source, None)


DERIVED_PROGRAMS = DerivedPrograms()
"""The derived programs of this process."""
