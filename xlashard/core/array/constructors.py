"""Arrays whose tiles a function returns, and arrays of which every process has a part."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.runtime.global_state import (
    Transfer,
    active_guards,
    allow_transfers,
    guarded,
)
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import Handle, HandleType, put, separate
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.handles import (
    PieceInput,
    as_piece_input,
    canonical_dtype,
    is_key_array,
    is_key_dtype,
    key_handle,
    keys_over,
    resolve_key_data,
)
from xlashard.core.array.array_class.shard import index_text
from xlashard.core.array.dlpack import from_dlpack
from xlashard.core.array.placement.put import (
    SmallTiles,
    gather_pieces,
    host_value,
    memory_required,
    place_within_memory,
    put_value,
    stage_piece,
)
from xlashard.core.array.placement.target import (
    ResolvedSharding,
    at_path,
    check_layout_rank,
    check_reduced_sharding,
    is_target,
    leaf_path,
    parse_shape,
    parse_sharding,
    resolve_requested,
    resolve_sharding,
)
from xlashard.core.array.placement.tree_prefix import broadcast_prefix
from xlashard.core.array.reshard.execute import relayout, unify_layouts
from xlashard.core.sharding import (
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    from_jax,
)
from xlashard.errors import ArgumentError, PlacementError, XlashardError, counted
from xlashard.geometry import Tiling
from xlashard.support.tracebacks import short_tracebacks


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
        A committed `Array`; a key array of JAX if the tiles are keys. A committed, replicated array
        of the requested sharding, which the function returns for all devices, is the result itself.

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
        parsed, layout = parse_sharding(sharding, "sharding")
        target = resolve_sharding(parse_shape(shape), parsed)
        check_reduced_sharding(parsed, "make_array_from_callback")
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
    small = SmallTiles(target, len(groups))
    for numbers in groups:
        index = indices[numbers[0]]
        value = _called(data_callback, index)
        tile = small.copy(value, expected)
        if tile is not None:
            expected = tile.dtype
            for number in numbers:
                buffers[number] = tile
            continue
        if _is_result(value, target, dtype, layout):
            return value if isinstance(value, Array) else wrap(value)
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
        return place_within_memory(
            lambda: finished(ordered, expected, target, layout, keys),
            lambda: [memory_required(target, expected)],
        )


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


def _is_result(value: Any, target: ResolvedSharding, dtype: Any, layout: Layout | None) -> bool:
    """Return True for a committed, replicated array that equals the requested one."""
    if not target.tiling.is_replicated or not isinstance(value, Array | HandleType):
        return False
    return (
        not value.is_deleted()
        and value.committed
        and not value.weak_type
        and value.shape == target.shape
        and value.dtype == (dtype or value.dtype)
        and from_jax(value.sharding) == target.sharding
        and (layout is None or value.format.layout == layout)
    )


def _staged(value: Any, target: ResolvedSharding, numbers: list[int]) -> dict[int, Any]:
    return place_within_memory(
        lambda: stage_piece(value, target, numbers),
        lambda: [memory_required(target, value.dtype)],
    )


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
        keys: A key array of the same kind; None for other arrays, and without any buffer.

    Raises:
        ArgumentError: A layout for keys.
    """
    if is_key_dtype(dtype):
        # A process without a device of the sharding has no keys, but their dtype.
        keys = jnp.empty((), dtype) if keys is None else keys
        data = jax.eval_shape(key_handle, jax.ShapeDtypeStruct((), dtype))
        target, dtype = resolve_key_data(target, data.shape), data.dtype
    handle = gather_pieces(unify_layouts(buffers), dtype, target)
    return array_over(handle, target, layout, keys)


def array_over(handle: Handle, target: ResolvedSharding, layout: Layout | None, keys: Any) -> Any:
    """Return an array over a handle in a layout, or a key array of the kind of another one.

    Raises:
        ArgumentError: A layout for keys.
        PlacementError: A layout that the array can't have.
    """
    if keys is None:
        check_layout_rank(layout, handle.ndim)
        return wrap(relayout(handle, layout, target), target.sharding)
    if layout is not None:
        raise ArgumentError("a key array has no layout: give the sharding alone")
    return keys_over(handle, keys)


def make_array_from_process_local_data(
    sharding: Any, local_data: Any, global_shape: Any = None
) -> Any:
    """Create an array of which every process provides its own part.

    In each dimension the local data are either whole, or exactly the tiles of this process, side by
    side in the order of the whole array. If several processes hold the same tile, they must provide
    the same data.

    Args:
        sharding: A sharding of this package, of JAX or of a class of your own, a Format, or a
            device; for all of `local_data` or as a pytree prefix of it.
        local_data: NumPy arrays, arrays of other libraries in host memory (of PyTorch or
            TensorFlow), keys of JAX, or a pytree of them.
        global_shape: Shape of the whole array, in elements; for a pytree, a tree of shapes like it.
            By default the local data are the tiles of this process in every dimension.

    Returns:
        `local_data` with a committed `Array` for every value (for keys: a key array of JAX).

    Raises:
        PlacementError: A dimension has an invalid size (with the valid ones and its path), or the
            processes have unequal shares and there is no `global_shape`.
        ArgumentError: No device can hold a value, or there is no sharding.
        TransferGuardError: A transfer guard of JAX forbids it, such as `"disallow_explicit"`.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, make_array_from_process_local_data
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> rows = np.zeros((4, 16), np.float32)
        >>> make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows).shape
        (4, 16)
    """
    with short_tracebacks:
        return make_process_local_arrays(sharding, local_data, global_shape, "local_data")


