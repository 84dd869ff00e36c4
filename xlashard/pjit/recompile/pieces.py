"""The programs of pieces that transformations make of pjit-ed calls."""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlashard._jax.frames import calling_line
from xlashard._jax.lowering import dtype_name
from xlashard.lazily import dataclass, deferred
from xlashard.pjit.recompile.making import Making

if TYPE_CHECKING:
    from xlashard.pjit.recompile import explanation
else:
    explanation = deferred("xlashard.pjit.recompile.explanation")

_KEPT = 64
_SOURCES = 256


@dataclass(frozen=True)
class Piece:
    """A program of a part of a call under `grad`, `vmap` or another transformation.

    Attributes:
        file: The file of the call.
        line: Its line.
        lower_seconds: How long lowering took; None where nothing was lowered.
        compile_seconds: How long compiling took, likewise.
        executable: Where the executable came from.
        arguments: The types of its arguments: those of the function and what lies between pieces.
        results: The types of its results.
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
        """How long all of it took."""
        return (self.lower_seconds or 0.0) + (self.compile_seconds or 0.0)

    def __str__(self) -> str:
        types = f"{', '.join(self.arguments)} → {', '.join(self.results)}"
        place = f"{Path(self.file).name}:{self.line}"
        seconds = explanation.seconds_text(self.seconds)
        return f"piece of a transformed call at {place} ({seconds}): {types}"


class Pieces:
    """The last pieces that were compiled of each function, by where it stands in its file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_source: OrderedDict[str, deque[Piece]] = OrderedDict()

    def note(self, source: str, making: Making, avals: tuple[Sequence[Any], Sequence[Any]]) -> None:
        """Writes down what had to be made for a piece, if anything.

        Args:
            source: Where its function stands.
            making: Of the piece.
            avals: The abstract values of its arguments and results.
        """
        if not making.steps:
            return
        arguments, results = (tuple(map(dtype_name, side)) for side in avals)
        piece = Piece(
            *calling_line(),
            lower_seconds=making.seconds.get("lower"),
            compile_seconds=making.seconds.get("compile"),
            executable=making.source,
            arguments=arguments,
            results=results,
        )
        with self._lock:
            self._by_source.setdefault(source, deque(maxlen=_KEPT)).append(piece)
            self._by_source.move_to_end(source)
            while len(self._by_source) > _SOURCES:
                self._by_source.popitem(last=False)

    def of(self, source: str) -> tuple[Piece, ...]:
        """What is remembered of a function, in order."""
        with self._lock:
            return tuple(self._by_source.get(source, ()))

    def forget(self, source: str) -> None:
        """Forgets the pieces of a function."""
        with self._lock:
            self._by_source.pop(source, None)


PIECES = Pieces()
"""The pieces of this process."""
