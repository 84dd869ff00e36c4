"""Logs of what jitted functions traced, lowered and compiled."""

import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import CodeType
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.runtime.global_state import trace_context
from xlashard._jax.runtime.tracebacks import calling_line
from xlashard._jax.trace import tracing
from xlashard._jax.trace.observed_programs import is_paused
from xlashard.config import RECOMPILE_LOGGER
from xlashard.core.pjit.arguments import Argument
from xlashard.core.pjit.cache_key import LoweringRequest
from xlashard.core.pjit.cache_miss import (
    CLEAR_COUNTER,
    DERIVED_PROGRAMS,
    KEPT,
    CacheMiss,
    CallKey,
    StaticValue,
)
from xlashard.core.pjit.trace import Call
from xlashard.support import hooks
from xlashard.support.lazily import copy_with, deferred

if TYPE_CHECKING:
    from xlashard.core.program import wrapper_paths
else:
    wrapper_paths = deferred("xlashard.core.program.wrapper_paths")

LOGGER = logging.getLogger(RECOMPILE_LOGGER)


_DEEPEST = 16


class Site:
    """Pjit-ed functions that were made of one source, and digests of their calls.

    A function that is defined and pjit-ed again in each iteration of a loop misses every cache.
    Only its code object, which lives as long as the enclosing source, connects it with its
    predecessors. A site outlives the functions, so it keeps only the digest of a call's key.

    Attributes:
        num_functions: Number of functions with a cache miss so far.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._recreated = 0
        self.num_functions = 0

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
            self.num_functions += 1
            return self.num_functions

    def add_call(self, function: int, digest: int) -> None:
        """Add the digest of a call of one of the functions that missed the cache."""
        with self._lock:
            self._calls.append((function, digest))

    def calls_before(self, function: int) -> frozenset[int]:
        """Return the digests of calls of functions that were added before a given one."""
        with self._lock:
            return frozenset(digest for number, digest in self._calls if number < function)


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
        wrappers = tuple([(c.co_filename, c.co_firstlineno, c.co_qualname) for c in codes])
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


def make_call_key(
    call: Call, request: LoweringRequest | None, options: tuple[tuple[str, Any], ...]
) -> CallKey:
    """Return the key by which recompilations compare calls.

    Args:
        call: The call.
        request: The request for its program; None for a call that is traced only.
        options: Compiler options of a call without a request.
    """
    traced, arguments = call.traced, call.miss.arguments
    if arguments is None:
        types = zip(traced.arg_names, map(tracing.shaped, traced.in_avals), strict=True)
        arguments = tuple([Argument(path, aval, None, False) for path, aval in types])
    return CallKey(
        source=tracing.source_of(traced.jaxpr),
        in_tree=traced.in_tree,
        arguments=arguments,
        statics=tuple([StaticValue.of(*static) for static in call.statics]),
        mesh=call.mesh,
        in_shardings=call.in_shardings,
        out_shardings=call.out_shardings,
        donated=call.donated,
        devices=None if request is None else request.placement.devices,
        options=options if request is None else request.options,
        context=trace_context() if request is None else request.context,
    )


type MissListener = Callable[["CompileLog", CacheMiss], None]
"""Receives the log of a function and a cache miss, after each stage that was recorded of it."""

_listeners: tuple[MissListener, ...] = ()
_listeners_lock = threading.Lock()


@contextmanager
def report_misses(listener: MissListener) -> Iterator[None]:
    """Report cache misses of all functions to a listener, in the threads of their calls."""
    global _listeners
    with _listeners_lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _listeners_lock:
            _listeners = tuple([each for each in _listeners if each is not listener])


class CompileLog:
    """Last cache misses of a jitted function, explained once a log line or report needs it.

    Args:
        function: Its name.
        fun: The Python function.
    """

    def __init__(self, function: str, fun: Callable[..., Any]) -> None:
        self._function = function
        self._find_function = tracing.refer_weakly(fun)
        self._lock = threading.Lock()
        self._records: dict[int, CacheMiss] = {}
        self._last = 0

    @cached_property
    def _site(self) -> tuple[Site, int]:
        """Return the source of the function, and its number among functions of that source."""
        site = SITES.of(self._find_function())
        return site, site.add_function()

    def take(self, miss: CacheMiss, make_key: Callable[[], CallKey], *, is_last: bool) -> None:
        """Record the stages of a call, and log the reason of a cache miss after the last one.

        Args:
            miss: The stages, perhaps after those that are recorded.
            make_key: Returns the key of the call.
            is_last: True if the call runs no further stage, so that its reason can be logged.
        """
        if miss.stages > miss.recorded:
            miss.recorded = miss.stages
            if not is_paused():
                self._record(miss, make_key())
        if is_last:
            self._log_reason(miss)

    def _record(self, miss: CacheMiss, call_key: CallKey) -> None:
        if not miss.number:
            miss.location = calling_line()
        miss.key, miss.clear_count = call_key, CLEAR_COUNTER.count
        miss.ended = time.perf_counter()
        with self._lock:
            if not miss.number:
                self._last = miss.number = self._last + 1
            # The call may run more stages while a report reads this.
            self._records[miss.number] = copy_with(miss, seconds=dict(miss.seconds))
            while len(self._records) > KEPT:
                del self._records[min(self._records)]
        site, number = self._site
        site.add_call(number, call_key.digest())
        for listener in _listeners:
            listener(self, miss)

    def _log_reason(self, miss: CacheMiss) -> None:
        """Log the reason of a cache miss, if logging is enabled and the miss is not yet logged."""
        level = _level()
        if miss.logged == miss.recorded or not LOGGER.isEnabledFor(level):
            return
        miss.logged = miss.recorded
        records = [r for r in self._in_order() if r.number <= miss.number]
        if not records:
            return
        explanation = self._explain(records, len(records) - 1)
        if explanation.reason == "first":
            return
        recreated = explanation.reason == "recreated"
        if recreated and level == logging.INFO and not self._site[0].is_due():
            return
        hints = hooks.recompile_report.hints([explanation], records, self._site[0].num_functions)
        advice = "".join([f"\n  hint: {hint}" for hint in hints])
        LOGGER.log(level, "%s%s", explanation.text(self._function), advice)

    def report(self) -> Any:
        """Return all records with their explanations."""
        records = self._in_order()
        explained = tuple(self._explain(records, i) for i in range(len(records)))
        count = self._site[0].num_functions if records else 1
        return hooks.recompile_report.RecompileReport(
            function=self._function,
            explanations=explained,
            derived_programs=DERIVED_PROGRAMS.of(records[-1].key.source) if records else (),
            dropped=records[0].number - 1 if records else 0,
            hints=hooks.recompile_report.hints(explained, records, count),
        )

    def clear(self) -> None:
        """Drop all records."""
        with self._lock:
            sources = {record.key.source for record in self._records.values()}
            self._records.clear()
            self._last = 0
        for source in sources:
            DERIVED_PROGRAMS.drop(source)

    def _in_order(self) -> tuple[CacheMiss, ...]:
        with self._lock:
            return tuple(self._records[number] for number in sorted(self._records))

    def _explain(self, records: Sequence[CacheMiss], index: int) -> Any:
        site, number = self._site
        earlier = site.calls_before(number)
        return hooks.recompile_report.explain_record(records[index], records[:index], earlier)


def _level() -> int:
    """Return WARNING where a setting enables these lines alone: they need no handler then."""
    explains = jax.config.jax_explain_cache_misses
    enabled = explains or logging.NOTSET < LOGGER.level <= logging.INFO
    return logging.WARNING if enabled else logging.INFO
