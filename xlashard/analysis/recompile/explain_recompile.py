"""`explain_recompile`: why a jitted function was compiled again."""

from typing import Any

from xlashard._jax.trace import jitted
from xlashard.analysis.recompile.recompile_report import RecompileReport
from xlashard.core.pjit.compile_log import JIT_LOGS
from xlashard.core.pjit.function import Function
from xlashard.errors import ArgumentError


def explain_recompile(fun: Any) -> RecompileReport:
    """Report what a jitted function traced and compiled, and the reason of each recompilation.

    Each cache miss is compared with the most similar earlier call: the report lists the arguments,
    settings and meshes in which the two differ.

    To log each cache miss, set `XLASHARD_EXPLAIN_RECOMPILES=1`, or
    `logging.getLogger("xlashard.recompile").setLevel(logging.INFO)`, or JAX's own
    `jax_explain_cache_misses`.

    Args:
        fun: A function that `xlashard.pjit`, `jax.jit`, `nnx.jit` or `eqx.filter_jit` returned.

    Returns:
        A report of the last 64 cache misses since the function was made or its `clear_cache`
        called; of a function of `jax.jit`, since `xlashard` was imported. Executables that JAX
        keeps for equal modules are reported as lowered only.
        Print it, or take `to_dict()` or `to_json()`.

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
    function = getattr(fun, "_function", None)
    if isinstance(function, Function):
        return function.compile_log.report()
    inner = jitted.jitted_within(fun)
    if inner is None:
        raise ArgumentError(
            f"fun of explain_recompile is of type {type(fun).__name__}: expected a function of "
            "jax.jit, pjit or nnx.jit; write f = jax.jit(fun), or nnx.jit(fun) for modules, call "
            "f, then explain_recompile(f)"
        )
    return JIT_LOGS.log(inner).report()
