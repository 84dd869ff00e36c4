"""XLA's `OpSharding`s with the functions of 2022, and the shardings of compiled programs.

`geometry.TileAssignment` is today's equivalent.
"""

import math
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
from xlashard.errors import ArgumentError, ShardingError, TilingError
from xlashard.geometry import TileAssignment, spec_from_tile_assignment
from xlashard.legacy.shardings.parsed_specs import (
    CanonicalizedParsedPartitionSpec,
    ParsedPartitionSpec,
    get_partition_spec,
)
from xlashard.sharding import GSPMDSharding, grid_of
from xlashard.sharding.gspmd import read_assignment

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
