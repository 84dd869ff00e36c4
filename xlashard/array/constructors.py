"""Arrays from a callback, and from arrays that are on their devices already."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.shardings import Device
from xlashard._jax.transfer import Handle, HandleType, Tracer, assemble, aval_of, make_aval
from xlashard.array.array import Array
from xlashard.array.holder import check_alive
from xlashard.array.host_put import host_value, put_piece
from xlashard.array.keys import is_key_array, is_key_dtype, key_handle, keys_over, number_places
from xlashard.array.moving import placed
from xlashard.array.placement import (
    Places,
    as_shape,
    as_sharding,
    memory_kind_of,
    places,
)
from xlashard.array.reshard import relayout, reshard
from xlashard.array.text import index_text
from xlashard.errors import ArgumentError, DeletedError, PlacementError
from xlashard.sharding import SingleDeviceSharding, from_jax


def make_array_from_callback(
    shape: Sequence[int],
    sharding: Any,
    data_callback: Callable[[tuple[slice, ...]], Any],
    dtype: Any = None,
) -> Any:
    """Makes an array whose pieces a function gives, for this process's devices only.

    Each piece goes to its devices before the next is asked for, so that the host holds one at a
    time, and the function may use one buffer for all.

    Args:
        shape: Of the whole array, in elements.
        sharding: A sharding of this package or of JAX, one that you wrote, or a
            `Format(layout, sharding)`.
        data_callback: Takes an index of the whole array (one slice per dimension) and gives the
            piece there: a NumPy array, a number, an array or keys of any library of JAX. It is
            called once per distinct index, however many devices hold that piece.
        dtype: Of the array; that of the first piece if not given.

    Returns:
        An `Array`, committed; a key array of JAX if the pieces are keys.

    Raises:
        PlacementError: A piece with another shape or dtype, with its index; a bad shape.
        ArgumentError: A piece that no device can hold, or a traced one; no sharding.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, make_array_from_callback
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> whole = np.arange(6, dtype=np.int32).reshape(2, 3)
        >>> make_array_from_callback((2, 3), NamedSharding(mesh, P("data")), lambda i: whole[i])
        Array([[0, 1, 2],
               [3, 4, 5]], dtype=int32)
    """
    there, layout = as_sharding(sharding, "sharding")
    target = places(as_shape(shape), there)
    expected = None if dtype is None else _canonical(dtype)
    holders: dict[int, list[int]] = {}
    for number, tile in enumerate(target.tiles):
        holders.setdefault(tile, []).append(number)
    indices = target.indices
    buffers: dict[int, Handle] = {}
    keys = None
    for numbers in holders.values():
        index = indices[numbers[0]]
        piece = _read_piece(data_callback(index), index, target.shard_shape, expected)
        expected, keys = piece.dtype, piece.keys
        buffers |= put_piece(piece.value, target, numbers)
    if expected is None:
        raise ArgumentError(
            "none of the sharding's devices is in this process, so nothing tells the dtype: write "
            "make_array_from_callback(shape, sharding, data_callback, dtype=...)"
        )
    ordered = [buffers[number] for number in range(len(target.positions))]
    return _finished(ordered, expected, target, layout, keys)


def _canonical(dtype: Any) -> Any:
    try:
        if is_key_dtype(dtype):
            return dtype
        found = jax.dtypes.canonicalize_dtype(dtype)
        aval_of(np.empty(0, found))
        return found
    except TypeError:
        raise ArgumentError(f"dtype {dtype!r} is none that a device can hold") from None


class _Piece(NamedTuple):
    """What a callback gave for one index.

    Attributes:
        value: A NumPy array or a single-device handle; the numbers of keys.
        dtype: Of the elements; that of keys for keys.
        keys: The keys themselves, where it was some.
    """

    value: Any
    dtype: Any
    keys: Any = None


def _read_piece(given: Any, index: Any, shape: tuple[int, ...], dtype: Any) -> _Piece:
    """Checks one piece against the shape and dtype that it must have."""
    name = f"data_callback's piece for index {index_text(index)}"
    if isinstance(given, Tracer):
        raise ArgumentError(
            f"{name} is traced: an array of known values can't be made of it; call "
            "make_array_from_callback outside of jit, grad and vmap, or use jnp operations"
        )
    if is_key_array(given):
        piece = _Piece(_on_one_device(key_handle(given)), given.dtype, given)
    elif isinstance(given, Array | HandleType):
        check_alive(given)
        handle = given.to_jax() if isinstance(given, Array) else given
        piece = _Piece(_on_one_device(handle), handle.dtype)
    else:
        value, weak_type = host_value(given, name)
        if weak_type and dtype is not None and not is_key_dtype(dtype):
            value = value.astype(dtype)
        piece = _Piece(value, value.dtype)
    found = tuple(given.shape if piece.keys is not None else piece.value.shape)
    if found != shape:
        raise PlacementError(
            f"{name} has shape {found}, but the pieces of this array have shape {shape}"
        )
    if dtype is not None and piece.dtype != dtype:
        raise PlacementError(
            f"{name} is {piece.dtype.name}, but the array is {dtype.name}: let every piece have "
            "one dtype, for example by .astype(...)"
        )
    return piece


def _on_one_device(handle: Handle) -> Handle:
    """A piece that its maker has spread over devices, on the first of them."""
    if handle.sharding.num_devices == 1:
        return handle
    device = from_jax(handle.sharding).devices[0]
    return reshard(handle, places(handle.shape, SingleDeviceSharding(device)))


def _finished(
    buffers: list[Handle], dtype: Any, target: Places, layout: Layout | None, keys: Any
) -> Any:
    """One array over buffers that are where they belong."""
    if keys is None:
        aval = make_aval(target.shape, dtype, target.twin)
        handle = assemble(aval, target.twin, buffers)
        return placed(relayout(handle, layout, target), target.sharding)
    if layout is not None:
        raise ArgumentError("a key array has no layout: give the sharding alone")
    numbers = buffers[0]
    there = number_places(target, numbers.shape[len(target.shape) :])
    aval = make_aval(there.shape, numbers.dtype, there.twin)
    return keys_over(assemble(aval, there.twin, buffers), keys)


def make_array_from_single_device_arrays(
    shape: Sequence[int], sharding: Any, arrays: Sequence[Any], *, dtype: Any = None
) -> Any:
    """Makes one array of arrays that are on one device each, without copying.

    Args:
        shape: Of the whole array, in elements.
        sharding: Which piece is on which device: of this package or of JAX, or one you wrote.
        arrays: One for each of the sharding's devices in this process, in any order: Arrays,
            arrays or keys of JAX.
        dtype: Of the array; needed only where there are no arrays.

    Returns:
        An `Array` that shares their buffers, committed; a key array of JAX if they are keys.

    Raises:
        PlacementError: Devices that are missing, surplus or given twice, or an array with another
            dtype, shape or memory, each by its number and device.
        ArgumentError: Something that is no array on one device.
        DeletedError: A deleted array.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import SingleDeviceSharding, device_put
        >>> from xlashard import make_array_from_single_device_arrays
        >>> device = jax.devices()[0]
        >>> piece = device_put(np.zeros((4, 2), np.float32), device)
        >>> make_array_from_single_device_arrays(
        ...     (4, 2), SingleDeviceSharding(device), [piece]
        ... ).shape
        (4, 2)
    """
    there, layout = as_sharding(sharding, "sharding")
    if layout is not None:
        raise ArgumentError("the arrays have their layouts already: give the sharding alone")
    target = places(as_shape(shape), there)
    if not isinstance(arrays, Sequence):
        raise ArgumentError(f"arrays must be a list of arrays, not {type(arrays).__name__}")
    expected = None if dtype is None else _canonical(dtype)
    for number, array in enumerate(arrays):
        _check_single(number, array)
    by_device = _by_device(arrays, target)
    for number, array in enumerate(arrays):
        expected = array.dtype if expected is None else expected
        _check_fits(number, array, target, expected)
    if expected is None:
        raise ArgumentError(
            "there are no arrays to tell the dtype: write "
            "make_array_from_single_device_arrays(shape, sharding, [], dtype=...)"
        )
    ordered = [by_device[device] for device in target.devices]
    keys = ordered[0] if ordered and is_key_array(ordered[0]) else None
    handles = [key_handle(x) if keys is not None else x for x in ordered]
    handles = [x.to_jax() if isinstance(x, Array) else x for x in handles]
    return _finished(handles, expected, target, None, keys)


def _check_single(number: int, array: Any) -> None:
    name = f"arrays[{number}]"
    if isinstance(array, Tracer):
        raise ArgumentError(f"{name} is traced: only arrays with known values have buffers")
    if not isinstance(array, jax.Array):
        raise ArgumentError(
            f"{name} is {type(array).__name__}, not an array on a device: write "
            "device_put(value, device)"
        )
    try:
        check_alive(key_handle(array) if is_key_array(array) else array)
    except DeletedError as error:
        raise DeletedError(f"{name}: {error}") from None
    count = array.sharding.num_devices
    if count != 1:
        raise ArgumentError(
            f"{name} is on {count} devices, but must be on one: give "
            "[shard.data for shard in x.addressable_shards]"
        )


def _by_device(arrays: Sequence[Any], target: Places) -> dict[Device, Any]:
    """Checks that the arrays are on exactly this process's devices of the sharding."""
    numbers: dict[Device, int] = {}
    for number, array in enumerate(arrays):
        (device,) = array.sharding.device_set
        if device in numbers:
            raise PlacementError(
                f"arrays[{numbers[device]}] and arrays[{number}] are both on {device}; give one "
                "array per device"
            )
        numbers[device] = number
    wanted = target.devices
    missing = [device for device in wanted if device not in numbers]
    surplus = [device for device in numbers if device not in set(wanted)]
    if missing or surplus:
        parts = [f"{len(arrays)} arrays for {len(wanted)} addressable devices of the sharding"]
        if missing:
            parts.append(f"none is on {_listed(missing)}")
        if surplus:
            parts.append(
                f"not in the sharding: {', '.join(f'{d} (arrays[{numbers[d]}])' for d in surplus)}"
            )
        raise PlacementError("; ".join(parts))
    return {device: arrays[number] for device, number in numbers.items()}


def _listed(devices: list[Device]) -> str:
    return ", ".join(map(str, devices))


def _check_fits(number: int, array: Any, target: Places, dtype: Any) -> None:
    (device,) = array.sharding.device_set
    name = f"arrays[{number}] on {device}"
    if array.dtype != dtype:
        raise PlacementError(f"{name} is {array.dtype.name}, but the array is {dtype.name}")
    if tuple(array.shape) != target.shard_shape:
        raise PlacementError(
            f"{name} has shape {tuple(array.shape)}, but an array of shape {target.shape} has "
            f"pieces of shape {target.shard_shape} under {target.sharding}"
        )
    if is_key_array(array):
        return
    kind = memory_kind_of(from_jax(array.sharding))
    if kind != target.memory_kind:
        raise PlacementError(
            f"{name} is in its memory {kind!r}, but the sharding says {target.memory_kind!r}: "
            f"write sharding.with_memory_kind({kind!r})"
        )
