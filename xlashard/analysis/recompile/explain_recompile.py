"""`explain_recompile`: why a jitted function was compiled again."""

from contextlib import ExitStack
from typing import Any

from xlashard._jax.trace import jitted
from xlashard.analysis.recompile.jit_logs import JIT_LOGS
from xlashard.analysis.recompile.recompile_report import RecompileReport
from xlashard.core.pjit.compile_log import CompileLog
from xlashard.core.pjit.function import Function
from xlashard.errors import ArgumentError
from xlashard.support.tracebacks import short_tracebacks


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
