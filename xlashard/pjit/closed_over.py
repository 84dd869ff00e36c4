"""Closed-over values of a function: which become arguments of its program, and their shardings."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax.runtime.dispatch import handles_of_keys
from xlashard._jax.trace.jaxprs import array_literals, is_host_array, is_ref
from xlashard._jax.trace.tracing import abstractify
from xlashard.array.core.closure_names import closure_variable_name
from xlashard.array.placement.read import handle_value
from xlashard.lazily import dataclass, deferred
from xlashard.pjit.arguments import bare, check_alive
from xlashard.sharding import Sharding, XLACompatibleSharding, from_jax

if TYPE_CHECKING:
    from xlashard import processes
    from xlashard.program.consistency.fingerprint import ValueNamer
else:
    processes = deferred("xlashard.processes")

# A closed-over array above this size, in bytes, becomes an argument of the program, not a constant
# in it.
_LARGEST_CONSTANT = 1 << 16


def is_hoisted(value: Any) -> bool:
    """Return True if a closed-over value becomes an argument of the program.

    References and arrays that are large or on several devices do.
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
    """Return the sharding of a closed-over array over several devices; None for other values."""
    handle = bare(value)
    if not isinstance(handle, jax.Array):
        return None
    sharding = from_jax(handle.sharding)
    if not isinstance(sharding, XLACompatibleSharding) or sharding.num_devices == 1:
        return None
    return sharding


def closed_over_values(jaxpr: Any, consts: Iterable[Any]) -> list[Any]:
    """Return some of the consts of a closed jaxpr, and all arrays that stand in it."""
    return [*consts, *(value for value, _ in array_literals(jaxpr))]


type ClosedOver = tuple[tuple[Callable[[], str], Sharding], ...]
"""Description and sharding of closed-over arrays."""


def closed_over_places(values: Iterable[Any], function: Any) -> ClosedOver:
    """Find the closed-over arrays that are committed to several devices.

    The buffer of a reference keeps its placement, also on one device.

    Args:
        values: The closed-over values that a function uses.
        function: The function.

    Returns:
        For each its description for errors, and its sharding.
    """
    found, held = [], []
    for value in values:
        if is_ref(value):
            held.append((_a_reference, from_jax(bare(value).sharding)))
        elif isinstance(value, jax.Array) and bare(value).committed:
            sharding = closed_over_sharding(value)
            if sharding is not None:
                # The search for its variable runs for errors only.
                found.append((partial(named_value, value, function, "the function"), sharding))
    return tuple(found + held)


def _a_reference() -> str:
    return "a reference that the function closes over"


def named_value(value: Any, function: Any, called: str) -> str:
    """Describe a closed-over array, by its variable if there is one."""
    variable = None if function is None else closure_variable_name(function, value)
    if variable is None:
        return f"an array that {called} closes over"
    return f"{variable}, an array that {called} closes over"


def check_closed_over(jaxpr: Any, name: str, function: Any = None) -> None:
    """Refuse a function that closes over a deleted array.

    Args:
        jaxpr: The closed jaxpr.
        name: The name of the function.
        function: The Python function, or None.

    Raises:
        DeletedError: With the function, the variable and the array's type.
    """
    for value in closed_over_values(jaxpr, jaxpr.consts):
        if isinstance(value, jax.Array) and bare(value).is_deleted():
            check_alive(value, named_value(value, function, name), abstractify(value))


@dataclass(frozen=True, eq=False)
class ClosedValues:
    """The closed-over values of a function, as processes compare them.

    Attributes:
        hoisted: Arguments of its program. The other values are constants of its module.
        all: All of them.
    """

    hoisted: tuple[Any, ...]
    all: tuple[Any, ...]

    def digests(self) -> tuple[str, ...]:
        """Return a digest of each hoisted value; empty for one that spans processes."""
        return tuple(map(_digest, self.hoisted))

    def describe(self, naming: "ValueNamer | None") -> tuple[tuple[str, str, str], ...]:
        """Return name, type and digest of every closed-over value."""
        name = partial(named_value, function=None, called="it") if naming is None else naming
        return tuple((name(value), str(abstractify(value)), _digest(value)) for value in self.all)


def _digest(value: Any) -> str:
    """Return a digest of a value of this process alone; empty for one that spans processes."""
    if is_ref(value):
        return ""
    if not isinstance(value, jax.Array):
        return processes.digest(np.asarray(value)).hex()
    handle = bare(value)
    if handle.is_deleted() or not handle.is_fully_addressable:
        return ""
    return processes.digest(handle_value(*handles_of_keys([handle]))).hex()
