"""Arrays from a callback, and from arrays that are on their devices already."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.shardings import Device, default_memory_kind
from xlashard._jax.tracebacks import short_tracebacks
from xlashard._jax.transfer import Handle, Tracer, aval_of
from xlashard.array.array import Array
from xlashard.array.given import Given, as_given
from xlashard.array.guards import Way, free_transfers, guarded, guards_in_force
from xlashard.array.holder import check_alive
from xlashard.array.host_put import gather_pieces, stage_piece
from xlashard.array.keys import is_key_dtype, key_handle, keys_over, number_places
from xlashard.array.moving import placed
from xlashard.array.placement import (
    Places,
    as_shape,
    as_sharding,
    places,
)
from xlashard.array.reshard import relayout
from xlashard.array.scarcity import needed_by, out_of_memory
from xlashard.array.text import index_text
from xlashard.errors import ArgumentError, DeletedError, PlacementError


def make_array_from_callback(
    shape: Sequence[int],
    sharding: Any,
    data_callback: Callable[[tuple[slice, ...]], Any],
    dtype: Any = None,
) -> Array:
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
        OutOfMemoryError: The memory does not suffice.
        TransferGuardError: JAX's transfer guards forbid it: to them, as in JAX, a piece is not
            moved explicitly.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, make_array_from_callback
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> whole = np.arange(6, dtype=np.int32).reshape(2, 3)
        >>> make_array_from_callback((2, 3), NamedSharding(mesh, P("data")), lambda i: whole[i])
        Array([[0, 1, 2],
               [3, 4, 5]], dtype=int32)
    """
    with short_tracebacks:
        there, layout = as_sharding(sharding, "sharding")
        target = places(as_shape(shape), there)
        expected = None if dtype is None else _canonical(dtype)
        holders: dict[int, list[int]] = {}
        for number, tile in enumerate(target.tiles):
            holders.setdefault(tile, []).append(number)
        indices = target.indices
        buffers: dict[int, Any] = {}
        keys = None
        for numbers in holders.values():
            index = indices[numbers[0]]
            given = _called(data_callback, index)
            piece = _read_piece(given, index, target.shard_shape, expected)
            expected, keys = piece.dtype, piece.keys
            with _crossing(piece, index, [target.devices[number] for number in numbers]):
                buffers |= _staged(piece.value, target, numbers)
        if expected is None:
            raise ArgumentError(
                "none of the sharding's devices is in this process, so nothing tells the dtype: "
                "write make_array_from_callback(shape, sharding, data_callback, dtype=...)"
            )
        ordered = [buffers[number] for number in range(len(target.positions))]
        with free_transfers():
            return _finished(ordered, expected, target, layout, keys)


def _called(data_callback: Callable[[tuple[slice, ...]], Any], index: tuple[slice, ...]) -> Any:
    if not callable(data_callback):
        raise ArgumentError(
            f"data_callback must be a function from an index to the piece there, not "
            f"{type(data_callback).__name__}: write lambda index: whole[index]"
        )
    try:
        return data_callback(index)
    except Exception as error:
        error.add_note(f"{_name(index)} was never made: data_callback raised this")
        raise


def _staged(value: Any, target: Places, numbers: list[int]) -> dict[int, Any]:
    try:
        return stage_piece(value, target, numbers)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        scarce = out_of_memory(error, [needed_by(target, value.dtype)])
        if scarce is None:
            raise
    raise scarce


def _canonical(dtype: Any) -> Any:
    try:
        if is_key_dtype(dtype):
            return dtype
        found = jax.dtypes.canonicalize_dtype(dtype)
        aval_of(np.empty(0, found))
        return found
    except TypeError:
        raise ArgumentError(
            f"dtype {dtype!r} is none that a device can hold: give one such as 'float32' or 'int32'"
        ) from None


def _read_piece(given: Any, index: Any, shape: tuple[int, ...], dtype: Any) -> Given:
    """Checks one piece against the shape and dtype that it must have."""
    piece = as_given(given, lambda: _name(index), _OUTSIDE)
    if piece.shape != shape:
        raise PlacementError(
            f"{_name(index)} has shape {piece.shape}, but the pieces of this array have shape "
            f"{shape}: return the part at that index, such as whole[index]"
        )
    if dtype is None or piece.dtype == dtype:
        return piece
    if not (piece.weak_type and isinstance(piece.value, np.ndarray)) or is_key_dtype(dtype):
        raise PlacementError(
            f"{_name(index)} is {piece.dtype.name}, but the array is {dtype.name}: let every piece "
            f"have one dtype, for example by .astype({dtype.name!r})"
        )
    return piece._replace(value=piece.value.astype(dtype))


_OUTSIDE = (
    "call make_array_from_callback outside of jit, grad and vmap, or use jnp operations there"
)


def _name(index: Any) -> str:
    return f"data_callback's piece for index {index_text(index)}"


def _crossing(piece: Given, index: Any, devices: list[Device]) -> AbstractContextManager[None]:
    """The block in which a piece goes to its devices, if the transfer guards let it."""
    guards = guards_in_force()
    if guards is None:
        return nullcontext()
    way = Way.HOST_TO_DEVICE
    if not isinstance(piece.value, np.ndarray):
        if piece.value.devices() == set(devices):
            return free_transfers()
        way = Way.DEVICE_TO_DEVICE
    return guarded(guards, way, _name(index), "device_put(whole, sharding)")


