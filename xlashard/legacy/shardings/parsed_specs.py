"""Parsed partition specs and `OpSharding`s, with the names and signatures of 2022.

They wrap `sharding.parse`, and return the `PartitionSpec` of 2022 and ordered mappings.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import jax

from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.shardings import (
    HloSharding,
    JaxSharding,
    Mesh,
    OpSharding,
    hlo_from_text,
    op_sharding,
)
from xlashard.errors import DuplicateAxisError, ShardingError
from xlashard.legacy.shardings.partition_spec import (
    PartitionSpec,
    is_auto,
    is_unspecified_or_from_gda_or_auto,
)
from xlashard.sharding import GSPMDSharding, NamedSharding, Sharding, from_jax, parse

type OpShardings = list[Any]


class ParsedPartitionSpec(parse.ParsedPartitionSpec):
    """Partition spec as one tuple of mesh axes per dimension.

    Args:
        user_spec: The spec as the user wrote it.
        partitions: The mesh axes of each dimension; None for an unconstrained one.
        sync: The relation between `user_spec` and `partitions`.

    Example:
        >>> parsed = ParsedPartitionSpec.from_user_input(PartitionSpec("x", None), "axis_resources")
        >>> parsed.partitions, parsed.get_partition_spec()
        ((('x',), ()), PartitionSpec('x', None))
    """

    __slots__ = ()

    def get_partition_spec(self) -> Any:
        """Return the equivalent `PartitionSpec`, as the user wrote it if it is still in sync."""
        return PartitionSpec(*super().get_partition_spec())

    def insert_axis_partitions(
        self, dim: int, val: tuple[str, ...] | None
    ) -> "ParsedPartitionSpec":
        """Return the spec of an array with one more dimension.

        Args:
            dim: Its position, from 0.
            val: Its mesh axes; `()` if it is not sharded, None if it is unconstrained.
        """
        return _legacy_results(super().insert_axis_partitions(dim, val))


class CanonicalizedParsedPartitionSpec(ParsedPartitionSpec):
    """Parsed spec without trailing unsharded dimensions, for comparisons.

    Args:
        parsed_pspec: The spec.
    """

    __slots__ = ()

    def __init__(self, parsed_pspec: parse.ParsedPartitionSpec) -> None:
        shortest = parse.CanonicalizedParsedPartitionSpec(parsed_pspec)
        super().__init__(shortest.unsafe_user_spec, shortest.partitions, shortest.sync)


REPLICATED = CanonicalizedParsedPartitionSpec(ParsedPartitionSpec(None, ()))
"""The replicated spec, for every rank."""


def _legacy_results(parsed: parse.ParsedPartitionSpec) -> ParsedPartitionSpec:
    return ParsedPartitionSpec(parsed.unsafe_user_spec, parsed.partitions, parsed.sync)


def parse_flatten_op_sharding(op_sharding: Any, mesh: Mesh) -> list[ParsedPartitionSpec]:
    """Return the specs on a mesh that are equivalent to XLA's sharding; several for a tuple.

    Args:
        op_sharding: An `OpSharding`, an `HloSharding`, its text, or a sharding made of one.
        mesh: The mesh; the sharding numbers its devices in row-major order.

    Raises:
        TilingError: No spec on this mesh is equivalent.
    """
    tiles = op_sharding.tile_assignment if isinstance(op_sharding, GSPMDSharding) else op_sharding
    return [_legacy_results(parsed) for parsed in parse.parse_flatten_op_sharding(tiles, mesh)]


def get_array_mapping(axis_resources: Any) -> Any:
    """Return the sharded dimension of each mesh axis, in the order of the dimensions.

    Args:
        axis_resources: A partition spec, parsed or not; markers such as `AUTO` are returned
            unchanged.

    Example:
        >>> dict(get_array_mapping(PartitionSpec(("x", "y"), None, "z")))
        {'x': 0, 'y': 0, 'z': 2}
    """
    mapping = parse.get_array_mapping(axis_resources)
    return OrderedDict(mapping) if isinstance(mapping, dict) else mapping


def array_mapping_to_axis_resources(array_mapping: Mapping[str, int]) -> Any:
    """Return the shortest partition spec with a mapping of mesh axes to dimensions.

    Args:
        array_mapping: Mesh axis to sharded dimension, major to minor.

    Example:
        >>> array_mapping_to_axis_resources({"x": 0, "y": 0, "z": 2})
        PartitionSpec(('x', 'y'), None, ('z',))
    """
    axes: list[tuple[str, ...]] = [()] * (max(array_mapping.values(), default=-1) + 1)
    for axis, dim in array_mapping.items():
        axes[dim] += (axis,)
    return PartitionSpec(*[names or None for names in axes])


def get_single_pspec(parsed: parse.ParsedPartitionSpec) -> Any:
    """Return the `PartitionSpec` of a parsed spec, without trailing unsharded dimensions."""
    return array_mapping_to_axis_resources(get_array_mapping(parsed))


def get_partition_spec(ppspec: Sequence[parse.ParsedPartitionSpec]) -> list[Any]:
    """Return the `PartitionSpec`s of parsed specs."""
    return [get_single_pspec(parsed) for parsed in ppspec]


def prepare_axis_resources(
    axis_resources: Any, arg_name: str, allow_unconstrained_dims: bool = False
) -> tuple[Any, list[Any], Any, bool]:
    """Parse a tree of resources.

    Args:
        axis_resources: The tree; its leaves are None, specs, shardings, `AUTO`, `FROM_GDA` and the
            unspecified value.
        arg_name: The name of the argument, for errors.
        allow_unconstrained_dims: True if dimensions may be unconstrained.

    Returns:
        The tree with parsed specs, its leaves, its structure, and True if one leaf is `AUTO`.

    Raises:
        ArgumentError: A leaf is invalid.
        ShardingError: A spec has an unconstrained dimension where that is not allowed, or a
            sharding has no XLA equivalent.
        DuplicateAxisError: A spec uses a mesh axis twice.
    """
    leaves, treedef = jax.tree.flatten(axis_resources, is_leaf=lambda x: x is None)
    what = f"each entry of {arg_name}"
    parsed = [_prepared(leaf, what, allow_unconstrained_dims) for leaf in leaves]
    return treedef.unflatten(parsed), parsed, treedef, any(map(is_auto, parsed))


def _prepared(leaf: Any, what: str, allow_unconstrained_dims: bool) -> Any:
    if is_unspecified_or_from_gda_or_auto(leaf):
        return leaf
    if isinstance(leaf, Sharding | JaxSharding):
        from_jax(leaf)
        return leaf
    parsed = ParsedPartitionSpec.from_user_input(leaf, what, allow_unconstrained_dims)
    for axis, count in Counter(chain.from_iterable(axes or () for axes in parsed)).items():
        if count > 1:
            dims = [dim for dim, axes in enumerate(parsed) for name in axes or () if name == axis]
            raise DuplicateAxisError(
                f"{what} must use each mesh axis once, but {leaf} contains {axis!r} {count} times "
                f"(dimensions {dims}): keep it in one of them",
                axis=axis,
                dims=dims,
            )
    return parsed


def array_mapping_of_resource(axis_resources: Any) -> Any:
    """Return the sharded dimension of each mesh axis of an unparsed resource.

    Args:
        axis_resources: A partition spec, None (replicated), or a marker such as `AUTO`.

    Raises:
        ArgumentError: The resource is invalid.
    """
    return get_array_mapping(_prepared(axis_resources, "axis_resources", True))


def mesh_sharding(mesh: Mesh, parsed: Any) -> Any:
    """Return the sharding of a parsed spec on a mesh.

    Args:
        mesh: The mesh.
        parsed: A leaf that `prepare_axis_resources` returned; markers are returned unchanged.
    """
    if not isinstance(parsed, parse.ParsedPartitionSpec):
        return parsed
    return NamedSharding(mesh, parsed.get_partition_spec())


def get_unconstrained_dims(sharding: JaxSharding) -> set[int]:
    """Return the unconstrained dimensions of a sharding."""
    own = from_jax(sharding)
    return parse.get_unconstrained_dims(own) if isinstance(own, NamedSharding) else set()


# The partitioner runs for two devices or more.
_SEVERAL = 2


def get_op_sharding_from_executable(executable: Any) -> tuple[OpShardings, OpShardings]:
    """Return the input and output shardings of a compiled program.

    Args:
        executable: A compiled stage of pjit or `jax.jit`, or a PJRT executable.

    Raises:
        ShardingError: The compiler does not report them.
    """
    runtime = parse.runtime_of(executable)
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
    assignment = parse.tile_assignment_of(op_sharding)
    tiles = assignment.dims[: len(assignment.dims) - len(assignment.subgroups)]
    return list(tiles), math.prod(assignment.dims[len(tiles) :])
