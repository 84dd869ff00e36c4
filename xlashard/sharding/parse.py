"""Between partition specs and the shardings that XLA writes, in the words of pjit's early days.

Today's classes say the same: a spec in normal form is a `geometry.Spec`, an HLO sharding a
`geometry.TileAssignment`. Code from 2022 and 2023 that takes shardings apart finds its names here.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, Self

from xlashard._jax.runtime import compiler
from xlashard._jax.runtime.shardings import (
    AbstractMesh,
    HloSharding,
    JaxSharding,
    Mesh,
    OpSharding,
    hlo_text,
)
from xlashard.errors import ArgumentError, ShardingError, TilingError
from xlashard.geometry import (
    Spec,
    TileAssignment,
    Tiling,
    explode_superdims,
    spec_from_tile_assignment,
    strides_for_sizes,
    unflatten_array,
    unflatten_superdims,
)
from xlashard.sharding.base import Sharding, XLACompatibleSharding
from xlashard.sharding.convert import from_jax
from xlashard.sharding.named import NamedSharding, PartitionSpec, grid_of, spec_of
from xlashard.sharding.op import GSPMDSharding

__all__ = [
    "REPLICATED",
    "CanonicalizedParsedPartitionSpec",
    "ParsedPartitionSpec",
    "SpecSync",
    "explode_superdims",
    "get_array_mapping",
    "get_partition_spec",
    "get_pspec_from_executable",
    "get_unconstrained_dims",
    "parse_flatten_op_sharding",
    "strides_for_sizes",
    "tile_assignment_of",
    "to_op_sharding_sharding",
    "unflatten_array",
    "unflatten_superdims",
]

type Partitions = tuple[tuple[str, ...] | None, ...]
"""For each dimension the mesh axes that cut it, major to minor; None leaves it open."""


class SpecSync(IntEnum):
    """How far a parsed spec has moved from what its user wrote."""

    OUT_OF_SYNC = 0
    """A dimension that is cut was inserted."""
    DIM_PERMUTE = 1
    """Dimensions have moved, but none is cut that was not."""
    IN_SYNC = 2
    """It says what was written."""


class ParsedPartitionSpec:
    """A partition spec, one tuple of mesh axes per dimension.

    Trailing dimensions that are not cut stay in it: `((),)` needs a dimension, `()` does not.

    Args:
        user_spec: What the user wrote.
        partitions: For each dimension its mesh axes, None for an unconstrained one.
        sync: How far the two have moved apart.

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
        """Reads what somebody gave as a resource.

        Args:
            entry: A PartitionSpec, or None for the replicated one.
            arg_name: The argument that it was given for, in errors.
            allow_unconstrained_dims: Whether the partitioner may be left a dimension.

        Raises:
            ArgumentError: If it is something else.
            SpecEntryError: If one of its entries is no axis name.
            ShardingError: If it leaves a dimension open where that is not allowed.
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
        """What the user wrote.

        Raises:
            ShardingError: If it says something else by now.
        """
        return self.unsynced_user_spec(SpecSync.IN_SYNC)

    def unsynced_user_spec(self, min_sync: SpecSync) -> Any:
        """What the user wrote, if it has not moved further from this than that.

        Raises:
            ShardingError: If it has.
        """
        if self.sync < min_sync:
            raise ShardingError(
                f"{self!r} is not what its user wrote any more ({self.sync.name}, wanted "
                f"{min_sync.name}): use get_partition_spec()"
            )
        return self.unsafe_user_spec

    def get_partition_spec(self) -> PartitionSpec:
        """A partition spec that says the same, as the user wrote it if that is still true."""
        if self.sync is SpecSync.IN_SYNC and isinstance(self.unsafe_user_spec, PartitionSpec):
            return self.unsafe_user_spec
        return get_partition_spec(self)

    def insert_axis_partitions(
        self, dim: int, val: tuple[str, ...] | None
    ) -> "ParsedPartitionSpec":
        """The spec of an array with one more dimension.

        Args:
            dim: Its position, from 0.
            val: Its mesh axes, `()` for uncut, None for open.
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
"""The spec that cuts nothing, whatever the rank."""


