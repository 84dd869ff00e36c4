"""What JAX does for arrays of the migration era that it does not do for its own."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
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


_JAX = str(Path(jax.__file__).parent) + os.sep


def is_called_by_jax() -> bool:
    """Whether the function that asks was called by code of JAX, and not by a person's."""
    return sys._getframe(2).f_code.co_filename.startswith(_JAX)


pmap = pmap_module.pmap
"""JAX's own, also where another one stands under its name."""
