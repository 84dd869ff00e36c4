"""JAX's own `pmap`, and what it can be told of the classes of its arguments."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import pmap as pmap_module

from xlashard._jax.tracebacks import short_tracebacks


def refuse_in_pmap(array_type: type, refuse: Callable[[Any], None]) -> None:
    """Makes `jax.pmap` ask about every argument of a type before it deals it out.

    It makes a program for all that looks like an array, and asks no class what it thinks of that.

    Args:
        array_type: The class.
        refuse: Is given the argument, and raises.
    """
    size_of = pmap_module._mapped_axis_size

    @functools.wraps(size_of)
    def checked(args: Sequence[Any], in_axes: Any) -> Any:
        for arg in args:
            if isinstance(arg, array_type):
                with short_tracebacks:
                    refuse(arg)
        return size_of(args, in_axes)

    # By this name every call looks it up, also of functions that were wrapped earlier.
    pmap_module._mapped_axis_size = checked


pmap = pmap_module.pmap
"""JAX's own, also where another one stands under its name."""
