"""Conversion between partition specs and XLA shardings, with the names of early pjit.

`geometry.Spec` and `geometry.TileAssignment` are today's equivalents. Code from 2022 and 2023 that
inspects shardings imports these names.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, Self

from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.shardings import (
    AbstractMesh,
    JaxSharding,
    Mesh,
)
from xlashard.errors import ArgumentError, ShardingError, TilingError
from xlashard.geometry import Spec, TileAssignment, spec_from_tile_assignment
from xlashard.geometry import explode_superdims as explode_superdims
from xlashard.geometry import strides_for_sizes as strides_for_sizes
from xlashard.geometry import unflatten_array as unflatten_array
from xlashard.geometry import unflatten_superdims as unflatten_superdims
from xlashard.sharding.base import Sharding, XLACompatibleSharding
from xlashard.sharding.convert import from_jax
from xlashard.sharding.gspmd import GSPMDSharding, read_assignment
from xlashard.sharding.named import (
    NamedSharding,
    PartitionSpec,
    grid_of,
    spec_entries,
    spec_of,
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
    """A partition spec, one tuple of mesh axes per dimension.

    Trailing dimensions that are not cut stay in it: `((),)` needs a dimension, `()` does not.

    Args:
        user_spec: The spec that the user wrote.
        partitions: For each dimension its mesh axes, None for an unconstrained one.
        sync: Distance between the two.

    Example:
        >>> ParsedPartitionSpec.from_user_input(PartitionSpec("x", None), "in_axis_resources")
        ParsedPartitionSpec(partitions=(('x',), ()), unsafe_user_spec=P('x', None), sync=2)
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
            ArgumentError: If it is something else.
            SpecEntryError: If one of its entries is no axis name.
            ShardingError: A dimension is unconstrained, and this is not allowed.
        """
        if entry is None:
            return cls(None, ())
        if not isinstance(entry, PartitionSpec):
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
            ShardingError: The spec is further away.
        """
        if self.sync < min_sync:
            raise ShardingError(
                f"{self!r} differs from the spec that the user wrote ({self.sync.name}, required "
                f"{min_sync.name}): use get_partition_spec()"
            )
        return self.unsafe_user_spec

    def get_partition_spec(self) -> PartitionSpec:
        """Return an equivalent partition spec: the user's own while it is in sync."""
        if self.sync is SpecSync.IN_SYNC and isinstance(self.unsafe_user_spec, PartitionSpec):
            return self.unsafe_user_spec
        return get_partition_spec(self)

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
    """A parsed spec without trailing dimensions that are not cut, for comparisons.

    Args:
        parsed_pspec: The spec.
    """

    __slots__ = ()

    def __init__(self, parsed_pspec: ParsedPartitionSpec) -> None:
        super().__init__(
            parsed_pspec.unsafe_user_spec, Spec(parsed_pspec.partitions).dims, parsed_pspec.sync
        )


REPLICATED = CanonicalizedParsedPartitionSpec(ParsedPartitionSpec(None, ()))
"""Replicated spec for any rank."""


def parse_flatten_op_sharding(
    op_sharding: Any, mesh: Mesh | AbstractMesh
) -> list[ParsedPartitionSpec]:
    """Return the specs of an XLA sharding on a mesh; several for a tuple.

    Args:
        op_sharding: An `OpSharding`, an `HloSharding`, its text or a `TileAssignment`.
        mesh: The mesh; its devices in row-major order are those of the sharding.

    Raises:
        ShardingTextError: If it is a text, but not of a sharding.
        TilingError: No spec on that mesh is equivalent.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> mesh = AbstractMesh((2, 4), ("x", "y"))
        >>> [s.partitions for s in parse_flatten_op_sharding("{devices=[1,8]<=[8]}", mesh)]
        [((), ('x', 'y'))]
    """
    assignment = tile_assignment_of(op_sharding)
    parts = assignment.elements if assignment.kind == "tuple" else (assignment,)
    return [_parsed(part, mesh) for part in parts]


def tile_assignment_of(value: Any) -> TileAssignment:
    """Return the tile assignment of an `OpSharding`, an `HloSharding`, or its text.

    Raises:
        ArgumentError: If it is something else.
        ShardingTextError: If it is a text, but not of a sharding.
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


def get_array_mapping(axis_resources: Any) -> Any:
    """Return a dict from each mesh axis to its dimension, in the order of the dimensions.

    Args:
        axis_resources: A parsed or a plain partition spec; other values (`AUTO`, `UNSPECIFIED`)
            are returned unchanged.

    Example:
        >>> get_array_mapping(PartitionSpec(("x", "y"), None, "z"))
        {'x': 0, 'y': 0, 'z': 2}
    """
    if isinstance(axis_resources, PartitionSpec):
        partitions: Partitions = spec_of(axis_resources).dims
    elif isinstance(axis_resources, ParsedPartitionSpec):
        partitions = axis_resources.partitions
    else:
        return axis_resources
    return {axis: dim for dim, axes in enumerate(partitions) for axis in axes or ()}


def get_partition_spec(parsed: ParsedPartitionSpec) -> PartitionSpec:
    """Return the partition spec of a parsed one, with an entry for each of its dimensions."""
    return PartitionSpec(*spec_entries(parsed))


def get_unconstrained_dims(sharding: NamedSharding) -> set[int]:
    """Return the dimensions that a sharding leaves to the partitioner."""
    return {dim for dim, axes in enumerate(sharding.normal_spec.dims) if axes is None}


def to_op_sharding_sharding(sharding: Sharding | JaxSharding, ndim: int) -> GSPMDSharding:
    """Return the same placement of arrays of a rank as bare tiles.

    Args:
        sharding: A sharding of this package or of JAX.
        ndim: The rank of the arrays.

    Raises:
        RankError: If the rank is too low.
        ShardingError: If its tiles depend on more than the rank.
    """
    own = from_jax(sharding)
    if isinstance(own, GSPMDSharding):
        return own
    if not isinstance(own, XLACompatibleSharding):
        raise ShardingError(
            f"the tiles of a {type(own).__name__} depend on the shape: pass its tiling(shape) to "
            "GSPMDSharding"
        )
    tiles = own.rank_tiling(ndim).to_tile_assignment()
    return GSPMDSharding(own.devices, tiles, memory_kind=own.memory_kind)


def get_pspec_from_executable(
    executable: Any, mesh: Mesh
) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
    """Return the specs of the arguments and results of a compiled program.

    Args:
        executable: A compiled stage of pjit or of `jax.jit`, a `StableHLOProgram`, or PJRT's own
            executable.
        mesh: The mesh whose axes to name.

    Returns:
        The specs of the arguments that the program uses, and of its results.

    Raises:
        TilingError: No spec on that mesh is equivalent.
        ShardingError: The compiler does not report its shardings.
    """
    reported = compiler.executable_shardings(runtime_of(executable), mesh.size)
    if reported is None:
        # no-catalogue: no supported compiler does this
        raise ShardingError("the compiler does not report the shardings of this program")
    grid = grid_of(mesh)

    def spec_of_text(text: str) -> PartitionSpec:
        spec = spec_from_tile_assignment(grid, TileAssignment.parse_text(text))
        return PartitionSpec(*spec_entries(spec.dims))

    ins, outs = (tuple(map(spec_of_text, texts)) for texts in reported)
    return ins, outs


def runtime_of(executable: Any) -> Any:
    """Return PJRT's own executable of a compiled stage; a PJRT executable passes unchanged."""
    runtime = getattr(executable, "runtime_executable", None)
    return executable if runtime is None else runtime()