def _finished(
    buffers: list[Any], dtype: Any, target: Places, layout: Layout | None, keys: Any
) -> Any:
    """One array over buffers that are where they belong."""
    if keys is None:
        handle = gather_pieces(buffers, dtype, target)
        return placed(relayout(handle, layout, target), target.sharding)
    if layout is not None:
        raise ArgumentError("a key array has no layout: give the sharding alone")
    numbers = buffers[0]
    there = number_places(target, numbers.shape[len(target.shape) :])
    return keys_over(gather_pieces(buffers, numbers.dtype, there), keys)


def make_array_from_single_device_arrays(
    shape: Sequence[int], sharding: Any, arrays: Sequence[Any], *, dtype: Any = None
) -> Array:
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
    with short_tracebacks:
        there, layout = as_sharding(sharding, "sharding")
        if layout is not None:
            raise ArgumentError("the arrays have their layouts already: give the sharding alone")
        target = places(as_shape(shape), there)
        if not isinstance(arrays, Sequence):
            raise ArgumentError(
                f"arrays must be a list of arrays, not {type(arrays).__name__}: for one write "
                "[array]"
            )
        expected = None if dtype is None else _canonical(dtype)
        singles = [_as_single(number, array) for number, array in enumerate(arrays)]
        by_device = _by_device(singles, target)
        for number, single in enumerate(singles):
            expected = single.array.dtype if expected is None else expected
            _check_fits(number, single, target, expected)
        if expected is None:
            raise ArgumentError(
                "there are no arrays to tell the dtype: write "
                "make_array_from_single_device_arrays(shape, sharding, [], dtype=...)"
            )
        ordered = [by_device[device] for device in target.devices]
        keys = ordered[0].array if ordered and ordered[0].is_key else None
        return _finished([single.handle for single in ordered], expected, target, None, keys)


class _Single(NamedTuple):
    """One of the arrays given.

    Attributes:
        array: As it was given.
        handle: Its buffer; for keys that of their numbers.
        device: The device that it is on.
        is_key: Whether it is keys.
    """

    array: Any
    handle: Handle
    device: Device
    is_key: bool


def _as_single(number: int, array: Any) -> _Single:
    """Checks that a value is an array on one device, and alive."""
    name = f"arrays[{number}]"
    if isinstance(array, Tracer):
        raise ArgumentError(
            f"{name} is traced, and only arrays with known values have buffers: call "
            "make_array_from_single_device_arrays outside of jit, grad and vmap"
        )
    if not isinstance(array, jax.Array):
        raise ArgumentError(
            f"{name} is {type(array).__name__}, not an array on a device: write "
            "device_put(value, device)"
        )
    is_key = is_key_dtype(array.dtype)
    handle = key_handle(array) if is_key else array
    handle = handle.to_jax() if isinstance(handle, Array) else handle
    if handle.is_deleted():
        try:
            check_alive(handle if is_key else array)
        except DeletedError as error:
            raise DeletedError(f"{name}: {error}") from None
    devices = handle.sharding.device_set
    if len(devices) != 1:
        raise ArgumentError(
            f"{name} is on {len(devices)} devices, but must be on one: give "
            "[shard.data for shard in x.addressable_shards]"
        )
    (device,) = devices
    return _Single(array, handle, device, is_key)


def _by_device(singles: Sequence[_Single], target: Places) -> dict[Device, _Single]:
    """Checks that the arrays are on exactly this process's devices of the sharding."""
    numbers: dict[Device, int] = {}
    for number, single in enumerate(singles):
        if single.device in numbers:
            raise PlacementError(
                f"arrays[{numbers[single.device]}] and arrays[{number}] are both on "
                f"{single.device}; give one array per device"
            )
        numbers[single.device] = number
    wanted = target.devices
    missing = [device for device in wanted if device not in numbers]
    surplus = [device for device in numbers if device not in set(wanted)]
    if missing or surplus:
        parts = [f"{len(singles)} arrays for {len(wanted)} addressable devices of the sharding"]
        if missing:
            parts.append(f"none is on {_listed(missing)}: add device_put(piece, device)")
        if surplus:
            parts.append(
                f"not in the sharding: {', '.join(f'{d} (arrays[{numbers[d]}])' for d in surplus)}"
            )
        raise PlacementError("; ".join(parts))
    return {single.device: single for single in singles}


def _listed(devices: list[Device]) -> str:
    return ", ".join(map(str, devices))


def _check_fits(number: int, single: _Single, target: Places, dtype: Any) -> None:
    found = single.array.dtype
    if found != dtype:
        raise PlacementError(
            f"arrays[{number}] on {single.device} is {found.name}, but the array is {dtype.name}: "
            f"give it by .astype({dtype.name!r})"
        )
    shape = tuple(single.array.shape)
    if shape != target.shard_shape:
        raise PlacementError(
            f"arrays[{number}] on {single.device} has shape {shape}, but an array of shape "
            f"{target.shape} has pieces of shape {target.shard_shape} under {target.sharding}"
        )
    kind = single.handle.sharding.memory_kind or default_memory_kind(single.device)
    if kind != target.memory_kind:
        raise PlacementError(
            f"arrays[{number}] on {single.device} is in its memory {kind!r}, but the sharding says "
            f"{target.memory_kind!r}: write sharding.with_memory_kind({kind!r})"
        )
