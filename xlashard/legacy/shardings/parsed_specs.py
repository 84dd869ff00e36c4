"""Partition specs taken apart, as the era's pjit did it: its own classes, names and signatures.

`sharding.parse` has what they do. Here they give the era's `PartitionSpec`, and ordered mappings.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import jax

from xlashard._jax import compiling
from xlashard._jax.shardings import (
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
    """A partition spec, one tuple of mesh axes per dimension, which gives the era's specs back.

    Args:
        user_spec: What the user wrote.
        partitions: For each dimension its mesh axes, None for an unconstrained one.
        sync: How far the two have moved apart.

    Example:
        >>> parsed = ParsedPartitionSpec.from_user_input(PartitionSpec("x", None), "axis_resources")
        >>> parsed.partitions, parsed.get_partition_spec()
        ((('x',), ()), PartitionSpec('x', None))
    """

    __slots__ = ()

    def get_partition_spec(self) -> Any:
        """The era's partition spec that says the same, as the user wrote it if that is still so."""
        return PartitionSpec(*super().get_partition_spec())

    def insert_axis_partitions(
        self, dim: int, val: tuple[str, ...] | None
    ) -> "ParsedPartitionSpec":
        """The spec of an array with one more dimension.

        Args:
            dim: Its position, from 0.
            val: Its mesh axes, `()` for uncut, None for open.
        """
        return _legacy_results(super().insert_axis_partitions(dim, val))


class CanonicalizedParsedPartitionSpec(ParsedPartitionSpec):
    """A parsed spec without trailing dimensions that are not cut, for comparisons.

    Args:
        parsed_pspec: The spec.
    """

    __slots__ = ()

    def __init__(self, parsed_pspec: parse.ParsedPartitionSpec) -> None:
        shortest = parse.CanonicalizedParsedPartitionSpec(parsed_pspec)
        super().__init__(shortest.unsafe_user_spec, shortest.partitions, shortest.sync)


REPLICATED = CanonicalizedParsedPartitionSpec(ParsedPartitionSpec(None, ()))
"""The spec that cuts nothing, whatever the rank."""


def _legacy_results(parsed: parse.ParsedPartitionSpec) -> ParsedPartitionSpec:
    return ParsedPartitionSpec(parsed.unsafe_user_spec, parsed.partitions, parsed.sync)


def parse_flatten_op_sharding(op_sharding: Any, mesh: Mesh) -> list[ParsedPartitionSpec]:
    """The specs that say on a mesh what XLA's sharding says; several for a tuple.

    Args:
        op_sharding: An `OpSharding`, an `HloSharding`, its text, or a sharding made of one.
        mesh: The mesh; its devices in row-major order are those that the sharding counts.

    Raises:
        TilingError: If no spec on that mesh says it.
    """
    given = op_sharding.tile_assignment if isinstance(op_sharding, GSPMDSharding) else op_sharding
    return [_legacy_results(parsed) for parsed in parse.parse_flatten_op_sharding(given, mesh)]


def get_array_mapping(axis_resources: Any) -> Any:
    """From each mesh axis to the dimension that it cuts, in the order of the dimensions.

    Args:
        axis_resources: A partition spec, parsed or not; `AUTO` and the like come back as they are.

    Example:
        >>> dict(get_array_mapping(PartitionSpec(("x", "y"), None, "z")))
        {'x': 0, 'y': 0, 'z': 2}
    """
    mapping = parse.get_array_mapping(axis_resources)
    return OrderedDict(mapping) if isinstance(mapping, dict) else mapping


def array_mapping_to_axis_resources(array_mapping: Mapping[str, int]) -> Any:
    """The shortest partition spec with a mapping of mesh axes to dimensions.

    Args:
        array_mapping: From each mesh axis to the dimension that it cuts, major to minor.

    Example:
        >>> array_mapping_to_axis_resources({"x": 0, "y": 0, "z": 2})
        PartitionSpec(('x', 'y'), None, ('z',))
    """
    axes: list[tuple[str, ...]] = [()] * (max(array_mapping.values(), default=-1) + 1)
    for axis, dim in array_mapping.items():
        axes[dim] += (axis,)
    return PartitionSpec(*[names or None for names in axes])


def get_single_pspec(parsed: parse.ParsedPartitionSpec) -> Any:
    """The era's partition spec of a parsed one, without what says nothing at its end."""
    return array_mapping_to_axis_resources(get_array_mapping(parsed))


def get_partition_spec(ppspec: Sequence[parse.ParsedPartitionSpec]) -> list[Any]:
    """The era's partition specs of parsed ones."""
    return [get_single_pspec(parsed) for parsed in ppspec]


def prepare_axis_resources(
    axis_resources: Any, arg_name: str, allow_unconstrained_dims: bool = False
) -> tuple[Any, list[Any], Any, bool]:
    """Reads a tree of resources.

    Args:
        axis_resources: The tree; None, specs, shardings, `AUTO`, `FROM_GDA` and the unspecified
            value are its leaves.
        arg_name: The argument that it was given for, in errors.
        allow_unconstrained_dims: Whether the partitioner may be left a dimension.

    Returns:
        The tree with its specs parsed, its leaves, its structure, and whether one is `AUTO`.

    Raises:
        ArgumentError: If a leaf is something else.
        ShardingError: If a spec leaves a dimension open where that is not allowed, or a sharding
            can't be told to XLA.
        DuplicateAxisError: If a spec uses a mesh axis twice.
    """
    leaves, treedef = jax.tree.flatten(axis_resources, is_leaf=lambda x: x is None)
    told_as = f"each entry of {arg_name}"
    parsed = [_prepared(leaf, told_as, allow_unconstrained_dims) for leaf in leaves]
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
                f"{what} must use each mesh axis once, but {leaf} has {axis!r} {count} times "
                f"(dimensions {dims}): leave it out in all but one",
                axis=axis,
                dims=dims,
            )
    return parsed


