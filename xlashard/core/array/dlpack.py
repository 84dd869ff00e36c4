"""`from_dlpack`: arrays of other libraries as Arrays, over the same memory where possible."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format

from xlashard._jax.runtime import transfer
from xlashard._jax.runtime.shardings import Device, default_memory_kind
from xlashard._jax.runtime.transfer import ALIGNMENT, Handle, HandleType, copy_to
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.base import type_text
from xlashard.core.array.device_put import device_put
from xlashard.core.array.placement.put import host_value, put_value
from xlashard.core.array.placement.target import (
    Placement,
    memory_kind_of,
    parse_placement,
    resolve_sharding,
)
from xlashard.core.sharding import SingleDeviceSharding, to_jax
from xlashard.errors import ArgumentError, DLPackError
from xlashard.support.tracebacks import short_tracebacks


def from_dlpack(external: Any, *, device: Any = None, copy: bool | None = None) -> Array:
    """Return an Array over the memory of another library's array.

    Nothing is copied if the memory begins at a multiple of 64 bytes and has no gaps, and JAX keeps
    the dtype (without `jax_enable_x64` 64-bit numbers become 32-bit ones). The other array must not
    change afterwards. It may be deleted: the memory lives as long as the Array.

    Args:
        external: An object with `__dlpack__` and `__dlpack_device__`: an array of NumPy, PyTorch,
            JAX, an Array on one device.
        device: A device, a sharding or a `Format`. By default the device of the memory (for host
            memory: a CPU device). Any CPU device accepts host memory as it is.
        copy: True always copies, False never, None if needed.

    Returns:
        A committed `Array`.

    Raises:
        ArgumentError: `external` does not support DLPack, or `device` is invalid.
        DLPackError: `copy` is False but a copy is needed, or no device can hold the elements.

    Example:
        >>> import numpy as np
        >>> from xlashard import from_dlpack
        >>> from_dlpack(np.arange(3, dtype=np.float32), copy=True) + 1
        Array([1., 2., 3.], dtype=float32)
    """
    with short_tracebacks:
        placement = parse_placement(device, "device")
        where = _memory_of(external)
        if where == transfer.HOST_MEMORY:
            cpu = _cpu_device(external, placement)
            handle = _from_host(external, cpu, copy)
        else:
            handle = transfer.handle_on_device(external, None if copy else copy)
            handle = copy_to(handle, handle.sharding, fresh=True) if copy else handle
        handle = _in_known_dtype(handle, copy)
        if placement.sharding is None:
            return wrap(handle)
        return _at_place(handle, placement, copy)


def _memory_of(external: Any) -> int:
    try:
        kind, _ = external.__dlpack_device__()
        _ = external.__dlpack__
    except AttributeError:
        raise ArgumentError(
            f"from_dlpack takes an array with __dlpack__ and __dlpack_device__, not "
            f"{type(external).__name__}: for numbers and lists write device_put(x)"
        ) from None
    return int(kind)


def _cpu_device(external: Any, placement: Placement) -> Device:
    """Return the CPU device of host memory: the requested one, if it is a CPU device."""
    sharding = placement.sharding
    if sharding is not None and sharding.num_devices == 1:
        if sharding.devices[0].platform == "cpu":
            return sharding.devices[0]
    elif isinstance(external, jax.Array) and len(external.devices()) == 1:
        return next(iter(external.devices()))
    return jax.local_devices(backend="cpu")[0]


def _from_host(external: Any, device: Device, copy: bool | None) -> Handle:
    try:
        capsule = transfer.host_capsule(external, copy=False)
    except BufferError:
        if isinstance(external, np.ndarray):
            # NumPy's DLPack lacks numbers of 4 bits and less, in older releases bfloat16 and its
            # like and, for old consumers, read-only memory.
            return _from_numpy(external, device, copy)
        if copy is False:
            raise
        return _copied_by_maker(external, device)
    # Copied here: jaxlib ignores a request to copy aligned memory.
    shared = False if copy else copy
    try:
        handle = transfer.handle_of_capsule(capsule, device, copy=shared)
    except (RuntimeError, ValueError):
        handle, why = _copied(external, device)
        if copy is False and handle.size:
            raise DLPackError(_unshared(external, why)) from None
        return handle
    return copy_to(handle, handle.sharding, fresh=True) if copy else handle


def _copied(external: Any, device: Device) -> tuple[Handle, str]:
    """Return a handle over a copy, and the reason why the memory itself was not fit."""
    capsule = transfer.host_capsule(external, copy=False)
    try:
        return transfer.handle_of_capsule(capsule, device, copy=None), _UNALIGNED
    except (RuntimeError, ValueError):
        return _copied_by_maker(external, device), _GAPS


def _copied_by_maker(external: Any, device: Device) -> Handle:
    """Return a handle over a copy made by the other library, which handles its own strides."""
    try:
        capsule = transfer.host_capsule(external, copy=True)
        return transfer.handle_of_capsule(capsule, device, copy=None)
    except TypeError:
        raise DLPackError(
            f"from_dlpack can't read this {_kind(external)}, which {_GAPS}, and whose __dlpack__ "
            "takes no copy=True: give a contiguous one"
        ) from None
    except (RuntimeError, ValueError) as error:
        raise DLPackError(
            f"from_dlpack can't read this {_kind(external)} ({error}): give one of another dtype"
        ) from None


def _from_numpy(external: np.ndarray, device: Device, copy: bool | None) -> Handle:
    value, _ = host_value(external, lambda: "external")
    if copy is False:
        is_aligned = value.ctypes.data % ALIGNMENT == 0
        why = "" if is_aligned else _UNALIGNED
        why = why if value.flags.c_contiguous else _GAPS
        why = why if value.dtype == external.dtype else f"becomes {value.dtype.name}"
        if why:
            raise DLPackError(_unshared(external, why))
    target = resolve_sharding(value.shape, SingleDeviceSharding(device))
    return put_value(value, target, alias=not copy)


_UNALIGNED = f"begins at no multiple of {ALIGNMENT} bytes"
_GAPS = "has gaps or overlaps between its elements"


def _unshared(external: Any, why: str) -> str:
    return (
        f"from_dlpack can't share the memory of this {_kind(external)}, which {why}: leave "
        "copy=False out"
    )


def _in_known_dtype(handle: Handle, copy: bool | None) -> Handle:
    dtype = jax.dtypes.canonicalize_dtype(handle.dtype)
    if dtype == handle.dtype:
        return handle
    if copy is False:
        raise DLPackError(
            f"from_dlpack can't share memory of {handle.dtype.name}, which becomes {dtype.name} "
            "by a copy: leave copy=False out, or call jax.config.update('jax_enable_x64', True) "
            "before"
        )
    return jnp.asarray(handle, dtype)


def _at_place(handle: Handle, placement: Placement, copy: bool | None) -> Array:
    """Return the Array under the requested placement."""
    (current,) = handle.sharding.device_set
    sharding: Any = placement.sharding
    is_there = (
        sharding.devices == (current,)
        and memory_kind_of(sharding) == default_memory_kind(current)
        and placement.layout is None
    )
    if copy is False and not is_there:
        raise DLPackError(
            f"from_dlpack can't share memory of {current} with {sharding}: leave "
            "copy=False out, or give no device"
        )
    if placement.layout is not None:
        sharding = Format(placement.layout, to_jax(sharding, handle.shape))
    return device_put(wrap(handle), sharding)


def _kind(external: Any) -> str:
    dtype = getattr(external, "dtype", None)
    if isinstance(external, np.ndarray | HandleType | Array):
        return f"{type(external).__name__} {type_text(external)}"
    return type(external).__name__ if dtype is None else f"{type(external).__name__} of {dtype}"
