"""Which class of arrays a result has in each world, and which arguments are global."""

from typing import Any

import jax

from xlashard._jax.tracing import Tracer
from xlashard.array import Array
from xlashard.array.handles import KindOf, unwrapped
from xlashard.legacy.arrays.device_arrays import ShardedDeviceArray
from xlashard.legacy.arrays.gda import GlobalDeviceArray, gda_class
from xlashard.legacy.modes.array_mode import ArrayMode


def kind_of(mode: ArrayMode) -> KindOf | None:
    """Return the function from a result's handle to its class; with `jax_array`, JAX's own."""
    if mode.jax_array:
        return unwrapped
    return gda_class if mode.output_gda else host_local_class


def host_local_class(handle: Any) -> type[Array]:
    """Return `ShardedDeviceArray`, whatever the number of devices, or `Array` across processes.

    Args:
        handle: The result's buffers.
    """
    return ShardedDeviceArray if handle.is_fully_addressable else Array


def is_global(value: Any) -> bool:
    """Whether the shape of an argument is that of the whole array, whatever world it is in.

    Those are GlobalDeviceArrays, arrays that span processes, and traced values.
    """
    if isinstance(value, GlobalDeviceArray | Tracer):
        return True
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def is_gda(value: Any) -> bool:
    """Whether a value is a GlobalDeviceArray."""
    return isinstance(value, GlobalDeviceArray)
