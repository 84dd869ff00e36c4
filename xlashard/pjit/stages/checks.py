"""What a compiled program refuses to take: values of another type, or in another place."""

from typing import Any

from xlashard._jax.lower.lowering import dtype_name
from xlashard._jax.trace.tracing import abstractify, is_token
from xlashard.errors import ArgumentError, ResourceError
from xlashard.pjit.arguments import Argument
from xlashard.pjit.shardings.error_hints import as_code, described, type_hint
from xlashard.sharding import XLACompatibleSharding


def check_type(value: Any, path: str, aval: Any, text: str, otherwise: str) -> None:
    """Refuses a value of another shape or dtype.

    Args:
        value: The value.
        path: As a person would write it.
        aval: What it should be.
        text: The error, with places for what was wanted (with its path) and what was given.
        otherwise: What to do where a cast would not help.

    Raises:
        ArgumentError: If it is something else.
    """
    given = abstractify(value)
    if is_token(given) or is_token(aval):
        if is_token(given) and is_token(aval):
            return
        hint = otherwise
    elif (given.shape, given.dtype) == (aval.shape, aval.dtype):
        return
    else:
        hint = type_hint(given, aval, otherwise)
    wanted = f"{path} as {dtype_name(aval)}"
    raise ArgumentError(f"{text.format(wanted, dtype_name(given))}: {hint}")


def check_place(argument: Argument, wanted: XLACompatibleSharding, text: str) -> None:
    """Refuses an array that is bound to another place.

    Args:
        argument: The array.
        wanted: Where it must be.
        text: The beginning of the error, with a place for the array.

    Raises:
        ResourceError: If it is bound to devices or tiles other than those.
    """
    there = argument.sharding
    if there is None or not argument.committed:
        return
    if wanted.is_equivalent_to(there, argument.aval.ndim):
        return
    raise ResourceError(
        f"{text.format(argument.describe())} as {described(wanted)}, but it is committed as "
        f"{described(there)}: move it first with device_put(x, {as_code(wanted)})",
        path=argument.path,
    )
