"""Buffers with and without dimensions of size 1."""

from functools import partial
from typing import Any

import jax

from xlashard._jax.runtime.shardings import default_memory_kind
from xlashard._jax.runtime.transfer import Handle, assemble, copy_to, host_view, make_aval, put
from xlashard.sharding import SingleDeviceSharding


def reshape_buffer(handle: Handle, shape: tuple[int, ...], weak_type: bool | None = None) -> Handle:
    """The elements of a handle on one device in another shape, in memory of their own, uncommitted.

    On a CPU they are copied where they lie. Elsewhere no transfer can change the shape of a
    buffer, and a program on that one device copies them.

    Args:
        handle: On one device.
        shape: With as many elements.
        weak_type: Whether the dtype of the result is weak; as the handle's, if not given.
    """
    there = handle.sharding
    (device,) = there.device_set
    aval = make_aval(
        shape, handle.dtype, there, handle.weak_type if weak_type is None else weak_type
    )
    if device.platform == "cpu":
        window = host_view(handle)[0].reshape(shape)
        return put(aval, there, [window], [device], committed=False)
    return assemble(aval, there, [reshape_by_program(handle, shape)], committed=False)


def reshape_by_program(handle: Handle, shape: tuple[int, ...]) -> Handle:
    """The elements in another shape, on any platform."""
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
