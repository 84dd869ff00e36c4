"""Programs compiled as far as their schedule, for tests of what only reads that.

Code generation takes a hundred times as long as the passes before it, and does not start for a
program that exceeds the memory. The dump holds the whole scheduled module by then.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax.numpy as jnp

from xlashard import pjit
from xlashard.tpu.preflight.compilation import Compilation, compile_for_report


def scheduled(function: Callable[..., Any], *arguments: Any, **how: Any) -> Compilation:
    """Return the scheduled module of a function that also gives out 256 GiB of zeros.

    Args:
        function: The function.
        *arguments: Shapes with shardings.
        **how: What `pjit` takes besides.
    """

    @wraps(function)
    def and_zeros(*given: Any) -> Any:
        return function(*given), jnp.zeros((2**8, 2**30), jnp.int8)

    if "out_shardings" in how:
        how["out_shardings"] = (how["out_shardings"], None)
    compilation = compile_for_report(pjit(and_zeros, **how).lower(*arguments))
    assert compilation.compiled is None
    return compilation