def array_mapping_of_resource(axis_resources: Any) -> Any:
    """From each mesh axis to the dimension that it cuts, of a resource as users write it.

    Args:
        axis_resources: A partition spec, None for the replicated one, or `AUTO` and the like.

    Raises:
        ArgumentError: If it is something else.
    """
    return get_array_mapping(_prepared(axis_resources, "axis_resources", True))


def mesh_sharding(mesh: Mesh, parsed: Any) -> Any:
    """The sharding of a parsed spec on a mesh; what is no spec comes back as it is.

    Args:
        mesh: The mesh.
        parsed: A leaf of what `prepare_axis_resources` gives.
    """
    if not isinstance(parsed, parse.ParsedPartitionSpec):
        return parsed
    return NamedSharding(mesh, parsed.get_partition_spec())


def get_unconstrained_dims(sharding: JaxSharding) -> set[int]:
    """The dimensions that a sharding on a mesh leaves to the partitioner."""
    own = from_jax(sharding)
    return parse.get_unconstrained_dims(own) if isinstance(own, NamedSharding) else set()


# More devices than one, for which the partitioner was at work.
_SEVERAL = 2


def get_op_sharding_from_executable(executable: Any) -> tuple[OpShardings, OpShardings]:
    """The shardings by which a compiled program takes its arguments and gives its results.

    Args:
        executable: A compiled stage of pjit or of `jax.jit`, or PJRT's own executable.

    Raises:
        ShardingError: If the compiler does not tell.
    """
    runtime = parse.runtime_of(executable)
    reported = compiling.executable_shardings(runtime, _SEVERAL)
    if reported is None and len(runtime.local_devices()) == 1:
        reported = compiling.executable_shardings(runtime, 1)
    if reported is None:
        raise ShardingError(  # no-catalogue: no supported compiler does this
            "the compiler does not tell how it dealt out this program's values: ask the compiled "
            "stage, compiled.input_shardings and compiled.output_shardings"
        )
    ins, outs = ([op_sharding(hlo_from_text(text)) for text in texts] for texts in reported)
    return ins, outs


def get_ppspec_from_executable(
    executable: Any, mesh: Mesh
) -> tuple[list[ParsedPartitionSpec], list[ParsedPartitionSpec]]:
    """The same as parsed specs on a mesh."""
    ins, outs = get_op_sharding_from_executable(executable)
    return [_single(op, mesh) for op in ins], [_single(op, mesh) for op in outs]


def _single(op_sharding: Any, mesh: Mesh) -> ParsedPartitionSpec:
    (parsed,) = parse_flatten_op_sharding(op_sharding, mesh)
    return parsed


def get_pspec_from_executable(
    executable: Any, mesh: Mesh
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The same as partition specs."""
    ins, outs = get_ppspec_from_executable(executable, mesh)
    return tuple(get_partition_spec(ins)), tuple(get_partition_spec(outs))


def flatten_op_sharding(op_sharding: Any) -> OpShardings:
    """The elements of a tuple's sharding; any other one alone.

    Args:
        op_sharding: An `OpSharding`.
    """
    if op_sharding.type == OpSharding.Type.TUPLE:
        return list(op_sharding.tuple_shardings)
    return [op_sharding]


def hlo_sharding(op_sharding: Any) -> Any:
    """What jaxlib says of an `OpSharding`; an `HloSharding` comes back as it is."""
    return (
        HloSharding.from_proto(op_sharding) if isinstance(op_sharding, OpSharding) else op_sharding
    )


def is_op_sharding_replicated(op_sharding: Any) -> bool:
    """Return whether every device has every element; of a tuple, of each of its arrays."""
    sharding = hlo_sharding(op_sharding)
    if elements := sharding.tuple_elements():
        return all(map(is_op_sharding_replicated, elements))
    return sharding.is_replicated() or sharding.num_devices() == 1


def are_op_shardings_equal(a: Any, b: Any) -> bool:
    """Return whether two of XLA's shardings place arrays in the same way."""
    parts, others = hlo_sharding(a).tuple_elements(), hlo_sharding(b).tuple_elements()
    if parts or others:
        # jaxlib's comparison of a tuple with anything ends the process.
        return len(parts) == len(others) and all(map(are_op_shardings_equal, parts, others))
    if is_op_sharding_replicated(a) and is_op_sharding_replicated(b):
        return True
    return hlo_sharding(a) == hlo_sharding(b)


def get_num_ways_dim_sharded(op_sharding: Any) -> tuple[list[int], int]:
    """Into how many tiles each dimension is cut, and how many devices hold the same tile."""
    assignment = parse.tile_assignment_of(op_sharding)
    tiles = assignment.dims[: len(assignment.dims) - len(assignment.subgroups)]
    return list(tiles), math.prod(assignment.dims[len(tiles) :])
