"""`ShardingSpec`s of meshes and of `pmap`, as in `jax.interpreters.pxla`."""

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
from xlashard.legacy.modes.config_flags import as_jax_arrays


def mesh_sharding_specs(
    axis_sizes: Mapping[str, int], axis_names: Sequence[str], allow_uneven_axes: bool = False
) -> Callable[[Any, Mapping[str, int]], ShardingSpec]:
    """Return a function from mesh axes of an array to its `ShardingSpec`.

    Args:
        axis_sizes: The sizes of the mesh's axes.
        axis_names: The axes, in the order of the mesh.
        allow_uneven_axes: True if the last tiles of a dimension may be smaller.

    Returns:
        A function of an array's type and a mapping from mesh axes to sharded dimensions. It raises
        `DivisibilityError` if a dimension does not divide.

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
                    f"dimension {dim} of shape {shape} is not divisible by {tiles}, the size of "
                    f"the mesh axes {axes}: change its size, or pass allow_uneven_axes=True",
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
    """Return the `ShardingSpec` of an array by its number of tiles per dimension.

    Args:
        num_partitions: The number of devices.
        partitions: The number of tiles of each dimension; None for replicated.
        aval: The type of the array.

    Raises:
        TilingError: The length of `partitions` is not the rank, or its product is not
            `num_partitions`.

    Example:
        >>> partitioned_sharding_spec(4, (2, 2), jax.ShapeDtypeStruct((8, 8), "float32"))
        ShardingSpec((Chunked((2,)), Chunked((2,))), (ShardedAxis(0), ShardedAxis(1)))
    """
    ndim = len(aval.shape)
    if partitions is None:
        return spec_over_one_dim(ndim, None, num_partitions)
    if len(partitions) != ndim or math.prod(partitions) != num_partitions:
        raise TilingError(
            f"partitions={tuple(partitions)} is invalid: expected {counted(ndim, 'number')} whose "
            f"product is {num_partitions}, such as "
            f"{(num_partitions, *[1] * (ndim - 1))[:ndim]}, or None for replicated"
        )
    return ShardingSpec(
        tuple(Chunked((number,)) for number in partitions),
        tuple(ShardedAxis(dim) for dim in range(ndim)),
    )


def pmap_sharding_spec(
    nrep: int, axis_size: int, sharded_shape: Sequence[int], map_axis: int | None
) -> ShardingSpec:
    """Return the `ShardingSpec` of an argument or result of `pmap`.

    Args:
        nrep: The number of devices.
        axis_size: The size of the mapped axis, which divides `nrep`.
        sharded_shape: The shape of one shard, without the mapped dimension.
        map_axis: The mapped dimension; None for replicated.

    Raises:
        TilingError: `axis_size` does not divide `nrep`.

    Example:
        >>> pmap_sharding_spec(8, 8, (4,), 0)
        ShardingSpec((Unstacked(8), NoSharding()), (ShardedAxis(0),))
    """
    if nrep % axis_size:
        raise TilingError(
            f"nrep={nrep} is not a multiple of axis_size={axis_size}: pass {axis_size} devices or "
            "a multiple"
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
    """Return the `ShardingSpec` of a value of `pmap` whose replicas are sharded too.

    Args:
        nrep: The number of replicas.
        axis_size: The size of the mapped axis, which divides `nrep`.
        npart: The number of devices of each replica.
        parts: The number of tiles of each dimension of `sharded_aval`; None for replicated.
        sharded_aval: The type of one replica's value, without the mapped dimension.
        map_axis: The mapped dimension; None for replicated.

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
    """Return the index of the shard on each device of a spec's grid, in the grid's order.

    Args:
        shape: The shape of the array.
        spec: The `ShardingSpec`.

    Raises:
        GeometryError: The spec does not fit the shape.

    Example:
        >>> spec = ShardingSpec((Chunked((2,)),), (Replicated(2), ShardedAxis(0)))
        >>> spec_to_indices((4,), spec)[:2]
        ((slice(0, 2, None),), (slice(2, 4, None),))
    """
    return tuple(spec.indices(shape).flat)


