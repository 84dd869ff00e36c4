"""Which pjit-ed functions were made of the same piece of source.

A function that is defined and pjit-ed anew in each round of a loop is a stranger to every cache.
Only its code object, which lives as long as the source around it, tells that it was there before.
"""

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any

_KEPT = 64
_DEEPEST = 16


class Site:
    """The pjit-ed functions that were made of one piece of source, and what they were called with.

    It outlives them, so it keeps nothing of a call but a number that tells it from others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._makers = 0
        self._made_anew = 0

    def is_due(self) -> bool:
        """Count a function that was made anew; return whether to log this one.

        The first is due, the second, the fourth, and so on: a program that makes one function for
        each leaf of a large tree has ten lines in its log, not a thousand.
        """
        with self._lock:
            self._made_anew += 1
            return self._made_anew & (self._made_anew - 1) == 0

    def new_maker(self) -> int:
        """A number for one more pjit-ed function, once it has something to make."""
        with self._lock:
            self._makers += 1
            return self._makers

    def add(self, maker: int, call: int) -> None:
        """Writes down that one of them had something to make for a call."""
        with self._lock:
            self._calls.append((maker, call))

    def others(self, maker: int) -> frozenset[int]:
        """The calls for which those that were there before one of them had something to make."""
        with self._lock:
            return frozenset(call for number, call in self._calls if number < maker)

    @property
    def makers(self) -> int:
        """How many had something to make so far."""
        with self._lock:
            return self._makers


class Sites:
    """Pieces of source that functions were made of, while they are there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_code: weakref.WeakKeyDictionary[CodeType, dict[Any, Site]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, fun: Callable[..., Any]) -> Site:
        """The site of a function. What has no code of its own is alone at its site."""
        codes = _codes(fun)
        if not codes:
            return Site()
        wrappers = tuple((c.co_filename, c.co_firstlineno, c.co_qualname) for c in codes)
        with self._lock:
            return self._by_code.setdefault(codes[-1], {}).setdefault(wrappers, Site())


SITES = Sites()
"""The sites of this process."""


def _codes(fun: Any) -> list[CodeType]:
    """The code of a function, and of what it wraps, down to the innermost."""
    codes = []
    while fun is not None and len(codes) < _DEEPEST:
        while isinstance(fun, functools.partial):
            fun = fun.func
        inner = getattr(fun, "__wrapped__", None)
        code = getattr(fun, "__code__", None) or getattr(type(fun).__call__, "__code__", None)
        if isinstance(code, CodeType):
            codes.append(code)
        fun = inner
    return codes
