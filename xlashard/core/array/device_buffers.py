"""Arrays over buffers that are on their devices, without copies."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from xlashard._jax.runtime.dispatch import ARRAY_TYPES
from xlashard._jax.runtime.shardings import Device, default_memory_kind
from xlashard._jax.runtime.transfer import Handle, HandleType, Tracer, split
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.base import ArrayBase, check_alive_as, handle_of
from xlashard.core.array.array_class.deletion import list_arrays_with_shard, record_shards
from xlashard.core.array.array_class.handles import canonical_dtype, key_handle
from xlashard.core.array.constructors import finished
from xlashard.core.array.placement.put import gather_pieces
from xlashard.core.array.placement.target import (
    ResolvedSharding,
    parse_shape,
    parse_sharding,
    resolve_sharding,
)
from xlashard.core.array.reshard.execute import unify_layouts
from xlashard.errors import ArgumentError, PlacementError
from xlashard.support.tracebacks import short_tracebacks


def make_array_from_single_device_arrays(
    shape: Sequence[int], sharding: Any, arrays: Sequence[Any], *, dtype: Any = None
) -> Array:
    """Create an array from single-device arrays, without copying.

    Args:
        shape: Shape of the whole array, in elements.
        sharding: A sharding of this package, of JAX or of a class of your own.
        arrays: One per device of the sharding in this process, in any order: Arrays, arrays or keys
            of JAX. If all lack the dimensions that a `PmapSharding` unstacks, they are copied into
            shards that have them.
        dtype: Dtype of the array; needed only without arrays.

    Returns:
        A committed `Array` that shares their buffers; a key array of JAX if they are keys.

    Raises:
        PlacementError: A device is missing, surplus or repeated, or an array has another dtype,
            shape or memory; with its number and device.
        ArgumentError: A value is no array on one device.
        DeletedError: An array is deleted.

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
        parsed, layout = parse_sharding(sharding, "sharding")
        if layout is not None:
            raise ArgumentError("the arrays have their layouts already: give the sharding alone")
        target = resolve_sharding(parse_shape(shape), parsed)
        dtype = None if dtype is None else canonical_dtype(dtype)
        arrays = target.sharding._complete_pieces(arrays, target.shard_shape)
        handles = _match_handles(arrays, target, dtype)
        if handles is not None:
            return _join(handles, arrays, target)
        return assemble_arrays(read_buffers(arrays, _HERE), target, dtype, _HERE)


def _match_handles(arrays: Any, target: ResolvedSharding, dtype: Any) -> list[Handle] | None:
    """Return the handles of arrays in the order of the devices, if they are all valid.

    Keys, and whatever is invalid, are left to `assemble_arrays`, whose checks take three times as
    long: None.
    """
    if not isinstance(arrays, list | tuple) or len(arrays) != len(target.devices) or not arrays:
        return None
    by_device: dict[Device, Handle] = {}
    shape, kind, known = target.shard_shape, target.memory_kind, None
    for array in arrays:
        # Not isinstance: JAX's metaclass makes it take ten times as long.
        if type(array) in ARRAY_TYPES:
            array._exclusive = False  # as reading `_handle` does, written out
            handle = array._buffers
        elif type(array) is HandleType:
            handle = array
        else:
            return None
        aval, sharding = handle.aval, handle.sharding
        if aval is not known:  # the shards of an array have one in common
            known, dtype = aval, aval.dtype if dtype is None else dtype
            if aval.shape != shape or aval.dtype != dtype:
                return None
        if handle.is_deleted() or sharding.memory_kind != kind:
            return None
        devices = sharding._device_assignment
        if len(devices) != 1:
            return None
        by_device[devices[0]] = handle
    try:
        return [by_device[device] for device in target.devices]
    except KeyError:
        return None


def _are_shards(handles: Sequence[Handle], whole: Array) -> bool:
    """Return True if handles are all shards of an Array in their order."""
    parts = split(whole._buffers)
    return len(parts) == len(handles) and all(map(operator.is_, parts, handles))


def _join(handles: list[Handle], arrays: Sequence[Any], target: ResolvedSharding) -> Array:
    """Return the array over checked handles of arrays, and record that they are its shards."""
    pieces = handles
    if not any([_are_shards(handles, whole) for whole in list_arrays_with_shard(handles[0])]):
        pieces = unify_layouts(handles)  # those of one array have one, which takes 1 µs to read
    out = wrap(gather_pieces(pieces, handles[0].dtype, target), target.sharding)
    if len(handles) > 1:
        record_shards(handles, out)
        if not all([type(x) is not HandleType and x._exposed is None for x in arrays]):
            out._expose()  # code outside of this package can delete one of the buffers
    return out


class Caller(NamedTuple):
    """The function and argument that errors name.

    Attributes:
        function: Name of the function.
        argument: Name of the argument.
    """

    function: str
    argument: str

    def name(self, number: int) -> str:
        """Return the expression of one of the arrays."""
        return f"{self.argument}[{number}]"


_HERE = Caller("make_array_from_single_device_arrays", "arrays")


class DeviceBuffer(NamedTuple):
    """One of the given arrays.

    Attributes:
        caller: The function and argument that errors name.
        number: Its number among them.
        array: The array.
        handle: Its buffer; for keys that of their data.
        device: Its device.
        is_key: Whether it is a key array.
    """

    caller: Caller
    number: int
    array: Any
    handle: Handle
    device: Device
    is_key: bool

    @property
    def name(self) -> str:
        """Its expression."""
        return self.caller.name(self.number)


