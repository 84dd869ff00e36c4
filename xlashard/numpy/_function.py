"""A function of `jax.numpy` that gives Arrays."""

import inspect
from collections.abc import Callable
from typing import Any

from xlashard.array import Array
from xlashard.array.core.wrappers import wrap_jax_function
from xlashard.numpy._placing import placing


def function_over(theirs: Callable[..., Any], name: str, module: str) -> Callable[..., Any]:
    """The function of ours for one of JAX's.

    Args:
        theirs: A function of arrays and other values.
        name: What it is called in `module`.
        module: The full name of the module that has ours.
    """
    ours = wrap_jax_function(theirs, name, Array)
    try:
        has_device = "device" in inspect.signature(theirs).parameters
    except ValueError:
        has_device = False
    return as_named(placing(theirs, ours, name) if has_device else ours, theirs, name, module)


def as_named(ours: Any, theirs: Any, name: str, module: str) -> Any:
    """Gives a function the name, text and signature of JAX's, and a place to be pickled by."""
    ours.__name__ = ours.__qualname__ = name
    ours.__module__ = module
    ours.__doc__ = theirs.__doc__
    ours.__wrapped__ = theirs
    return ours