def parse_flatten_op_sharding(
    op_sharding: Any, mesh: Mesh | AbstractMesh
) -> list[ParsedPartitionSpec]:
    """The specs that say on a mesh what XLA's sharding says; several for a tuple.

    Args:
        op_sharding: An `OpSharding`, an `HloSharding`, its text or a `TileAssignment`.
        mesh: The mesh; its devices in row-major order are those that the sharding counts.

    Raises:
        ShardingTextError: If it is a text, but not of a sharding.
        TilingError: If no spec on that mesh says it.

    Example:
        >>> from jax.sharding import AbstractMesh
        >>> mesh = AbstractMesh((2, 4), ("x", "y"))
        >>> [s.partitions for s in parse_flatten_op_sharding("{devices=[1,8]<=[8]}", mesh)]
        [((), ('x', 'y'))]
    """
    assignment = tile_assignment_of(op_sharding)
    parts = assignment.elements if assignment.kind == "tuple" else (assignment,)
    return [_parsed(part, mesh) for part in parts]


def tile_assignment_of(given: Any) -> TileAssignment:
    """The tiles of what XLA writes: an `OpSharding`, an `HloSharding`, or its text.

    Raises:
        ArgumentError: If it is something else.
        ShardingTextError: If it is a text, but not of a sharding.
    """
    if isinstance(given, TileAssignment):
        return given
    if isinstance(given, OpSharding | HloSharding):
        return TileAssignment.parse_text(hlo_text(given))
    if isinstance(given, str):
        return TileAssignment.parse_text(given)
    raise ArgumentError(
        f"an XLA sharding is an OpSharding, an HloSharding, a TileAssignment or HLO text, not "
        f"{type(given).__name__}"
    )


def _parsed(assignment: TileAssignment, mesh: Mesh | AbstractMesh) -> ParsedPartitionSpec:
    try:
        spec = spec_from_tile_assignment(grid_of(mesh), assignment)
    except TilingError as error:
        raise TilingError(
            f"no spec on the mesh says {assignment.to_text()}: {error}; keep it as "
            f"GSPMDSharding(devices, {assignment.to_text()!r})"
        ) from None
    if assignment.ndim is None:
        return CanonicalizedParsedPartitionSpec(ParsedPartitionSpec(None, spec.dims))
    return ParsedPartitionSpec(None, spec.for_rank(assignment.ndim))


def get_array_mapping(axis_resources: Any) -> Any:
    """From each mesh axis to the dimension that it cuts, in the order of the dimensions.

    Args:
        axis_resources: A parsed or a plain partition spec; anything else (`AUTO`, `UNSPECIFIED`)
            is given back as it is.

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
    """The partition spec of a parsed one, with an entry for each of its dimensions."""
    entries = []
    for axes in parsed:
        if axes is None:
            entries.append(PartitionSpec.UNCONSTRAINED)
        else:
            entries.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*entries)


def get_unconstrained_dims(sharding: NamedSharding) -> set[int]:
    """The dimensions that a sharding leaves to the partitioner."""
    return {dim for dim, axes in enumerate(sharding.normal_spec.dims) if axes is None}


def to_op_sharding_sharding(sharding: Sharding | JaxSharding, ndim: int) -> GSPMDSharding:
    """The same placement of arrays of a rank as bare tiles.

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
            f"the tiles of a {type(own).__name__} depend on the shape: give its tiling(shape) to "
            "GSPMDSharding"
        )
    tiling: Tiling = own.rank_tiling(ndim)
    return GSPMDSharding(own.devices, tiling.to_tile_assignment(), memory_kind=own.memory_kind)


def get_pspec_from_executable(
    executable: Any, mesh: Mesh
) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
    """The specs by which a compiled program takes its arguments and gives its results.

    Args:
        executable: A compiled stage of pjit or of `jax.jit`, a `StableHLOProgram`, or PJRT's own
            executable.
        mesh: The mesh whose axes to name.

    Returns:
        The specs of the arguments that the program uses, and of its results.

    Raises:
        TilingError: If no spec on that mesh says it.
        ShardingError: If the compiler does not tell.
    """
    reported = compiler.executable_shardings(runtime_of(executable), mesh.size)
    if reported is None:
        # no-catalogue: no supported compiler does this
        raise ShardingError("the compiler does not tell how it dealt out this program's values")
    grid = grid_of(mesh)
    ins, outs = (tuple(_spec_of_text(text, grid) for text in texts) for texts in reported)
    return ins, outs


def runtime_of(executable: Any) -> Any:
    """PJRT's own executable of a compiled stage; itself, if it is one."""
    runtime = getattr(executable, "runtime_executable", None)
    return executable if runtime is None else runtime()


def _spec_of_text(text: str, grid: Any) -> PartitionSpec:
    spec = spec_from_tile_assignment(grid, TileAssignment.parse_text(text))
    return get_partition_spec(ParsedPartitionSpec(None, spec.dims))