def read_buffers(arrays: Any, caller: Caller) -> list[DeviceBuffer]:
    """Check that values are arrays on one device each, and alive.

    Raises:
        ArgumentError: A value is of another type.
        DeletedError: An array is deleted.
    """
    if not isinstance(arrays, Sequence):
        raise ArgumentError(
            f"{caller.argument} must be a list of arrays, not {type(arrays).__name__}: for one "
            "write [array]"
        )
    return [_read_buffer(caller, number, array) for number, array in enumerate(arrays)]


def assemble_arrays(
    singles: Sequence[DeviceBuffer], target: ResolvedSharding, dtype: Any, caller: Caller
) -> Any:
    """Return one array over arrays that are on its devices.

    Args:
        singles: The arrays, in any order.
        target: The sharding.
        dtype: Dtype of the array; by default that of the first.
        caller: The function and argument that errors name.

    Raises:
        PlacementError: The arrays are on other devices, or do not fit the sharding or one another.
        ArgumentError: Neither arrays nor a dtype are given.
    """
    by_device = _by_device(singles, target)
    dtype = singles[0].array.dtype if dtype is None and singles else dtype
    _check_fits(singles, target, dtype)
    if dtype is None:
        raise ArgumentError(  # no-catalogue: needs several processes
            f"the dtype is unknown without arrays: write {_HERE.function}(shape, sharding, [], "
            "dtype=...)"
        )
    ordered = [by_device[device] for device in target.devices]
    keys = ordered[0].array if ordered and ordered[0].is_key else None
    handles = [single.handle for single in ordered]
    if ordered and keys is None:
        return _join(handles, [single.array for single in ordered], target)
    return finished(handles, dtype, target, None, keys)


def _read_buffer(caller: Caller, number: int, array: Any) -> DeviceBuffer:
    is_plain = isinstance(array, ArrayBase) or type(array) is HandleType
    handle = handle_of(array) if is_plain else _read_keys(array, caller, number)
    if handle.is_deleted():
        check_alive_as(lambda: caller.name(number), array if is_plain else handle)
    devices = handle.sharding.device_set
    if len(devices) != 1:
        raise ArgumentError(
            f"{caller.name(number)} is on {len(devices)} devices, but must be on one: give "
            "[shard.data for shard in x.addressable_shards]"
        )
    (device,) = devices
    return DeviceBuffer(caller, number, array, handle, device, not is_plain)


def _read_keys(array: Any, caller: Caller, number: int) -> Handle:
    """Return the handle of a key array's data; other values are refused.

    Raises:
        ArgumentError: The value is no key array.
    """
    if isinstance(array, Tracer):
        raise ArgumentError(
            f"{caller.name(number)} is traced, and only arrays with known values have buffers: "
            f"call {caller.function} outside of jit, grad and vmap"
        )
    if not isinstance(array, jax.Array):
        raise ArgumentError(
            f"{caller.name(number)} is {type(array).__name__}, not an array on a device: write "
            "device_put(value, device)"
        )
    return key_handle(array)


def _by_device(
    singles: Sequence[DeviceBuffer], target: ResolvedSharding
) -> dict[Device, DeviceBuffer]:
    """Check that the arrays are on exactly the devices of this process in the sharding."""
    by_device: dict[Device, DeviceBuffer] = {}
    for single in singles:
        if single.device in by_device:
            raise PlacementError(
                f"{by_device[single.device].name} and {single.name} are both on {single.device}; "
                "give one array per device"
            )
        by_device[single.device] = single
    devices = target.devices
    if by_device.keys() != set(devices):
        missing = [device for device in devices if device not in by_device]
        surplus = [device for device in by_device if device not in devices]
        parts = [f"{len(singles)} arrays for {len(devices)} addressable devices of the sharding"]
        if missing:
            listed = ", ".join(map(str, missing))
            parts.append(f"none is on {listed}: add device_put(piece, device)")
        if surplus:
            listed = ", ".join(f"{device} ({by_device[device].name})" for device in surplus)
            parts.append(f"not in the sharding: {listed}")
        raise PlacementError("; ".join(parts))
    return by_device


def _check_fits(singles: Sequence[DeviceBuffer], target: ResolvedSharding, dtype: Any) -> None:
    """Check that arrays have the dtype, the shape and the memory of the pieces of an array.

    Raises:
        PlacementError: An array has another.
    """
    shard_shape, memory_kind = target.shard_shape, target.memory_kind
    for single in singles:
        handle = single.array if single.is_key else single.handle
        if handle.dtype != dtype or handle.shape != shard_shape:
            raise _misfit_error(single, target, dtype)
        kind = single.handle.sharding.memory_kind or default_memory_kind(single.device)
        if kind != memory_kind:
            raise PlacementError(
                f"{single.name} on {single.device} is in its memory {kind!r}, but the sharding has "
                f"{memory_kind!r}: write sharding.with_memory_kind({kind!r})"
            )


def _misfit_error(single: DeviceBuffer, target: ResolvedSharding, dtype: Any) -> PlacementError:
    own = single.array.dtype
    if own != dtype:
        return PlacementError(
            f"{single.name} on {single.device} is {own.name}, but the array is {dtype.name}: "
            f"give it by .astype({dtype.name!r})"
        )
    return PlacementError(
        f"{single.name} on {single.device} has shape {single.array.shape}, but an array of shape "
        f"{target.shape} has pieces of shape {target.shard_shape} under {target.sharding}"
    )
