"""Arrays from buffers and a `ShardingSpec`, and from one buffer, under the names of 2022."""

from collections.abc import Sequence
from typing import Any

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import with_sharding
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.handles import key_handle, keys_over
from xlashard.core.array.device_buffers import (
    Caller,
    make_array_from_single_device_arrays,
    read_buffers,
)
from xlashard.core.array.reshard.execute import uncommit
from xlashard.core.sharding import SingleDeviceSharding
from xlashard.errors import ArgumentError, PlacementError, counted
from xlashard.legacy.shardings.pmap import PmapSharding
from xlashard.legacy.shardings.sharding_spec import ShardingSpec
from xlashard.support.tracebacks import short_tracebacks

_SHARDED = Caller("make_sharded_device_array", "device_buffers")
_SINGLE = Caller("make_device_array", "device_buffers")


def make_sharded_device_array(
    aval: Any,
    sharding_spec: ShardingSpec | None,
    device_buffers: Sequence[Any],
    indices: Sequence[Any] | None = None,
) -> Array:
    """Create an array from buffers that are on their devices.

    Args:
        aval: Shape and dtype of the array: a `ShapedArray`, or a `jax.ShapeDtypeStruct`.
        sharding_spec: Spec of the sharding. Without one, each device holds one index of the first
            dimension.
        device_buffers: One array per device, in the order of the spec's grid. They may lack
            unstacked dimensions (all of the first, if there is no spec); then they are copied.
        indices: Index of each buffer, to be checked.

    Returns:
        An `Array` with a `PmapSharding`, over the same memory if no dimension is lacking (a key
        array of JAX, if the buffers are keys).

    Raises:
        PlacementError: The buffers do not fit the spec, the shape or the indices.
        GeometryError: The spec does not fit the shape.
        ArgumentError: A buffer is no array on one device, or `aval` is invalid.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import device_put, make_sharded_device_array
        >>> buffer = device_put(np.ones(3, np.float32), jax.devices()[0])
        >>> make_sharded_device_array(jax.ShapeDtypeStruct((1, 3), "float32"), None, [buffer])
        Array([[1., 1., 1.]], dtype=float32)
    """
    with short_tracebacks:
        shape, dtype = _type_of(aval)
        device_buffers = list(device_buffers)
        devices = [single.device for single in read_buffers(device_buffers, _SHARDED)]
        if sharding_spec is None:
            lacking = bool(shape) and {tuple(b.shape) for b in device_buffers} == {shape[1:]}
            pmap_sharding = PmapSharding.default(shape, devices=devices, unstacked=lacking)
        else:
            pmap_sharding = PmapSharding(devices, sharding_spec)
        _check_indices(indices, pmap_sharding.sharding_spec, shape)
        out = make_array_from_single_device_arrays(
            shape, pmap_sharding, device_buffers, dtype=dtype
        )
        if isinstance(out, Array) and getattr(aval, "weak_type", False):
            return wrap(
                with_sharding(out._handle, out._handle.sharding, weak_type=True), pmap_sharding
            )
        return out


def make_device_array(aval: Any, device: Device | None, device_buffer: Any) -> Array:
    """Create an array from one buffer.

    Args:
        aval: Its shape and dtype: a `ShapedArray`, or a `jax.ShapeDtypeStruct`.
        device: Device of the buffer, to which the array is committed. None leaves it uncommitted.
        device_buffer: An array on one device.

    Returns:
        An `Array` over the same memory; a key array of JAX, if the buffer is one.

    Raises:
        PlacementError: The buffer is on another device, or has another shape or dtype.
        ArgumentError: The buffer is no array on one device.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import device_put, make_device_array
        >>> buffer = device_put(np.ones(3, np.float32), jax.devices()[0])
        >>> make_device_array(jax.ShapeDtypeStruct((3,), "float32"), None, buffer).committed
        False
    """
    with short_tracebacks:
        shape, dtype = _type_of(aval)
        (single,) = read_buffers([device_buffer], _SINGLE)
        kind = device_buffer.sharding.memory_kind
        target = SingleDeviceSharding(device or single.device, memory_kind=kind)
        out = make_array_from_single_device_arrays(shape, target, [device_buffer], dtype=dtype)
        weak_type = bool(getattr(aval, "weak_type", False))
        if device is not None and not weak_type:
            return out
        handle = out._handle if isinstance(out, Array) else key_handle(out)
        if device is None:
            handle = uncommit(handle, weak_type)
        else:
            handle = with_sharding(handle, handle.sharding, weak_type=weak_type)
        return wrap(handle) if isinstance(out, Array) else keys_over(handle, out)


def _type_of(aval: Any) -> tuple[tuple[int, ...], Any]:
    try:
        return tuple(aval.shape), aval.dtype
    except (AttributeError, TypeError):
        raise ArgumentError(
            f"aval must have a shape and a dtype, not {aval!r}: write jax.ShapeDtypeStruct((8, "
            "128), 'float32')"
        ) from None


def _check_indices(
    indices: Sequence[Any] | None, spec: ShardingSpec, shape: tuple[int, ...]
) -> None:
    if indices is None:
        return
    held = list(spec.indices(shape).flat)
    indices = [tuple(index) for index in indices]
    if len(indices) != len(held):
        raise PlacementError(
            f"{counted(len(indices), 'index', 'indices')} for {counted(len(held), 'device')}: "
            "leave indices out, they follow from the spec"
        )
    for number, (index, expected) in enumerate(zip(indices, held, strict=True)):
        if _numbers(index, shape) != _numbers(expected, shape):
            raise PlacementError(
                f"indices[{number}] is {index}, but by {spec} device {number} holds {expected} "
                f"of an array of shape {shape}: leave indices out, they follow from the spec"
            )


def _numbers(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return start and stop per dimension; an integer stands for the slice of one element."""
    full = (*index, *(slice(None),) * (len(shape) - len(index)))
    return [
        cut.indices(size)[:2] if isinstance(cut, slice) else (cut, cut + 1)
        for cut, size in zip(full, shape, strict=False)
    ]