def buffers_on(x: Any, devices: Sequence[Any], replicate: bool = False) -> list[Any]:
    """Put an array on each of some devices: `pxla.device_put` of 2022.

    Args:
        x: A sequence with an array for each device, or with `replicate` one array.
        devices: The devices.
        replicate: True if `x` is one array for all devices.
    """
    values: Iterable[Any] = [x] * len(devices) if replicate else x
    pieces = [xlashard.device_put(v, d) for v, d in zip(values, devices, strict=True)]
    return as_jax_arrays(pieces)


class InputsHandlerMode(Enum):
    """The caller of `shard_args`: `pmap`, or `pjit` and `xmap`. Both place arrays in one way."""

    pmap = 0
    pjit_or_xmap = 1


def shard_arg(x: Any, devices: Sequence[Any], arg_indices: Sequence[Any], mode: Any) -> list[Any]:
    """Put the shard of an array at each index on one device: `pxla._shard_arg` of 2022.

    A shard that is on its device already is not copied.

    Args:
        x: An array, a NumPy array or a number.
        devices: The devices.
        arg_indices: An index of `x` for each device.
        mode: An `InputsHandlerMode`, which has no effect.

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
        held = here.get(device)
        if held is not None and held[0] == _bounds(index, x.shape):
            out.append(held[1])
        else:
            out.append(xlashard.device_put(x[index], device))
    return as_jax_arrays(out)


def shard_args(
    devices: Sequence[Any], indices: Sequence[Sequence[Any]], mode: Any, args: Sequence[Any]
) -> list[list[Any]]:
    """Put the shards of several arrays on devices: `pxla.shard_args` of 2022.

    Args:
        devices: The devices.
        indices: For each array an index for each device.
        mode: An `InputsHandlerMode`, which has no effect.
        args: The arrays.
    """
    return [shard_arg(x, devices, of_x, mode) for x, of_x in zip(args, indices, strict=True)]


def _bounds(index: Any, shape: Sequence[int]) -> Any:
    """Return the bounds of an index of contiguous elements, for comparison."""
    entries = index if isinstance(index, tuple) else (index,)
    if any(entry is Ellipsis or entry is None for entry in entries):
        return None
    full = (*entries, *[slice(None)] * (len(shape) - len(entries)))
    return tuple(
        entry.indices(size) if isinstance(entry, slice) else int(entry)
        for entry, size in zip(full, shape, strict=True)
    )


def tile_aval_nd(axis_sizes: Mapping[str, int], in_axes: Mapping[str, int], aval: Any) -> Any:
    """Return the type of one tile of an array.

    Args:
        axis_sizes: The sizes of the mesh's axes.
        in_axes: Mesh axis to sharded dimension.
        aval: The type of the array.

    Raises:
        DivisibilityError: A dimension does not divide.
    """
    spec = mesh_sharding_specs(axis_sizes, list(axis_sizes))(aval, in_axes)
    return aval.update(shape=spec.tiling.shard_shape(tuple(aval.shape)))


def untile_aval_nd(axis_sizes: Mapping[str, int], out_axes: Mapping[str, int], aval: Any) -> Any:
    """Return the type of the array whose tiles have a type; see `tile_aval_nd`."""
    shape = list(aval.shape)
    for axis, dim in out_axes.items():
        shape[dim] *= axis_sizes[axis]
    return aval.update(shape=tuple(shape))


def show_axes(axes: Iterable[str]) -> str:
    """Return the names of axes as a text for messages.

    Args:
        axes: The names.
    """
    return ", ".join(sorted(f"`{axis}`" for axis in axes))


def hashable_index(idx: Any) -> Any:
    """Return an index with pairs in place of slices, which is hashable.

    Args:
        idx: A slice, a number, or a tuple of those.
    """
    return jax.tree.map(lambda x: (x.start, x.stop) if isinstance(x, slice) else x, idx)
