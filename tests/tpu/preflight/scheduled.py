"""Programs compiled as far as their schedule, for tests of what only reads that.

To make code takes the compiler a hundred times as long as all before it, and it doesn't begin where
a program needs more memory than there is. What it wrote by then is the whole scheduled module.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax.numpy as jnp

from xlashard import pjit
from xlashard.tpu.preflight.compilation import Compilation, compile_for_report


def scheduled(function: Callable[..., Any], *arguments: Any, **how: Any) -> Compilation:
    """The scheduled module of a function that also gives out 256 GiB of zeros.

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
