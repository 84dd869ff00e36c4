"""Shardings as tiles: XLA's `OpSharding`s, and the `ShardingSpec`s of meshes and of `pmap`.

`geometry.TileAssignment` is today's equivalent of an `OpSharding`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.shardings import (
    AbstractMesh,
    HloSharding,
    Mesh,
    OpSharding,
    hlo_from_text,
    op_sharding,
)
from xlashard.core.sharding import GSPMDSharding, grid_of
from xlashard.core.sharding.gspmd import read_assignment
from xlashard.errors import ArgumentError, DivisibilityError, ShardingError, TilingError, counted
from xlashard.geometry import TileAssignment, spec_from_tile_assignment
from xlashard.geometry.divisibility import divisibility_text
from xlashard.legacy.shardings.parsed_specs import (
    CanonicalizedParsedPartitionSpec,
    ParsedPartitionSpec,
    get_partition_spec,
)
from xlashard.legacy.shardings.sharding_spec import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
    spec_over_one_dim,
)

OpShardingSharding = GSPMDSharding
"""The name of `GSPMDSharding` in 2022."""

type OpShardings = list[Any]


def parse_flatten_op_sharding(
    op_sharding: Any, mesh: Mesh | AbstractMesh
) -> list[ParsedPartitionSpec]:
    """Return the specs on a mesh that are equivalent to XLA's sharding; several for a tuple.

    Args:
        op_sharding: An `OpSharding`, an `HloSharding`, its text, a `TileAssignment`, or a
            sharding made of one.
        mesh: The mesh; the sharding numbers its devices in row-major order.

    Raises:
        ShardingTextError: The text is not that of a sharding.
        TilingError: No spec on this mesh is equivalent.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> mesh = AbstractMesh((2, 4), ("x", "y"))
        >>> [s.partitions for s in parse_flatten_op_sharding("{devices=[1,8]<=[8]}", mesh)]
        [((), ('x', 'y'))]
    """
    tiles = op_sharding.tile_assignment if isinstance(op_sharding, GSPMDSharding) else op_sharding
    assignment = tile_assignment_of(tiles)
    parts = assignment.elements if assignment.kind == "tuple" else (assignment,)
    return [_parsed(part, mesh) for part in parts]


def tile_assignment_of(value: Any) -> TileAssignment:
    """Return the tile assignment of an `OpSharding`, an `HloSharding`, or its text.

    Raises:
        ArgumentError: It is something else.
        ShardingTextError: The text is not that of a sharding.
    """
    assignment = read_assignment(value)
    if assignment is None:
        raise ArgumentError(
            "an XLA sharding is an OpSharding, an HloSharding, a TileAssignment or HLO text, not "
            f"{type(value).__name__}"
        )
    return assignment


def _parsed(assignment: TileAssignment, mesh: Mesh | AbstractMesh) -> ParsedPartitionSpec:
    try:
        spec = spec_from_tile_assignment(grid_of(mesh), assignment)
    except TilingError as error:
        raise TilingError(
            f"no spec on the mesh is equivalent to {assignment.to_text()}: {error}; write "
            f"GSPMDSharding(devices, {assignment.to_text()!r})"
        ) from None
    if assignment.ndim is None:
        return CanonicalizedParsedPartitionSpec(ParsedPartitionSpec(None, spec.dims))
    return ParsedPartitionSpec(None, spec.for_rank(assignment.ndim))


# The partitioner runs for two devices or more.
_SEVERAL = 2


def get_op_sharding_from_executable(executable: Any) -> tuple[OpShardings, OpShardings]:
    """Return the input and output shardings of a compiled program.

    Args:
        executable: A compiled stage of pjit or `jax.jit`, or a PJRT executable.

    Raises:
        ShardingError: The compiler does not report them.
    """
    runtime = _runtime_of(executable)
    reported = compiler.executable_shardings(runtime, _SEVERAL)
    if reported is None and len(runtime.local_devices()) == 1:
        reported = compiler.executable_shardings(runtime, 1)
    if reported is None:
        raise ShardingError(  # no-catalogue: no supported compiler does this
            "the compiler does not report the shardings of this program: read "
            "compiled.input_shardings and compiled.output_shardings of the compiled stage"
        )
    ins, outs = ([op_sharding(hlo_from_text(text)) for text in texts] for texts in reported)
    return ins, outs


def get_ppspec_from_executable(
    executable: Any, mesh: Mesh
) -> tuple[list[ParsedPartitionSpec], list[ParsedPartitionSpec]]:
    """Return the input and output shardings of a compiled program as parsed specs on a mesh."""
    ins, outs = get_op_sharding_from_executable(executable)
    return [_single(op, mesh) for op in ins], [_single(op, mesh) for op in outs]


def _single(op_sharding: Any, mesh: Mesh) -> ParsedPartitionSpec:
    (parsed,) = parse_flatten_op_sharding(op_sharding, mesh)
    return parsed


def get_pspec_from_executable(
    executable: Any, mesh: Mesh
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the input and output shardings of a compiled program as partition specs."""
    ins, outs = get_ppspec_from_executable(executable, mesh)
    return tuple(get_partition_spec(ins)), tuple(get_partition_spec(outs))


