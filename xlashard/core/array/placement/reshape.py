"""Reshapes of the buffer of one device, where no sharding changes."""

from functools import partial
from typing import Any

import jax

from xlashard._jax import originals
from xlashard._jax.runtime.shardings import default_memory_kind
from xlashard._jax.runtime.transfer import Handle, assemble, copy_to, host_view, make_aval, put
from xlashard.core.sharding import SingleDeviceSharding


def reshape_buffer(handle: Handle, shape: tuple[int, ...], weak_type: bool | None = None) -> Handle:
    """Return an uncommitted copy of a single-device handle in another shape.

    On a CPU the host copies the elements. Elsewhere no transfer can change the shape of a buffer,
    and a program on the device copies them.

    Args:
        handle: A single-device handle.
        shape: A shape with as many elements.
        weak_type: Whether the dtype of the result is weak; by default that of the handle.
    """
    sharding = handle.sharding
    (device,) = sharding.device_set
    aval = make_aval(
        shape, handle.dtype, sharding, handle.weak_type if weak_type is None else weak_type
    )
    if device.platform == "cpu":
        window = host_view(handle)[0].reshape(shape)
        return put(aval, sharding, [window], [device], committed=False)
    return assemble(aval, sharding, [reshape_by_program(handle, shape)], committed=False)


def reshape_by_program(handle: Handle, shape: tuple[int, ...]) -> Handle:
    """Reshape by a program, on any platform."""
    (device,) = handle.sharding.device_set
    kind, normal = handle.sharding.memory_kind, default_memory_kind(device)
    # Within a trace too, where the handle is a concrete value.
    with jax.ensure_compile_time_eval():
        if kind in (None, normal):
            return _in_shape(handle, shape)
        # Programs run on the default memory of the device.
        own = SingleDeviceSharding(device, memory_kind=normal).jax_sharding()
        return copy_to(_in_shape(copy_to(handle, own), shape), handle.sharding)


@partial(originals.jit, static_argnums=1)
def _in_shape(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.lax.reshape(x, shape)
