"""Cache misses of pjit-ed functions, and programs that transformations derived from their calls."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.tracebacks import calling_line
from xlashard._jax.trace.observed_programs import Stage
from xlashard.core.pjit.arguments import Argument
from xlashard.core.sharding import Mesh, Sharding
from xlashard.support.formatting import in_seconds, shortened
from xlashard.support.lazily import dataclass

KEPT = 64
"""Records that a log keeps of one function."""

_SOURCES = 256
LONGEST_TEXT = 120
"""Characters of a value that a report of recompilations shows."""


@dataclass(eq=False)
class CacheMiss:
    """Stages that one call had to run. The record belongs to the thread of the call.

    Attributes:
        seconds: Duration of each stage that ran.
        executable_source: Origin of the executable, once there is one.
        arguments: The arguments, once their placement has been looked up.
        began: Start of the call, on a monotonic clock.
        stages: Number of stages that ran.
        recorded: Number of those stages that the history contains.
        logged: Number of those stages that have been logged.
        number: Number in the function's history, counted from 1 since the function was made or its
            cache cleared; 0 before a stage is recorded.
        location: File and line of the call, once a stage is recorded.
        key: The key of the call, likewise.
        ended: End of the last recorded stage.
        clear_count: Number of calls of `jax.clear_caches()` until then.
    """

    seconds: dict[Stage, float] = field(default_factory=dict)
    executable_source: str | None = None
    arguments: tuple[Argument, ...] | None = None
    began: float = field(default_factory=time.perf_counter)
    stages: int = 0
    recorded: int = 0
    logged: int = 0
    number: int = 0
    location: tuple[str, int] = field(init=False)
    key: "CallKey" = field(init=False)
    ended: float = 0.0
    clear_count: int = 0

    def record_stage(self, stage: Stage, since: float | None = None) -> None:
        """Add a stage that has just ended.

        Args:
            stage: The stage.
            since: Its start, on the same clock as `began`; None for the start of the call.
        """
        began = self.began if since is None else since
        self.stages += 1
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


@dataclass(frozen=True)
class StaticValue:
    """Text and hash of a static argument; the value itself is not kept alive.

    Attributes:
        name: The parameter.
        kind: The name of its type.
        text: Its `repr`, shortened; the full name of a function.
        digest: Its hash; that of the text where it has none.
        by_name: Whether it was passed by name.
    """

    name: str
    kind: str
    text: str
    digest: int
    by_name: bool

    @classmethod
    def of(cls, name: str, value: Any, by_name: bool) -> "StaticValue":
        """Describe a static argument of a call."""
        try:
            text = repr(value)
        except Exception:  # a broken __repr__ of the caller's must not break the call
            text = f"<{type(value).__name__}>"
        if " at 0x" in text and hasattr(value, "__name__"):
            text = f"{value.__module__}.{getattr(value, '__qualname__', value.__name__)}"
        try:
            digest = hash(value)
        except TypeError:  # an attribute of a module
            digest = hash(text)
        return cls(name, type(value).__name__, shortened(text, LONGEST_TEXT), digest, by_name)


class CallKey(NamedTuple):
    """Properties of a call that decide which program it runs. It holds no values.

    Attributes:
        source: File, line and name of the function.
        in_tree: The tree of `(args, kwargs)` without static arguments.
        arguments: Types of the arguments, and their placement once it has been looked up.
        statics: The static arguments.
        mesh: The mesh in force, or None.
        in_shardings: The sharding requested for each argument, or None.
        out_shardings: The sharding requested for each result, or None.
        donated: For each argument whether its buffers are donated.
        devices: The device assignment; None before the arguments' placement has been looked up.
        options: Compiler options.
        context: Settings of JAX.
    """

    source: str
    in_tree: Any
    arguments: tuple[Argument, ...]
    statics: tuple[StaticValue, ...]
    mesh: Mesh | None
    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]
    donated: tuple[bool, ...]
    devices: tuple[Device, ...] | None
    options: tuple[tuple[str, Any], ...]
    context: Any

    def digest(self) -> int:
        """Return a hash that equal keys share."""
        arguments = [(a.path, a.aval, a.sharding if a.committed else None) for a in self.arguments]
        rest = (self.mesh, self.in_shardings, self.out_shardings, self.donated, self.devices)
        settings = (self.statics, self.options, self.context)
        return hash((self.in_tree, tuple(arguments), rest, settings))


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
        """Return the total duration."""
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
        arguments, results = (tuple(map(aval_text, side)) for side in avals)
        derived = DerivedProgram(
            *calling_line(),
            lower_seconds=miss.seconds.get("lower"),
            compile_seconds=miss.seconds.get("compile"),
            executable=miss.executable_source,
            arguments=arguments,
            results=results,
        )
        with self._lock:
            self._by_source.setdefault(source, deque(maxlen=KEPT)).append(derived)
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


class _ClearCounter:
    """Counter of calls of `jax.clear_caches()`."""

    def __init__(self) -> None:
        self.count = 0

    def cache_clear(self) -> None:
        """Count one call."""
        self.count += 1


CLEAR_COUNTER = cleared_with_jax(_ClearCounter())
"""Counter of this process."""
