"""Logs of what functions of pjit and of jax.jit traced, lowered and compiled."""

import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from types import CodeType
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.runtime.global_state import trace_context
from xlashard._jax.runtime.tracebacks import calling_line
from xlashard._jax.trace import jitted
from xlashard._jax.trace.observed_programs import JitCall, JitFunction, Stage, watch_misses
from xlashard._jax.trace.tracing import abstractify, mesh_in_force
from xlashard.config import RECOMPILE_LOGGER
from xlashard.lazily import deferred
from xlashard.pjit.arguments import describe_arguments
from xlashard.pjit.options import Selected
from xlashard.pjit.recompile.cache_miss import (
    CLEAR_COUNTER,
    DERIVED_PROGRAMS,
    KEPT,
    CacheMiss,
    CallKey,
    MissRecord,
    StaticValue,
)
from xlashard.pjit.signature import Parameters

if TYPE_CHECKING:
    from xlashard.pjit.recompile import recompile_report
    from xlashard.pjit.stages import wrapper_paths
else:
    recompile_report = deferred("xlashard.pjit.recompile.recompile_report")
    wrapper_paths = deferred("xlashard.pjit.stages.wrapper_paths")

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


class CompileLog:
    """Last cache misses of a jitted function, explained once a log line or report needs it.

    Args:
        function: Its name.
        fun: The Python function.
    """

    def __init__(self, function: str, fun: Callable[..., Any]) -> None:
        self._function = function
        self._fun: Callable[..., Any] | None = fun
        self._lock = threading.Lock()
        self._records: dict[int, MissRecord] = {}
        self._last = 0

    @cached_property
    def _site(self) -> tuple[Site, int]:
        """Return the source of the function, and its number among functions of that source."""
        assert self._fun is not None
        site = SITES.of(self._fun)
        return site, site.add_function()

    def release_function(self) -> None:
        """Look up the source of the function now, and keep the function alive no longer."""
        _ = self._site
        self._fun = None

    def record(self, miss: CacheMiss, key: Callable[[], CallKey]) -> None:
        """Record a call that has run stages since its last record.

        Args:
            miss: The stages of the call.
            key: Returns the key of the call.
        """
        miss.recorded = miss.stages
        miss.location = miss.location or calling_line()
        call_key, ended = key(), time.perf_counter()
        with self._lock:
            if miss.number is None:
                self._last = miss.number = self._last + 1
            self._records[miss.number] = MissRecord(
                number=miss.number,
                location=miss.location,
                key=call_key,
                seconds=dict(miss.seconds),
                executable_source=miss.executable_source,
                began=miss.began,
                ended=ended,
                clear_count=CLEAR_COUNTER.count,
            )
            while len(self._records) > KEPT:
                del self._records[min(self._records)]
        site, number = self._site
        site.add_call(number, call_key.digest())

    def log_reason(self, miss: CacheMiss) -> None:
        """Log the reason of a cache miss, if logging is enabled and the miss is not yet logged."""
        level = _level()
        if miss.logged == miss.recorded or not LOGGER.isEnabledFor(level):
            return
        miss.logged = miss.recorded
        records = [r for r in self._in_order() if r.number <= (miss.number or 0)]
        if not records:
            return
        explanation = self._explain(records, len(records) - 1)
        if explanation.reason == "first":
            return
        recreated = explanation.reason == "recreated"
        if recreated and level == logging.INFO and not self._site[0].is_due():
            return
        hints = recompile_report.hints([explanation], records, self._site[0].num_functions)
        advice = "".join([f"\n  hint: {hint}" for hint in hints])
        LOGGER.log(level, "%s%s", explanation.text(self._function), advice)

    def report(self) -> "recompile_report.RecompileReport":
        """Return all records with their explanations."""
        records = self._in_order()
        explained = tuple(self._explain(records, i) for i in range(len(records)))
        count = self._site[0].num_functions if records else 1
        return recompile_report.RecompileReport(
            function=self._function,
            explanations=explained,
            derived_programs=DERIVED_PROGRAMS.of(records[-1].key.source) if records else (),
            dropped=records[0].number - 1 if records else 0,
            hints=recompile_report.hints(explained, records, count),
        )

    def clear(self) -> None:
        """Drop all records."""
        with self._lock:
            sources = {record.key.source for record in self._records.values()}
            self._records.clear()
            self._last = 0
        for source in sources:
            DERIVED_PROGRAMS.drop(source)

    def _in_order(self) -> tuple[MissRecord, ...]:
        with self._lock:
            return tuple(self._records[number] for number in sorted(self._records))

    def _explain(self, records: Sequence[MissRecord], index: int) -> "recompile_report.Explanation":
        site, number = self._site
        earlier = site.calls_before(number)
        return recompile_report.explain_record(records[index], records[:index], earlier)


