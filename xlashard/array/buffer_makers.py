"""Arrays over buffers that are on their devices, as early JAX made them."""

from collections.abc import Sequence
from typing import Any

import jax

from xlashard._jax.shardings import Device
from xlashard._jax.tracebacks import short_tracebacks
from xlashard._jax.transfer import Tracer, dressed
from xlashard.array.array import Array, wrap
from xlashard.array.keys import key_handle, keys_over
from xlashard.array.moving import placed
from xlashard.array.singles import make_array_from_single_device_arrays
from xlashard.errors import ArgumentError, PlacementError, counted
from xlashard.geometry import ShardingSpec
from xlashard.sharding import PmapSharding, SingleDeviceSharding


def make_sharded_device_array(
    aval: Any,
    sharding_spec: ShardingSpec | None,
    device_buffers: Sequence[Any],
    indices: Sequence[Any] | None = None,
) -> Array:
    """Makes one array of the buffers on its devices.

    Args:
        aval: Shape and dtype of the array: a `ShapedArray`, or a `jax.ShapeDtypeStruct`.
        sharding_spec: How it is cut and dealt to the devices. Without one, each device holds one
            index of the first dimension.
        device_buffers: An array on each device, in the order of the spec's grid. Where a dimension
            is unstacked, or no spec is given, they may lack it; then they are copied.
        indices: What each of them holds, if you like it checked.

    Returns:
        An `Array` with a `PmapSharding`, over the same memory where no dimension is lacking (a key
        array of JAX, if they are keys).

    Raises:
        PlacementError: Buffers that don't fit the spec, the shape or the indices.
        GeometryError: A spec that does not fit the shape.
        ArgumentError: Buffers that are no arrays on one device, or an aval that is none.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import device_put, make_sharded_device_array
        >>> buffer = device_put(np.ones(3, np.float32), jax.devices()[0])
        >>> make_sharded_device_array(jax.ShapeDtypeStruct((1, 3), "float32"), None, [buffer])
        Array([[1., 1., 1.]], dtype=float32)
    """
    with short_tracebacks:
        shape, dtype = _type_of(aval)
        devices = [_device_of(n, buffer) for n, buffer in enumerate(device_buffers)]
        if sharding_spec is None:
            lacking = bool(shape) and {tuple(b.shape) for b in device_buffers} == {shape[1:]}
            made = PmapSharding.default(shape, devices=devices, unstacked=lacking)
        else:
            made = PmapSharding(devices, sharding_spec)
        _check_indices(indices, made.sharding_spec, shape)
        out = make_array_from_single_device_arrays(shape, made, list(device_buffers), dtype=dtype)
        if isinstance(out, Array) and getattr(aval, "weak_type", False):
            return placed(dressed(out.to_jax(), out.to_jax().sharding, weak_type=True), made)
        return out


def make_device_array(aval: Any, device: Device | None, device_buffer: Any) -> Array:
    """Makes an array of one buffer.

    Args:
        aval: Its shape and dtype: a `ShapedArray`, or a `jax.ShapeDtypeStruct`.
        device: The device that it is on, which computations with it then must stay on. None leaves
            them free.
        device_buffer: An array on one device.

    Returns:
        An `Array` over the same memory; a key array of JAX, if it is keys.

    Raises:
        PlacementError: The buffer is on another device, or has another shape or dtype.
        ArgumentError: It is no array on one device.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import device_put, make_device_array
        >>> buffer = device_put(np.ones(3, np.float32), jax.devices()[0])
        >>> make_device_array(jax.ShapeDtypeStruct((3,), "float32"), None, buffer).committed
        False
    """
    with short_tracebacks:
        shape, dtype = _type_of(aval)
        found = _device_of(0, device_buffer)
        there = SingleDeviceSharding(found if device is None else device)
        kind = device_buffer.sharding.memory_kind
        there = there if kind is None else there.with_memory_kind(kind)
        out = make_array_from_single_device_arrays(shape, there, [device_buffer], dtype=dtype)
        weak_type = bool(getattr(aval, "weak_type", False))
        if device is not None and not weak_type:
            return out
        numbers = out.to_jax() if isinstance(out, Array) else key_handle(out)
        committed = device is not None
        made = dressed(numbers, there.twin(), committed=committed, weak_type=weak_type)
        return wrap(made) if isinstance(out, Array) else keys_over(made, out)


def _type_of(aval: Any) -> tuple[tuple[int, ...], Any]:
    try:
        return tuple(aval.shape), aval.dtype
    except (AttributeError, TypeError):
        raise ArgumentError(
            f"aval must say shape and dtype, not {aval!r}: write "
            "jax.ShapeDtypeStruct((8, 128), 'float32')"
        ) from None


def _device_of(number: int, buffer: Any) -> Device:
    """The device of a buffer; what is wrong with one that has none is said where it is used."""
    if not isinstance(buffer, jax.Array) or isinstance(buffer, Tracer):
        raise ArgumentError(
            f"device_buffers[{number}] is {type(buffer).__name__}, not an array on a device: write "
            "device_put(value, device)"
        )
    devices = list(buffer.sharding.device_set)
    if len(devices) != 1:
        raise ArgumentError(
            f"device_buffers[{number}] is on {len(devices)} devices, but must be on one: give "
            "[shard.data for shard in x.addressable_shards]"
        )
    return devices[0]


def _check_indices(
    indices: Sequence[Any] | None, spec: ShardingSpec, shape: tuple[int, ...]
) -> None:
    if indices is None:
        return
    wanted = list(spec.indices(shape).flat)
    given = [tuple(index) for index in indices]
    if len(given) != len(wanted):
        raise PlacementError(
            f"{counted(len(given), 'index', 'indices')} for {counted(len(wanted), 'device')}: "
            "leave indices out, they follow from the spec"
        )
    for number, (has, wants) in enumerate(zip(given, wanted, strict=True)):
        if _numbers(has, shape) != _numbers(wants, shape):
            raise PlacementError(
                f"indices[{number}] is {has}, but by {spec} device {number} holds {wants} of an "
                f"array of shape {shape}: leave indices out, they follow from the spec"
            )


def _numbers(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Start and stop per dimension, a number standing for the slice of that one element."""
    full = (*index, *(slice(None),) * (len(shape) - len(index)))
    return [
        cut.indices(size)[:2] if isinstance(cut, slice) else (cut, cut + 1)
        for cut, size in zip(full, shape, strict=False)
    ]
