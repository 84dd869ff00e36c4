"""The values that a function closes over: which become arguments of its program, and where."""

from typing import Any

import jax

from xlashard._jax.jaxprs import is_host_array
from xlashard._jax.refs import is_ref
from xlashard._jax.tracing import abstractify
from xlashard.pjit.arguments import bare, check_alive
from xlashard.sharding import Sharding, XLACompatibleSharding, from_jax

# A closed-over array above this size, in bytes, becomes an argument of the program, not a constant
# in it.
_LARGEST_CONSTANT = 1 << 16


def is_hoisted(value: Any) -> bool:
    """Whether a closed-over value becomes an argument.

    It does if it is large, on several devices, or a reference.
    """
    if is_ref(value):
        return True
    if is_host_array(value):
        return value.nbytes > _LARGEST_CONSTANT
    if not isinstance(value, jax.Array) or value.ndim == 0:
        return False
    handle = bare(value)
    spread = handle.sharding.num_devices > 1
    return spread or value.size * value.dtype.itemsize > _LARGEST_CONSTANT


def closed_over_sharding(value: Any) -> XLACompatibleSharding | None:
    """How a closed-over array is dealt out over several devices; None where it is not."""
    handle = bare(value)
    if not isinstance(handle, jax.Array):
        return None
    sharding = from_jax(handle.sharding)
    if not isinstance(sharding, XLACompatibleSharding) or sharding.num_devices == 1:
        return None
    return sharding


def closed_over_places(jaxpr: Any) -> tuple[Sharding, ...]:
    """Where the arrays are that a jaxpr closes over and that are bound to several devices.

    What a reference holds stays where it is, also on one device.
    """
    held = [from_jax(bare(c).sharding) for c in jaxpr.consts if is_ref(c)]
    bound = (c for c in jaxpr.consts if isinstance(c, jax.Array) and bare(c).committed)
    found = [s for s in map(closed_over_sharding, bound) if s is not None]
    return tuple(found + held)


def check_closed_over(jaxpr: Any, name: str) -> None:
    """Refuses a function that closes over an array whose buffers are gone.

    Raises:
        DeletedError: With the function and the array's type.
    """
    for value in jaxpr.consts:
        if isinstance(value, jax.Array):
            check_alive(value, f"an array that {name} closes over", abstractify(value))
