"""Buffers with and without dimensions of size 1."""

from functools import partial
from typing import Any

import jax

from xlashard._jax.shardings import default_memory_kind
from xlashard._jax.transfer import Handle, copy_to, host_view, make_aval, put
from xlashard.sharding import SingleDeviceSharding


def in_shape(handle: Handle, shape: tuple[int, ...]) -> Handle:
    """The elements of a handle on one device in another shape, in memory of their own.

    On a CPU they are copied where they lie. Elsewhere no transfer can change the shape of a
    buffer, and a program on that one device copies them.

    Args:
        handle: On one device.
        shape: With as many elements.
    """
    (device,) = handle.sharding.device_set
    if device.platform == "cpu":
        aval = make_aval(shape, handle.dtype, handle.sharding, handle.weak_type)
        window = host_view(handle)[0].reshape(shape)
        return put(aval, handle.sharding, [window], [device], committed=handle.committed)
    return by_program(handle, shape)


def by_program(handle: Handle, shape: tuple[int, ...]) -> Handle:
    """`in_shape` on any platform."""
    (device,) = handle.sharding.device_set
    kind, normal = handle.sharding.memory_kind, default_memory_kind(device)
    # Also in the midst of a trace, where the handle is a value like any that is known.
    with jax.ensure_compile_time_eval():
        if kind in (None, normal):
            return _in_shape(handle, shape)
        # Programs work in the device's own memory.
        own = SingleDeviceSharding(device, memory_kind=normal).twin()
        return copy_to(_in_shape(copy_to(handle, own), shape), handle.sharding)


@partial(jax.jit, static_argnums=1)
def _in_shape(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.lax.reshape(x, shape)