def flatten_op_sharding(op_sharding: Any) -> OpShardings:
    """Return the element shardings of a tuple; for another sharding, a list of it alone.

    Args:
        op_sharding: An `OpSharding`.
    """
    if op_sharding.type == OpSharding.Type.TUPLE:
        return list(op_sharding.tuple_shardings)
    return [op_sharding]


def hlo_sharding(op_sharding: Any) -> Any:
    """Return the `HloSharding` of an `OpSharding`; an `HloSharding` is returned unchanged."""
    return (
        HloSharding.from_proto(op_sharding) if isinstance(op_sharding, OpSharding) else op_sharding
    )


def is_op_sharding_replicated(op_sharding: Any) -> bool:
    """Return True if a sharding is replicated; for a tuple, if all its elements are."""
    sharding = hlo_sharding(op_sharding)
    if elements := sharding.tuple_elements():
        return all(map(is_op_sharding_replicated, elements))
    return sharding.is_replicated() or sharding.num_devices() == 1


def are_op_shardings_equal(a: Any, b: Any) -> bool:
    """Return True if two of XLA's shardings are equivalent."""
    parts, others = hlo_sharding(a).tuple_elements(), hlo_sharding(b).tuple_elements()
    if parts or others:
        # Comparing a tuple sharding in jaxlib aborts the process.
        return len(parts) == len(others) and all(map(are_op_shardings_equal, parts, others))
    if is_op_sharding_replicated(a) and is_op_sharding_replicated(b):
        return True
    return hlo_sharding(a) == hlo_sharding(b)


def get_num_ways_dim_sharded(op_sharding: Any) -> tuple[list[int], int]:
    """Return the number of tiles of each dimension, and the number of replicas."""
    assignment = tile_assignment_of(op_sharding)
    tiles = assignment.dims[: len(assignment.dims) - len(assignment.subgroups)]
    return list(tiles), math.prod(assignment.dims[len(tiles) :])


def _runtime_of(executable: Any) -> Any:
    """Return PJRT's own executable of a compiled stage; a PJRT executable passes unchanged."""
    runtime = getattr(executable, "runtime_executable", None)
    return executable if runtime is None else runtime()


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
        >>> import jax
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
            factors = [(axis, axis_sizes[axis]) for axis in axes]
            tiles = math.prod(size for _, size in factors)
            if not allow_uneven_axes and shape[dim] % tiles:
                raise DivisibilityError(
                    f"{divisibility_text(dim, shape, tiles, factors)}: pad it, or pass "
                    "allow_uneven_axes=True",
                    dim=dim,
                    tiles=tiles,
                    shape=shape,
                    axes=factors,
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
        >>> import jax
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
        >>> import jax
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
