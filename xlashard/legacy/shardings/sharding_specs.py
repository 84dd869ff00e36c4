"""Placements by `ShardingSpec`, and arrays over them, as `jax.interpreters.pxla` had them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import jax
import numpy as np

import xlashard
from xlashard.errors import DivisibilityError, TilingError, counted
from xlashard.geometry import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)
from xlashard.geometry.sharding_spec import spec_over_one_dim
from xlashard.legacy.modes.array_mode import as_jax_arrays


def mesh_sharding_specs(
    axis_sizes: Mapping[str, int], axis_names: Sequence[str], allow_uneven_axes: bool = False
) -> Callable[[Any, Mapping[str, int]], ShardingSpec]:
    """A function that says a placement on a mesh as a `ShardingSpec`.

    Args:
        axis_sizes: The sizes of the mesh's axes.
        axis_names: Their names, in the order of the mesh's dimensions.
        allow_uneven_axes: Whether a dimension may leave its last tiles smaller.

    Returns:
        A function of an array's type and a mapping from mesh axes to the dimensions that they cut.
        It raises a DivisibilityError if a dimension does not divide.

    Example:
        >>> to_spec = mesh_sharding_specs({"x": 2, "y": 4}, ("x", "y"))
        >>> to_spec(jax.ShapeDtypeStruct((8, 8), "float32"), {"y": 0})
        ShardingSpec((Chunked((4,)), NoSharding()), (Replicated(2), ShardedAxis(0)))
    """

    def to_spec(aval: Any, aval_axes: Mapping[str, int]) -> ShardingSpec:
        shape = tuple(aval.shape)
        by_dim = [
            [axis for axis, at in aval_axes.items() if at == dim] for dim in range(len(shape))
        ]
        for dim, axes in enumerate(by_dim):
            tiles = math.prod(axis_sizes[axis] for axis in axes)
            if not allow_uneven_axes and shape[dim] % tiles:
                raise DivisibilityError(
                    f"dimension {dim} of shape {shape} does not divide into {tiles} tiles, as the "
                    f"axes {axes} of the mesh would have it: give another size, or "
                    "allow_uneven_axes=True",
                    dim=dim,
                    tiles=tiles,
                    shape=shape,
                )
        cuts = {axis: number for number, axis in enumerate(a for axes in by_dim for a in axes)}
        return ShardingSpec(
            tuple(
                Chunked(tuple(axis_sizes[axis] for axis in axes)) if axes else NoSharding()
                for axes in by_dim
            ),
            tuple(
                ShardedAxis(cuts[name]) if name in cuts else Replicated(axis_sizes[name])
                for name in axis_names
            ),
        )

    return to_spec


def partitioned_sharding_spec(
    num_partitions: int, partitions: Sequence[int] | None, aval: Any
) -> ShardingSpec:
    """The placement of an array by numbers of parts.

    Args:
        num_partitions: The number of devices.
        partitions: For each dimension into how many parts it goes; None for copies of the whole.
        aval: The type of the array.

    Raises:
        TilingError: There is not one number for each dimension, or they don't take all devices.

    Example:
        >>> partitioned_sharding_spec(4, (2, 2), jax.ShapeDtypeStruct((8, 8), "float32"))
        ShardingSpec((Chunked((2,)), Chunked((2,))), (ShardedAxis(0), ShardedAxis(1)))
    """
    ndim = len(aval.shape)
    if partitions is None:
        return spec_over_one_dim(ndim, None, num_partitions)
    if len(partitions) != ndim or math.prod(partitions) != num_partitions:
        raise TilingError(
            f"partitions must give {num_partitions} parts over {counted(ndim, 'dimension')}, not "
            f"{tuple(partitions)}: write {(num_partitions, *[1] * (ndim - 1))[:ndim]}, or None for "
            "copies"
        )
    return ShardingSpec(
        tuple(Chunked((number,)) for number in partitions),
        tuple(ShardedAxis(dim) for dim in range(ndim)),
    )


def pmap_sharding_spec(
    nrep: int, axis_size: int, sharded_shape: Sequence[int], map_axis: int | None
) -> ShardingSpec:
    """The placement that `pmap` gave an argument or result.

    Args:
        nrep: The number of devices.
        axis_size: The size of the mapped axis, which divides it.
        sharded_shape: The shape of what one device holds, without the mapped dimension.
        map_axis: The mapped dimension; None for copies of the whole.

    Raises:
        TilingError: The devices can't be dealt out so.

    Example:
        >>> pmap_sharding_spec(8, 8, (4,), 0)
        ShardingSpec((Unstacked(8), NoSharding()), (ShardedAxis(0),))
    """
    if nrep % axis_size:
        raise TilingError(
            f"{nrep} devices can't be dealt out over a mapped axis of size {axis_size}: give "
            f"{axis_size} or a multiple of it"
        )
    copies = () if nrep == axis_size else (Replicated(nrep // axis_size),)
    ndim = len(sharded_shape) + (map_axis is not None)
    mapped = spec_over_one_dim(ndim, map_axis, axis_size, unstacked=True)
    return ShardingSpec(mapped.sharding, (*mapped.mesh_mapping, *copies))


def pmap_sharding_spec_of_parts(
    nrep: int,
    axis_size: int,
    npart: int,
    parts: Sequence[int] | None,
    sharded_aval: Any,
    map_axis: int | None,
) -> ShardingSpec:
    """Return the `ShardingSpec` that `pmap` gave a value whose replicas were partitioned too.

    Args:
        nrep: The number of replicas.
        axis_size: The size of the mapped axis, which divides `nrep`.
        npart: The number of devices of each replica.
        parts: For each dimension of `sharded_aval` the number of parts; None for copies.
        sharded_aval: The type of one replica's value, without the mapped dimension.
        map_axis: The mapped dimension; None for copies of the whole.

    Raises:
        TilingError: `axis_size` does not divide `nrep`, or `parts` does not match `npart`.

    Example:
        >>> aval = jax.ShapeDtypeStruct((4,), "float32")
        >>> pmap_sharding_spec_of_parts(4, 4, 2, (2,), aval, 0)
        ShardingSpec((Unstacked(4), Chunked((2,))), (ShardedAxis(0), ShardedAxis(1)))
    """
    mapped = pmap_sharding_spec(nrep, axis_size, tuple(sharded_aval.shape), map_axis)
    if npart == 1 and parts is None:
        return mapped
    inner = partitioned_sharding_spec(npart, parts, sharded_aval)
    if map_axis is None:
        return ShardingSpec(inner.sharding, (*mapped.mesh_mapping, *inner.mesh_mapping))
    before = sum(not isinstance(entry, NoSharding) for entry in inner.sharding[:map_axis])
    moved = (
        ShardedAxis(entry.axis + (entry.axis >= before))
        if isinstance(entry, ShardedAxis)
        else entry
        for entry in inner.mesh_mapping
    )
    return ShardingSpec(
        (*inner.sharding[:map_axis], Unstacked(axis_size), *inner.sharding[map_axis:]),
        (ShardedAxis(before), *mapped.mesh_mapping[1:], *moved),
    )


def spec_to_indices(shape: Sequence[int], spec: ShardingSpec) -> tuple[Any, ...]:
    """Which part of an array each device of a spec's grid holds, in the grid's order.

    Args:
        shape: Of the array, in elements.
        spec: How it is cut and dealt.

    Raises:
        GeometryError: The shape can't be cut so.

    Example:
        >>> spec = ShardingSpec((Chunked((2,)),), (Replicated(2), ShardedAxis(0)))
        >>> spec_to_indices((4,), spec)[:2]
        ((slice(0, 2, None),), (slice(2, 4, None),))
    """
    return tuple(spec.indices(shape).flat)


def buffers_on(x: Any, devices: Sequence[Any], replicate: bool = False) -> list[Any]:
    """An array on each of some devices: the era's `pxla.device_put`.

    Args:
        x: One array for each device, or one for all.
        devices: The devices.
        replicate: Whether `x` is one array for all.
    """
    values: Iterable[Any] = [x] * len(devices) if replicate else x
    pieces = [xlashard.device_put(v, d) for v, d in zip(values, devices, strict=True)]
    return as_jax_arrays(pieces)


class InputsHandlerMode(Enum):
    """The caller of `shard_args`: `pmap`, or `pjit` and `xmap`. Both place arrays in one way."""

    pmap = 0
    pjit_or_xmap = 1


def shard_arg(x: Any, devices: Sequence[Any], arg_indices: Sequence[Any], mode: Any) -> list[Any]:
    """Put the piece of an array at each index on one device: the era's `pxla._shard_arg`.

    A piece that lies on its device already is not copied.

    Args:
        x: An array, a NumPy array or a number.
        devices: The devices.
        arg_indices: An index of `x` for each device.
        mode: An `InputsHandlerMode`; it does not change the pieces.

    Returns:
        An array on each device.

    Example:
        >>> devices, rows = jax.devices()[:1], [(slice(0, 2),)]
        >>> shard_arg(np.arange(4), devices, rows, InputsHandlerMode.pmap)[0].shape
        (2,)
    """
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        here = {}
    else:
        here = {s.device: (_bounds(s.index, x.shape), s.data) for s in x.addressable_shards}
    out = []
    for device, index in zip(devices, arg_indices, strict=True):
        there = here.get(device)
        if there is not None and there[0] == _bounds(index, x.shape):
            out.append(there[1])
        else:
            out.append(xlashard.device_put(x[index], device))
    return as_jax_arrays(out)


def shard_args(
    devices: Sequence[Any], indices: Sequence[Sequence[Any]], mode: Any, args: Sequence[Any]
) -> list[list[Any]]:
    """Put the pieces of several arrays on devices: the era's `pxla.shard_args`.

    Args:
        devices: The devices.
        indices: For each array an index for each device.
        mode: An `InputsHandlerMode`; it does not change the pieces.
        args: The arrays.
    """
    return [shard_arg(x, devices, of_x, mode) for x, of_x in zip(args, indices, strict=True)]


def _bounds(index: Any, shape: Sequence[int]) -> Any:
    """An index of contiguous elements in a form that can be compared."""
    entries = index if isinstance(index, tuple) else (index,)
    if any(entry is Ellipsis or entry is None for entry in entries):
        return None
    full = (*entries, *[slice(None)] * (len(shape) - len(entries)))
    return tuple(
        entry.indices(size) if isinstance(entry, slice) else int(entry)
        for entry, size in zip(full, shape, strict=True)
    )


def tile_aval_nd(axis_sizes: Mapping[str, int], in_axes: Mapping[str, int], aval: Any) -> Any:
    """The type of one tile of an array.

    Args:
        axis_sizes: The sizes of the mesh's axes.
        in_axes: From mesh axes to the dimensions that they cut.
        aval: The type of the array.

    Raises:
        DivisibilityError: A dimension does not divide.
    """
    spec = mesh_sharding_specs(axis_sizes, list(axis_sizes))(aval, in_axes)
    return aval.update(shape=spec.tiling.shard_shape(tuple(aval.shape)))


def untile_aval_nd(axis_sizes: Mapping[str, int], out_axes: Mapping[str, int], aval: Any) -> Any:
    """The type of the array that tiles of a type make up; see `tile_aval_nd`."""
    shape = list(aval.shape)
    for axis, dim in out_axes.items():
        shape[dim] *= axis_sizes[axis]
    return aval.update(shape=tuple(shape))


def show_axes(axes: Iterable[str]) -> str:
    """Names of axes as messages list them.

    Args:
        axes: The names.
    """
    return ", ".join(sorted(f"`{axis}`" for axis in axes))


def hashable_index(idx: Any) -> Any:
    """An index with pairs in place of its slices, which can be compared and be a key.

    Args:
        idx: A slice, a number, or a tuple of those.
    """
    return jax.tree.map(lambda x: (x.start, x.stop) if isinstance(x, slice) else x, idx)
