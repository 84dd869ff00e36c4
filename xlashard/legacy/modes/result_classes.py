"""Array class of a result in each array mode, and the test for global arguments."""

from typing import Any

import jax

from xlashard._jax.trace.tracing import Tracer
from xlashard.array import Array
from xlashard.array.core.handles import KindOf, unwrapped
from xlashard.legacy.arrays.device_arrays import ShardedDeviceArray
from xlashard.legacy.arrays.gda import GlobalDeviceArray, gda_class
from xlashard.legacy.modes.array_mode import ArrayMode


def kind_of(mode: ArrayMode) -> KindOf | None:
    """Return the function that maps a result's handle to its array class in a mode."""
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
    """Return True if a value is global in every array mode.

    GlobalDeviceArrays, arrays that span processes, and tracers are global.
    """
    if isinstance(value, GlobalDeviceArray | Tracer):
        return True
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def is_gda(value: Any) -> bool:
    """Return True if a value is a GlobalDeviceArray."""
    return isinstance(value, GlobalDeviceArray)
