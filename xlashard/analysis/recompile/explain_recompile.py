"""`explain_recompile`: why a jitted function was compiled again.

Functions of `jax.jit` have a log while they are watched.
"""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax

from xlashard._jax.runtime.global_state import trace_context
from xlashard._jax.trace import jitted
from xlashard._jax.trace.observed_programs import JitCall, JitFunction, Stage, watch_misses
from xlashard._jax.trace.tracing import abstractify, mesh_in_force
from xlashard.analysis.recompile.recompile_report import RecompileReport
from xlashard.core.pjit.arguments import describe_arguments
from xlashard.core.pjit.cache_miss import CacheMiss, CallKey, StaticValue
from xlashard.core.pjit.compile_log import CompileLog
from xlashard.core.pjit.function import Function
from xlashard.core.pjit.options import Selected
from xlashard.core.pjit.parameters import Parameters
from xlashard.core.program import wrapper_paths
from xlashard.errors import ArgumentError
from xlashard.support.tracebacks import short_tracebacks


class _JitLog:
    """Log of one function of `jax.jit`, which it must not keep alive."""

    def __init__(self, function: JitFunction) -> None:
        options = function.options
        self.compile_log = CompileLog(function.name, function.fun)
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
        self.compile_log.take(miss, lambda: key, is_last=stage == "compile")

    def _key(self, call: JitCall) -> CallKey:
        args, kwargs = call.arguments or ((), {})
        parameters = self._parameters
        values = parameters.flatten_call(args, kwargs)[0]
        avals = list(map(abstractify, values))
        dynamic = tuple(a for i, a in enumerate(args) if i not in parameters.static_argnums)
        named = {n: a for n, a in kwargs.items() if n not in parameters.static_argnames}
        tree = jax.tree_util.tree_structure((dynamic, named))
        paths = tuple(parameters.paths(args, kwargs))
        statics = tuple(StaticValue.of(*s) for s in parameters.statics(args, kwargs))
        equinox_call = wrapper_paths.call_under_way(paths)
        if equinox_call is None:
            paths = wrapper_paths.nnx_argument_paths(tree, paths)
        else:
            paths, _ = wrapper_paths.equinox_paths(equinox_call, paths, ())
            parts = wrapper_paths.equinox_statics(equinox_call)
            statics = tuple([StaticValue.of(path, part, False) for path, part in parts])
        return CallKey(
            source=self._options.fun_sourceinfo or "",
            in_tree=tree,
            arguments=describe_arguments(values, paths, avals),
            statics=statics,
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
    "functions of jax.jit are recorded on request: write xlashard.watch() before the first call, "
    "or set XLASHARD_EXPLAIN_RECOMPILES=1; a call after xlashard.explain reuses its program"
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

    def find_log(self, function: Any) -> CompileLog:
        """Return the log of a function that `jax.jit` returned."""
        return self._of(JitFunction(function._fun, function._jit_info)).compile_log

    def report(self, function: Any) -> RecompileReport:
        """Return the report of a function that `jax.jit` returned."""
        report = self.find_log(function).report()
        if report.explanations or (self._watches and not jitted.has_programs(function)):
            return report
        return replace(report, watched=False, hints=(_UNWATCHED,))


JIT_LOGS = JitLogs()
"""The logs of this process."""


def explain_recompile(fun: Any) -> RecompileReport:
    """Report what a jitted function traced and compiled, and the reason of each recompilation.

    Each cache miss is compared with the most similar earlier call: the report lists the arguments,
    settings and meshes in which the two differ.

    Calls of functions of `jax.jit`, `nnx.jit` and `eqx.filter_jit` are recorded after
    `watch`. To log each cache miss, set `XLASHARD_EXPLAIN_RECOMPILES=1`, which watches,
    too, or `logging.getLogger("xlashard.recompile").setLevel(logging.INFO)`, or JAX's own
    `jax_explain_cache_misses`.

    Args:
        fun: A function that `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit` returned.

    Returns:
        A report of the last 64 cache misses since the function was made or its `clear_cache`
        called; of a function of `jax.jit`, of those that were watched. `watched` is False if none
        was, and a hint has the line to write. Executables that JAX keeps for equal modules are
        reported as lowered only. Print it, or take `to_dict()` or `to_json()`.

    Raises:
        ArgumentError: If `fun` is no jitted function.

    Example:
        >>> import numpy as np
        >>> from xlashard import pjit
        >>> double = pjit(lambda x: x * 2)
        >>> _ = double(np.ones(4)), double(np.ones(5))
        >>> print(explain_recompile(double).explanations[1].differences[0])
        x: float32[4] → float32[5] (shape)
    """
    with short_tracebacks:
        function = getattr(fun, "_function", None)
        if isinstance(function, Function):
            return function.compile_log.report()
        return JIT_LOGS.report(_find_jitted(fun, "explain_recompile"))


def find_log(fun: Any, caller: str) -> CompileLog:
    """Return the log of a jitted function.

    Args:
        fun: A function as `explain_recompile` takes it.
        caller: The function that the user called, for errors.

    Raises:
        ArgumentError: If `fun` is no jitted function.
    """
    function = getattr(fun, "_function", None)
    if isinstance(function, Function):
        return function.compile_log
    return JIT_LOGS.find_log(_find_jitted(fun, caller))


def _find_jitted(fun: Any, caller: str) -> Any:
    inner = jitted.jitted_within(fun)
    if inner is None:
        raise ArgumentError(
            f"fun of {caller} is of type {type(fun).__name__}: expected a function of "
            "jax.jit, pjit or nnx.jit; write f = jax.jit(fun), or nnx.jit(fun) for modules, call "
            f"f, then {caller}(f)"
        )
    return inner


def watch() -> ExitStack:
    """Record cache misses of functions of `jax.jit` for `explain_recompile`, from now on.

    Functions of `pjit` are always recorded; what `preflight` and `auto_shard` trace is not. While
    it watches, two functions of JAX that run at a cache miss are replaced; a call that hits JAX's
    cache costs what it cost before.

    Returns:
        A context manager that ends it and puts JAX's functions back; so does its `close()`. What
        was recorded stays.

    Example:
        >>> import jax, numpy as np
        >>> double = jax.jit(lambda x: x * 2)
        >>> with watch():
        ...     _ = double(np.ones(4)), double(np.ones(5))
        >>> print(explain_recompile(double).explanations[1].differences[0])
        x: float32[4] → float32[5] (shape)
    """
    return JIT_LOGS.watch()