def make_process_local_arrays(sharding: Any, local_data: Any, global_shape: Any, name: str) -> Any:
    """Create arrays of which every process provides its own part; `name` is that of the data."""
    leaves, treedef = jax.tree.flatten(local_data)
    entries = broadcast_prefix(sharding, local_data, is_target, "sharding", name)
    shapes = broadcast_prefix(global_shape, local_data, is_shape, "global_shape", name)
    out = []
    guards = active_guards()
    for number, (leaf, entry, shape) in enumerate(zip(leaves, entries, shapes, strict=True)):
        try:
            if isinstance(entry, jax.Device):
                entry = SingleDeviceSharding(entry)
            parsed = parse_sharding(entry, "sharding")
            with guarded(guards, Transfer.HOST_TO_DEVICE, f"the {type(leaf).__name__}"):
                out.append(_from_local(*parsed, leaf, shape))
        except XlashardError as error:
            raise at_path(error, leaf_path(local_data, number, name)) from None
    return treedef.unflatten(out)


def to_host_array(x: Any) -> Any:
    """Return a NumPy array over the memory of another library's array, such as PyTorch's.

    Other values are returned as they are.
    """
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return x
    if hasattr(x, "__array__"):
        try:
            return np.asarray(x)
        except TypeError:
            pass  # PyTorch's bfloat16 has no dtype of NumPy, but DLPack's.
    return np.asarray(from_dlpack(x)) if hasattr(x, "__dlpack__") else x


def is_shape(x: Any) -> bool:
    """Return True for the shape of one array, or None."""
    return x is None or (
        isinstance(x, tuple | list) and all(n is None or isinstance(n, int | np.integer) for n in x)
    )


def _from_local(sharding: Sharding, layout: Layout | None, data: Any, global_shape: Any) -> Any:
    check_reduced_sharding(sharding, "make_array_from_process_local_data")
    keys = data if is_key_array(data) else None
    if keys is None:
        value, _ = host_value(to_host_array(data), lambda: "it")
    else:
        value = np.asarray(key_handle(keys))
    local: tuple[int, ...] = value.shape if keys is None else keys.shape
    shape = (
        _inferred_shape(local, sharding)
        if global_shape is None
        else parse_shape(global_shape, "global_shape")
    )
    if len(shape) != len(local):
        raise PlacementError(
            f"local data of shape {local} have {len(local)} dimensions, global_shape {shape} "
            f"has {len(shape)}: give a global_shape of {counted(len(local), 'dimension')}"
        )
    logical = resolve_requested(shape, sharding)
    target = logical if keys is None else resolve_key_data(logical, value.shape[len(local) :])
    if local == shape:
        handle = put_value(value, target)
    else:
        windows = _windows(local, shape, logical.tiling, logical.positions)
        pieces = separate([value[window] for window in windows])
        handle = put(target.aval(value.dtype), target.jax_sharding, pieces, target.devices)
    return array_over(handle, target, layout, keys)


def _inferred_shape(local: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
    """Return the global shape of local data that are exactly the tiles of this process."""
    if sharding.is_fully_addressable:
        return local
    if not isinstance(sharding, XLACompatibleSharding):
        raise PlacementError(  # no-catalogue: needs several processes
            f"a {type(sharding).__name__} depends on the global shape, which local data alone do "
            "not determine: give global_shape=(...)"
        )
    tiling = sharding.rank_tiling(len(local))
    processes = np.array([device.process_index for device in sharding.devices])
    shares = [
        _distinct_per_dim(tiling, np.flatnonzero(processes == process))
        for process in np.unique(processes)
    ]
    counts = _distinct_per_dim(tiling, sharding.addressable_positions)
    if any(share != counts for share in shares):
        raise PlacementError(  # no-catalogue: needs several processes
            f"this process holds {counts} distinct tiles per dimension and others hold "
            f"{sorted(set(shares) - {counts})[0]}, so that the local data do not determine the "
            "global shape: give global_shape=(...)"
        )
    for dim, (size, held) in enumerate(zip(local, counts, strict=True)):
        if size % held:
            raise PlacementError(  # no-catalogue: needs several processes
                f"dimension {dim} of local data of shape {local} has {size} elements, but this "
                f"process holds {held} tiles of it: accepted are multiples of {held}, for example "
                f"{-(-size // held) * held}"
            )
    return tuple(
        size // held * count for size, held, count in zip(local, counts, tiling.counts, strict=True)
    )


def _distinct_per_dim(tiling: Tiling, positions: Any) -> tuple[int, ...]:
    """Return the number of distinct tiles of some devices along each dimension."""
    coordinates = tiling.coordinates(positions)
    return tuple(len(np.unique(coordinates[:, dim])) for dim in range(tiling.ndim))


def _windows(
    local: tuple[int, ...], shape: tuple[int, ...], tiling: Tiling, positions: Sequence[int]
) -> list[tuple[slice, ...]]:
    """Return the slice of the local data for each device.

    Raises:
        PlacementError: A dimension is neither whole nor exactly the tiles of this process.
    """
    coordinates = tiling.coordinates(positions)
    extents = tiling.shard_shape(shape)
    columns = []
    for dim, (size, whole, extent) in enumerate(zip(local, shape, extents, strict=True)):
        held = coordinates[:, dim]
        distinct = np.unique(held)
        if size == whole:
            starts = held * extent
        elif size == extent * len(distinct):
            starts = np.searchsorted(distinct, held) * extent
        else:
            local_size = extent * len(distinct)
            share = f" or {local_size} (this process's {len(distinct)} tiles of {extent})"
            raise PlacementError(
                f"dimension {dim} of local data of shape {local} has {size} elements; accepted: "
                f"{whole} (the whole of {shape}){share if local_size != whole else ''}"
            )
        columns.append([slice(start, start + extent) for start in starts.tolist()])
    return list(zip(*columns, strict=True))
