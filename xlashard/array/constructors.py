"""`make_array_from_callback`: arrays whose tiles a function returns."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.runtime.global_state import (
    Transfer,
    active_guards,
    allow_transfers,
    guarded,
)
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard._jax.runtime.transfer import Handle, HandleType, Tracer, aval_of, split
from xlashard.array.core.array import Array, wrap
from xlashard.array.core.base import check_alive
from xlashard.array.core.handles import (
    is_key_array,
    is_key_dtype,
    key_handle,
    keys_over,
    resolve_key_data,
)
from xlashard.array.core.shard import index_text
from xlashard.array.placement.put import (
    as_out_of_memory_error,
    gather_pieces,
    host_value,
    memory_required,
    stage_piece,
)
from xlashard.array.placement.read import read_value
from xlashard.array.placement.target import (
    ResolvedSharding,
    check_reduced_sharding,
    parse_shape,
    parse_sharding,
    resolve_sharding,
)
from xlashard.array.reshard.execute import relayout, reshard
from xlashard.errors import ArgumentError, DeletedError, PlacementError
from xlashard.sharding import SingleDeviceSharding, from_jax


class PieceInput(NamedTuple):
    """A value that is put on one device as a tile.

    Attributes:
        value: A NumPy array or a single-device handle; for keys their data.
        weak_type: Whether its dtype is weak.
        keys: The key array, if the value is one.
    """

    value: Any
    weak_type: bool
    keys: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value; for keys that of the key array."""
        return tuple((self.value if self.keys is None else self.keys).shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the value; for keys that of the key array."""
        return (self.value if self.keys is None else self.keys).dtype


def as_piece_input(x: Any, name: Callable[[], str], instead: str) -> PieceInput:
    """Read a value; a sharded array is moved to its first device.

    Args:
        x: A NumPy array, a number, an Array, an array or keys of JAX.
        name: Returns the name of the value in errors.
        instead: Advice for a traced value.

    Raises:
        ArgumentError: The value is of another type, or traced.
        DeletedError: The value is deleted.
    """
    if isinstance(x, Tracer):
        raise ArgumentError(
            f"{name()} is traced, but only concrete values can be put on single devices: {instead}"
        )
    if isinstance(x, np.ndarray):
        return PieceInput(*host_value(x, name))
    if is_key_array(x):
        return PieceInput(_on_one_device(key_handle(x)), False, x)
    if not isinstance(x, Array | HandleType):
        return PieceInput(*host_value(x, name))
    try:
        check_alive(x)
    except DeletedError as error:
        raise DeletedError(f"{name()}: {error}") from None
    handle: Handle = x._handle if isinstance(x, Array) else x
    return PieceInput(_on_one_device(handle), handle.weak_type)


def _on_one_device(handle: Handle) -> Any:
    if not handle.is_fully_addressable:
        # Must be wholly in this process: the others may not read the value, and take no part.
        whole = handle.is_fully_replicated and split(handle)
        return whole[0] if whole else read_value(Array.from_jax(handle))
    if handle.sharding.num_devices == 1:
        return handle
    device = from_jax(handle.sharding).devices[0]
    return reshard(handle, resolve_sharding(handle.shape, SingleDeviceSharding(device)))


def make_array_from_callback(
    shape: Sequence[int],
    sharding: Any,
    data_callback: Callable[[tuple[slice, ...]], Any],
    dtype: Any = None,
) -> Array:
    """Create an array from a function that returns its tiles, for the devices of this process.

    Each tile is transferred before the next is requested, so that the host holds one at a time, and
    the function may reuse one buffer.

    Args:
        shape: Shape of the whole array, in elements.
        sharding: A sharding of this package, of JAX or of a class of your own, or a `Format(layout,
            sharding)`.
        data_callback: Takes an index of the whole array (one slice per dimension) and returns the
            tile: a NumPy array, a number, an array or keys of JAX. It is called once per distinct
            index, however many devices hold the tile.
        dtype: Dtype of the array; by default that of the first tile.

    Returns:
        A committed `Array`; a key array of JAX if the tiles are keys.

    Raises:
        PlacementError: A tile has another shape or dtype (with its index), or the shape is invalid.
        ArgumentError: No device can hold a tile, a tile is traced, or there is no sharding.
        OutOfMemoryError: The memory does not suffice.
        TransferGuardError: A transfer guard of JAX forbids it; as in JAX, tiles are implicit
            transfers.

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
        there, layout = parse_sharding(sharding, "sharding")
        target = resolve_sharding(parse_shape(shape), there)
        check_reduced_sharding(there, "make_array_from_callback")
        dtype = None if dtype is None else canonical_dtype(dtype)
        return array_of_pieces(target, target.holders, data_callback, dtype, layout)


def array_of_pieces(
    target: ResolvedSharding,
    groups: Sequence[list[int]],
    data_callback: Callable[[tuple[slice, ...]], Any],
    dtype: Any = None,
    layout: Layout | None = None,
) -> Any:
    """Create an array from a function that returns its tiles, in a given order.

    Args:
        target: The sharding.
        groups: Groups of devices of this process; the function is called once per group.
        data_callback: Takes an index of the whole array and returns the tile.
        dtype: Dtype of the array; by default that of the first tile.
        layout: Layout of the array; None for the default.
    """
    expected, keys = dtype, None
    indices = target.indices
    buffers: dict[int, Any] = {}
    for numbers in groups:
        index = indices[numbers[0]]
        value = _called(data_callback, index)
        piece = _read_piece(value, index, target.shard_shape, expected)
        expected, keys = piece.dtype, piece.keys
        with _crossing(piece, index, [target.devices[number] for number in numbers]):
            buffers |= _staged(piece.value, target, numbers)
    if expected is None:
        raise ArgumentError(  # no-catalogue: needs several processes
            "no device of the sharding is in this process, so that the dtype is unknown: write "
            "make_array_from_callback(shape, sharding, data_callback, dtype=...)"
        )
    ordered = [buffers[number] for number in range(len(target.positions))]
    with allow_transfers():
        return finished(ordered, expected, target, layout, keys)


def _called(data_callback: Callable[[tuple[slice, ...]], Any], index: tuple[slice, ...]) -> Any:
    if not callable(data_callback):
        raise ArgumentError(
            "data_callback must be a function from an index to the data at it, not "
            f"{type(data_callback).__name__}: write lambda index: whole[index]"
        )
    try:
        return data_callback(index)
    except Exception as error:
        error.add_note(f"{_name(index)} is missing: data_callback raised this error")
        raise


def _staged(value: Any, target: ResolvedSharding, numbers: list[int]) -> dict[int, Any]:
    try:
        return stage_piece(value, target, numbers)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        scarce = as_out_of_memory_error(error, [memory_required(target, value.dtype)])
        if scarce is None:
            raise
    raise scarce  # no-catalogue: needs a process with little memory


def canonical_dtype(dtype: Any) -> Any:
    """Return the dtype on devices of a requested dtype.

    Raises:
        ArgumentError: No device has the dtype.
    """
    try:
        if is_key_dtype(dtype):
            return dtype
        canonical = jax.dtypes.canonicalize_dtype(dtype)
        aval_of(np.empty(0, canonical))
        return canonical
    except TypeError:
        raise ArgumentError(
            f"dtype {dtype!r} is unsupported by devices: expected one such as 'float32' or 'int32'"
        ) from None


def _read_piece(value: Any, index: Any, shape: tuple[int, ...], dtype: Any) -> PieceInput:
    """Check shape and dtype of one tile."""
    piece = as_piece_input(value, lambda: _name(index), _OUTSIDE)
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


def _crossing(piece: PieceInput, index: Any, devices: list[Device]) -> AbstractContextManager[None]:
    """Return the context of a tile's transfer, if transfer guards allow it."""
    guards = active_guards()
    if guards is None:
        return nullcontext()
    way = Transfer.HOST_TO_DEVICE
    if not isinstance(piece.value, np.ndarray):
        if piece.value.devices() == set(devices):
            return allow_transfers()
        way = Transfer.DEVICE_TO_DEVICE
    return guarded(guards, way, _name(index), "device_put(whole, sharding)")


def finished(
    buffers: list[Any], dtype: Any, target: ResolvedSharding, layout: Layout | None, keys: Any
) -> Any:
    """Return an array over buffers that are on their devices.

    Args:
        buffers: One per device of this process, in order.
        dtype: Dtype of the array.
        target: The sharding.
        layout: Layout of the array; None for the default.
        keys: A key array of the same kind, if the buffers are key data.

    Raises:
        ArgumentError: A layout for keys.
    """
    if keys is not None:
        target = resolve_key_data(target, buffers[0].shape[len(target.shape) :])
        dtype = buffers[0].dtype
    return array_over(gather_pieces(buffers, dtype, target), target, layout, keys)


def array_over(handle: Handle, target: ResolvedSharding, layout: Layout | None, keys: Any) -> Any:
    """Return an array over a handle in a layout, or a key array of the kind of another one.

    Raises:
        ArgumentError: A layout for keys.
    """
    if keys is None:
        return wrap(relayout(handle, layout, target), target.sharding)
    if layout is not None:
        raise ArgumentError("a key array has no layout: give the sharding alone")
    return keys_over(handle, keys)
