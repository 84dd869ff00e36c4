"""Groups of pjit-ed functions that were made of the same source.

A function that is defined and pjit-ed again in each iteration of a loop misses every cache. Only
its code object, which lives as long as the enclosing source, connects it with its predecessors.
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
    """Pjit-ed functions that were made of one source, and digests of their calls.

    It outlives the functions, so it keeps only the digest of a call's key.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._num_functions = 0
        self._recreated = 0

    def is_due(self) -> bool:
        """Count a recreated function; return whether to log this one.

        The first is due, the second, the fourth, and so on: a program that makes one function for
        each leaf of a large tree has ten lines in its log, not a thousand.
        """
        with self._lock:
            self._recreated += 1
            return self._recreated & (self._recreated - 1) == 0

    def add_function(self) -> int:
        """Return a number for one more pjit-ed function, at its first cache miss."""
        with self._lock:
            self._num_functions += 1
            return self._num_functions

    def add_call(self, function: int, digest: int) -> None:
        """Add the digest of a call of one of the functions that missed the cache."""
        with self._lock:
            self._calls.append((function, digest))

    def calls_before(self, function: int) -> frozenset[int]:
        """Return the digests of calls of functions that were added before a given one."""
        with self._lock:
            return frozenset(digest for number, digest in self._calls if number < function)

    @property
    def num_functions(self) -> int:
        """Number of functions with a cache miss so far."""
        with self._lock:
            return self._num_functions


class Sites:
    """Sites by code object, held weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_code: weakref.WeakKeyDictionary[CodeType, dict[Any, Site]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, fun: Callable[..., Any]) -> Site:
        """Return the site of a function; a callable without a code object gets a new one."""
        codes = _codes(fun)
        if not codes:
            return Site()
        wrappers = tuple((c.co_filename, c.co_firstlineno, c.co_qualname) for c in codes)
        with self._lock:
            sites = self._by_code.setdefault(codes[-1], {})
            if wrappers not in sites:
                sites[wrappers] = Site()
            return sites[wrappers]


SITES = Sites()
"""The sites of this process."""


def _codes(fun: Any) -> list[CodeType]:
    """List the code objects of a function and of its wrapped functions, innermost last."""
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
