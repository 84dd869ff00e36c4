"""Parsed partition specs, with the names and signatures of 2022.

`geometry.Spec` is today's equivalent. They return the `PartitionSpec` of 2022 and ordered mappings.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Self

import jax

from xlashard._jax.runtime.shardings import JaxSharding, Mesh
from xlashard.core.sharding import NamedSharding, Sharding, from_jax, spec_of
from xlashard.core.sharding import PartitionSpec as TodaysSpec
from xlashard.core.sharding.named import spec_entries
from xlashard.errors import ArgumentError, DuplicateAxisError, ShardingError
from xlashard.geometry import Spec
from xlashard.geometry.spec import check_axes_once
from xlashard.legacy.historic_errors import SpecOutOfSyncError
from xlashard.legacy.shardings.partition_spec import (
    PartitionSpec,
    is_auto,
    is_unspecified_or_from_gda_or_auto,
)

type Partitions = tuple[tuple[str, ...] | None, ...]
"""Mesh axes of each dimension, major to minor; None for an unconstrained one."""


class SpecSync(IntEnum):
    """Distance of a parsed spec from the spec that the user wrote."""

    OUT_OF_SYNC = 0
    """A sharded dimension was inserted."""
    DIM_PERMUTE = 1
    """Dimensions have moved, and no dimension was newly sharded."""
    IN_SYNC = 2
    """The spec is the one that the user wrote."""


class ParsedPartitionSpec:
    """Partition spec as one tuple of mesh axes per dimension.

    Trailing dimensions that are not sharded stay in it: `((),)` needs a dimension, `()` does not.

    Args:
        user_spec: The spec as the user wrote it.
        partitions: The mesh axes of each dimension; None for an unconstrained one.
        sync: The relation between `user_spec` and `partitions`.

    Example:
        >>> parsed = ParsedPartitionSpec.from_user_input(PartitionSpec("x", None), "axis_resources")
        >>> parsed.partitions, parsed.get_partition_spec()
        ((('x',), ()), PartitionSpec('x', None))
    """

    __slots__ = ("partitions", "sync", "unsafe_user_spec")

    def __init__(
        self,
        user_spec: Any,
        partitions: Iterable[tuple[str, ...] | None],
        sync: SpecSync = SpecSync.IN_SYNC,
    ) -> None:
        self.unsafe_user_spec = user_spec
        self.partitions: Partitions = tuple(partitions)
        self.sync = sync

    @classmethod
    def from_user_input(
        cls, entry: Any, arg_name: str, allow_unconstrained_dims: bool = False
    ) -> Self:
        """Parse a user's resource.

        Args:
            entry: A PartitionSpec, or None for the replicated spec.
            arg_name: Name of the argument, for errors.
            allow_unconstrained_dims: Whether dimensions may be unconstrained.

        Raises:
            ArgumentError: It is something else.
            SpecEntryError: An entry is not an axis name.
            ShardingError: A dimension is unconstrained, and this is not allowed.
        """
        if entry is None:
            return cls(None, ())
        if not isinstance(entry, TodaysSpec):
            raise ArgumentError(
                f"{arg_name} must be a PartitionSpec or None, not {type(entry).__name__}: write "
                f"P({entry!r})"
            )
        open_mark = PartitionSpec.UNCONSTRAINED
        partitions = spec_of(entry).for_rank(len(entry))
        if None in partitions and not allow_unconstrained_dims:
            raise ShardingError(
                f"{arg_name} is {entry}, which leaves dimension {partitions.index(None)} to the "
                f"partitioner ({open_mark}); only with_sharding_constraint can do that"
            )
        return cls(entry, partitions)

    @property
    def user_spec(self) -> Any:
        """Return the spec that the user wrote.

        Raises:
            ShardingError: The spec is out of sync.
        """
        return self.unsynced_user_spec(SpecSync.IN_SYNC)

    def unsynced_user_spec(self, min_sync: SpecSync) -> Any:
        """Return the user's spec if it is at most `min_sync` away from this one.

        Raises:
            SpecOutOfSyncError: The spec is further away; it is an `AssertionError` too.
        """
        if self.sync < min_sync:
            raise SpecOutOfSyncError(
                f"{self!r} differs from the spec that the user wrote ({self.sync.name}, required "
                f"{min_sync.name}): use get_partition_spec()"
            )
        return self.unsafe_user_spec

    def get_partition_spec(self) -> Any:
        """Return the equivalent `PartitionSpec`, as the user wrote it if it is still in sync."""
        spec = self.unsafe_user_spec
        in_sync = self.sync is SpecSync.IN_SYNC and isinstance(spec, TodaysSpec)
        return PartitionSpec(*(spec if in_sync else spec_entries(self)))

    def insert_axis_partitions(
        self, dim: int, val: tuple[str, ...] | None
    ) -> "ParsedPartitionSpec":
        """Return the spec of an array with one more dimension.

        Args:
            dim: Its position, from 0.
            val: Its mesh axes, `()` for replicated, None for unconstrained.
        """
        padded = self.partitions + ((),) * (dim - len(self.partitions))
        sync = SpecSync.OUT_OF_SYNC if val else SpecSync.DIM_PERMUTE
        return ParsedPartitionSpec(
            self.unsafe_user_spec, (*padded[:dim], val, *padded[dim:]), min(sync, self.sync)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParsedPartitionSpec):
            return NotImplemented
        return (self.partitions, self.sync) == (other.partitions, other.sync)

    def __hash__(self) -> int:
        return hash((self.partitions, self.sync))

    def __len__(self) -> int:
        return len(self.partitions)

    def __getitem__(self, dim: int) -> tuple[str, ...] | None:
        return self.partitions[dim]

    def __iter__(self) -> Iterator[tuple[str, ...] | None]:
        return iter(self.partitions)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(partitions={self.partitions}, "
            f"unsafe_user_spec={self.unsafe_user_spec}, sync={int(self.sync)})"
        )


class CanonicalizedParsedPartitionSpec(ParsedPartitionSpec):
    """Parsed spec without trailing unsharded dimensions, for comparisons.

    Args:
        parsed_pspec: The spec.
    """

    __slots__ = ()

    def __init__(self, parsed_pspec: ParsedPartitionSpec) -> None:
        super().__init__(
            parsed_pspec.unsafe_user_spec, Spec(parsed_pspec.partitions).dims, parsed_pspec.sync
        )


REPLICATED = CanonicalizedParsedPartitionSpec(ParsedPartitionSpec(None, ()))
"""The replicated spec, for every rank."""


def get_array_mapping(axis_resources: Any) -> Any:
    """Return the sharded dimension of each mesh axis, in the order of the dimensions.

    Args:
        axis_resources: A partition spec, parsed or not; markers such as `AUTO` are returned
            unchanged.

    Example:
        >>> dict(get_array_mapping(PartitionSpec(("x", "y"), None, "z")))
        {'x': 0, 'y': 0, 'z': 2}
    """
    if isinstance(axis_resources, TodaysSpec):
        partitions: Partitions = spec_of(axis_resources).dims
    elif isinstance(axis_resources, ParsedPartitionSpec):
        partitions = axis_resources.partitions
    else:
        return axis_resources
    return OrderedDict((axis, dim) for dim, axes in enumerate(partitions) for axis in axes or ())


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


def get_single_pspec(parsed: ParsedPartitionSpec) -> Any:
    """Return the `PartitionSpec` of a parsed spec, without trailing unsharded dimensions."""
    return array_mapping_to_axis_resources(get_array_mapping(parsed))


def get_partition_spec(ppspec: Sequence[ParsedPartitionSpec]) -> list[Any]:
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
    try:
        check_axes_once(Spec(parsed.partitions))
    except DuplicateAxisError as error:
        raise DuplicateAxisError(
            f"{what} must use each mesh axis once, but in {leaf} {error}",
            axis=error.axis,
            dims=error.dims,
        ) from None
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
    if not isinstance(parsed, ParsedPartitionSpec):
        return parsed
    return NamedSharding(mesh, parsed.get_partition_spec())


def get_unconstrained_dims(sharding: JaxSharding) -> set[int]:
    """Return the unconstrained dimensions of a sharding."""
    own = from_jax(sharding)
    if not isinstance(own, NamedSharding):
        return set()
    return {dim for dim, axes in enumerate(own.normal_spec.dims) if axes is None}