def _level() -> int:
    """Return WARNING where a setting enables these lines alone: they need no handler then."""
    explains = jax.config.jax_explain_cache_misses
    enabled = explains or logging.NOTSET < LOGGER.level <= logging.INFO
    return logging.WARNING if enabled else logging.INFO


class _JitLog:
    """Log of one function of `jax.jit`, which it must not keep alive."""

    def __init__(self, function: JitFunction) -> None:
        options = function.options
        self.compile_log = CompileLog(function.name, function.fun)
        self.compile_log.release_function()
        self._options = options
        self._parameters = Parameters.of(
            function.fun,
            Selected(options.static_argnums, options.static_argnames),
            Selected(options.donate_argnums, options.donate_argnames),
        )

    def record(self, call: JitCall, stage: Stage, seconds: float, source: str | None) -> None:
        """Add a stage that has just ended."""
        if call.record is None:
            call.record = CacheMiss(), self._key(call)
        miss, key = call.record
        miss.record_stage(stage, time.perf_counter() - seconds)
        miss.executable_source = source
        self.compile_log.record(miss, lambda: key)
        if stage == "compile":
            self.compile_log.log_reason(miss)

    def _key(self, call: JitCall) -> CallKey:
        args, kwargs = call.arguments or ((), {})
        parameters = self._parameters
        values = parameters.leaves(args, kwargs)
        avals = list(map(abstractify, values))
        dynamic = tuple(a for i, a in enumerate(args) if i not in parameters.static_argnums)
        named = {n: a for n, a in kwargs.items() if n not in parameters.static_argnames}
        paths = parameters.paths(args, kwargs)
        equinox_call = wrapper_paths.call_under_way(tuple(paths))
        if equinox_call is not None:
            paths, _ = wrapper_paths.equinox_paths(equinox_call, tuple(paths), ())
        return CallKey(
            source=self._options.fun_sourceinfo or "",
            in_tree=jax.tree_util.tree_structure((dynamic, named)),
            arguments=describe_arguments(values, paths, avals),
            statics=tuple(StaticValue.of(*s) for s in parameters.statics(args, kwargs)),
            mesh=mesh_in_force(),
            # Options of a function of `jax.jit`, which are the same in all calls.
            in_shardings=(),
            out_shardings=(),
            donated=parameters.donated(args, kwargs, len(values)),
            devices=(),
            options=self._options.compiler_options_kvs,
            context=trace_context(),
        )


_UNWATCHED = (
    "functions of jax.jit are recorded on request: write xlashard.watch_recompiles() before the "
    "first call, or set XLASHARD_EXPLAIN_RECOMPILES=1"
)


class JitLogs:
    """Logs of the functions of `jax.jit` that missed the cache, dropped with the functions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = 0
        self._end: Callable[[], None] = lambda: None
        # A Python function can be jitted several times, with other options.
        self._by_fun: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, _JitLog]]] = (
            weakref.WeakKeyDictionary()
        )

    def _of(self, function: JitFunction) -> _JitLog:
        with self._lock:
            logs = self._by_fun.setdefault(function.fun, {})
            key = id(function.options)
            if key not in logs:
                # The options stay alive with their id.
                logs[key] = function.options, _JitLog(function)
            return logs[key][1]

    def watch(self) -> ExitStack:
        """Record cache misses until each watch is closed."""
        with jitted.INFER_PARAMS_LOCK:
            self._watches += 1
            if self._watches == 1:
                self._end = watch_misses(self.observe)
        undo = ExitStack()
        undo.callback(self._end_one)
        return undo

    def _end_one(self) -> None:
        with jitted.INFER_PARAMS_LOCK:
            self._watches -= 1
            if not self._watches:
                self._end()

    def observe(self, call: JitCall, stage: Stage, seconds: float, source: str | None) -> None:
        """Add a stage of a call to the log of its function."""
        self._of(call.function).record(call, stage, seconds, source)

    def report(self, function: Any) -> "recompile_report.RecompileReport":
        """Return the report of a function that `jax.jit` returned."""
        log = self._of(JitFunction(function._fun, function._jit_info)).compile_log
        report = log.report()
        if report.explanations or (self._watches and not jitted.has_programs(function)):
            return report
        return replace(report, watched=False, hints=(_UNWATCHED,))


JIT_LOGS = JitLogs()
"""The logs of this process."""
