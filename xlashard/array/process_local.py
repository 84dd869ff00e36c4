"""`make_array_from_process_local_data`: arrays of which every process has a part."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.runtime.global_state import Transfer, active_guards, guarded
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard._jax.runtime.transfer import put, separate
from xlashard.array.constructors import array_over
from xlashard.array.core.handles import is_key_array, key_handle, resolve_key_data
from xlashard.array.placement.put import host_value, put_value
from xlashard.array.placement.target import (
    at_path,
    broadcast_prefix,
    check_reduced_sharding,
    is_target,
    leaf_path,
    parse_shape,
    parse_sharding,
    resolve_requested,
)
from xlashard.errors import (
    PlacementError,
    XlashardError,
    counted,
)
from xlashard.geometry import Tiling
from xlashard.sharding import Sharding, SingleDeviceSharding, XLACompatibleSharding


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
        local_data: NumPy arrays, keys of JAX, or a pytree of them.
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
        leaves, treedef = jax.tree.flatten(local_data)
        entries = broadcast_prefix(sharding, local_data, is_target, "sharding", "local_data")
        shapes = broadcast_prefix(global_shape, local_data, _is_shape, "global_shape", "local_data")
        out = []
        guards = active_guards()
        for number, (leaf, entry, shape) in enumerate(zip(leaves, entries, shapes, strict=True)):
            try:
                if isinstance(entry, jax.Device):
                    entry = SingleDeviceSharding(entry)
                there = parse_sharding(entry, "sharding")
                with guarded(guards, Transfer.HOST_TO_DEVICE, f"the {type(leaf).__name__}"):
                    out.append(_from_local(*there, leaf, shape))
            except XlashardError as error:
                raise at_path(error, leaf_path(local_data, number, "local_data")) from None
        return treedef.unflatten(out)


def _is_shape(x: Any) -> bool:
    return x is None or (
        isinstance(x, tuple | list) and all(n is None or isinstance(n, int | np.integer) for n in x)
    )


def _from_local(sharding: Sharding, layout: Layout | None, data: Any, global_shape: Any) -> Any:
    check_reduced_sharding(sharding, "make_array_from_process_local_data")
    keys = data if is_key_array(data) else None
    if keys is None:
        value, _ = host_value(data, lambda: "it")
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
    mine = _distinct_per_dim(tiling, sharding.addressable_positions)
    if any(share != mine for share in shares):
        raise PlacementError(  # no-catalogue: needs several processes
            f"this process holds {mine} distinct tiles per dimension and others hold "
            f"{sorted(set(shares) - {mine})[0]}, so that the local data do not determine the "
            "global shape: give global_shape=(...)"
        )
    for dim, (size, held) in enumerate(zip(local, mine, strict=True)):
        if size % held:
            raise PlacementError(  # no-catalogue: needs several processes
                f"dimension {dim} of local data of shape {local} has {size} elements, but this "
                f"process holds {held} tiles of it: accepted are multiples of {held}, for example "
                f"{-(-size // held) * held}"
            )
    return tuple(
        size // held * count for size, held, count in zip(local, mine, tiling.counts, strict=True)
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
            mine = extent * len(distinct)
            share = f" or {mine} (this process's {len(distinct)} tiles of {extent})"
            raise PlacementError(
                f"dimension {dim} of local data of shape {local} has {size} elements; accepted: "
                f"{whole} (the whole of {shape}){share if mine != whole else ''}"
            )
        columns.append([slice(start, start + extent) for start in starts.tolist()])
    return list(zip(*columns, strict=True))
