"""What a pjit-ed function had to trace, lower and compile, and for which calls."""

import threading
import time
from collections.abc import Callable
from typing import Any

from xlashard._jax.caches import cleared_with_jax
from xlashard._jax.frames import calling_line
from xlashard._jax.shardings import Device
from xlashard.lazily import dataclass
from xlashard.pjit.arguments import Argument
from xlashard.pjit.recompile.making import Making
from xlashard.sharding import Mesh, Sharding

_KEPT = 64
_LONGEST_TEXT = 120


@dataclass(frozen=True)
class StaticValue:
    """A static argument, as far as it is remembered: as text, that is, and not itself.

    Attributes:
        name: The parameter.
        kind: The name of its type.
        text: Its `repr`, shortened.
        digest: Its hash.
        by_name: Whether it was passed by name.
    """

    name: str
    kind: str
    text: str
    digest: int
    by_name: bool

    @classmethod
    def of(cls, name: str, value: Any, by_name: bool) -> "StaticValue":
        """Reads one off a call."""
        try:
            text = repr(value)
        except Exception:  # a broken __repr__ of the caller's must not break the call
            text = f"<{type(value).__name__}>"
        return cls(name, type(value).__name__, shortened(text), hash(value), by_name)


def shortened(text: str) -> str:
    """A text of at most so many characters that it fits a report."""
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


@dataclass(frozen=True, eq=False)
class Key:
    """What one call of a function is told apart from others by. It holds no values.

    Attributes:
        source: Where the function stands in its file.
        in_tree: The tree of `(args, kwargs)`, static arguments taken out.
        arguments: The arguments: their types, and where they are once that was looked at.
        statics: The static arguments.
        mesh: The mesh in force, or None.
        in_shardings: What was said of each argument; None for nothing.
        out_shardings: What was said of each result; None for nothing.
        result_paths: The paths of the results.
        donated: For each argument whether its buffers may be reused.
        devices: The device assignment; None before it is known where the arguments are.
        options: Options of the compiler.
        context: Settings of JAX.
    """

    source: str
    in_tree: Any
    arguments: tuple[Argument, ...]
    statics: tuple[StaticValue, ...]
    mesh: Mesh | None
    in_shardings: tuple[Sharding | None, ...]
    out_shardings: tuple[Sharding | None, ...]
    result_paths: tuple[str, ...]
    donated: tuple[bool, ...]
    devices: tuple[Device, ...] | None
    options: tuple[tuple[str, Any], ...]
    context: Any

    @property
    def is_placed(self) -> bool:
        """Whether it is known where the arguments are."""
        return self.devices is not None

    def digest(self) -> int:
        """A number that equal keys share."""
        arguments = ((a.path, a.aval, a.sharding if a.committed else None) for a in self.arguments)
        rest = (self.mesh, self.in_shardings, self.out_shardings, self.donated, self.devices)
        asked = (self.statics, self.options, self.context)
        return hash((self.in_tree, tuple(arguments), rest, asked))


@dataclass(frozen=True, eq=False)
class Record:
    """One call that had something to make.

    Attributes:
        number: Counted from 1 since the function was made or cleared.
        place: The file and line of the call.
        key: What it is told apart by.
        trace: Seconds that tracing took; None where nothing was traced.
        lower: Seconds that lowering took, likewise.
        compile: Seconds that getting the executable took, likewise.
        source: Where the executable came from.
        began: When the call came.
        ended: When the last of it was made.
        clearings: How often `jax.clear_caches()` had been called by then.
    """

    number: int
    place: tuple[str, int]
    key: Key
    trace: float | None
    lower: float | None
    compile: float | None
    source: str | None
    began: float
    ended: float
    clearings: int


class _Clearings:
    """Counts the calls of `jax.clear_caches()`."""

    def __init__(self) -> None:
        self.count = 0

    def cache_clear(self) -> None:
        """Counts one."""
        self.count += 1


_clearings = cleared_with_jax(_Clearings())


class History:
    """The last records of one function. Calls that had nothing to make leave none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[int, Record] = {}
        self._last = 0

    def note(self, making: Making, key: Callable[[], Key]) -> Record | None:
        """Writes down what a call made since it was last asked, if anything, and gives that.

        Args:
            making: Of the call.
            key: Gives what the call is told apart by.
        """
        if making.noted == making.steps:
            return None
        making.noted = making.steps
        making.place = making.place or calling_line()
        asked, ended = key(), time.perf_counter()
        with self._lock:
            if making.number is None:
                self._last = making.number = self._last + 1
            record = self._records[making.number] = Record(
                number=making.number,
                place=making.place,
                key=asked,
                trace=making.seconds.get("trace"),
                lower=making.seconds.get("lower"),
                compile=making.seconds.get("compile"),
                source=making.source,
                began=making.began,
                ended=ended,
                clearings=_clearings.count,
            )
            while len(self._records) > _KEPT:
                del self._records[min(self._records)]
            return record

    def records(self) -> tuple[Record, ...]:
        """What is remembered, in order."""
        with self._lock:
            return tuple(self._records[number] for number in sorted(self._records))

    def forget(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._records.clear()
            self._last = 0
