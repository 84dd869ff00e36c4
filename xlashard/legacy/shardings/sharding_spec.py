"""`ShardingSpec` of early JAX: the cuts of each dimension, and the device axis of each cut.

A `ShardingSpec` numbers the cuts of an array from its first dimension to its last, then maps them
to the axes of a device grid, major to minor; other axes of the grid hold replicas.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from itertools import groupby, islice, product
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from xlashard.errors import DivisibilityError, RankError, TilingError, counted
from xlashard.geometry import strides
from xlashard.geometry.spec import Spec
from xlashard.geometry.tile_assignment import TileAssignment
from xlashard.geometry.tiling import Tiling
from xlashard.support.lazily import dataclass

type ShardIndex = tuple[slice | int, ...]
"""One entry per dimension: a slice, or the one index that a device holds of an unstacked one."""


def _whole_number(value: Any, what: str, least: int) -> int:
    """Return a size or number as an int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
        raise TilingError(f"{what} must be an integer from {least} on, not {shown}")
    return number


class _Entry:
    """Base class with a short repr: values without names, as in `Chunked((2,))`."""

    def __repr__(self) -> str:
        values = ", ".join(repr(getattr(self, field.name)) for field in fields(cast(Any, self)))
        return f"{type(self).__name__}({values})"


@dataclass(frozen=True, repr=False)
class NoSharding(_Entry):
    """Dimension that is not cut.

    Example:
        >>> ShardingSpec((Chunked((2,)), NoSharding()), (ShardedAxis(0),)).mesh_shape
        (2,)
    """


@dataclass(frozen=True, repr=False)
class Chunked(_Entry):
    """Dimension that is cut into equal chunks.

    Attributes:
        chunks: Into how many, as one or several factors, major to minor; each factor takes a
            device axis of its own.

    Raises:
        TilingError: A factor is no integer from 1 on.

    Example:
        >>> ShardingSpec((NoSharding(), Chunked((4,))), (ShardedAxis(0),)).mesh_shape
        (4,)
    """

    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, Sequence) or isinstance(self.chunks, str):
            raise TilingError(
                f"the chunks of a dimension must be a list of factors, not {self.chunks!r}: write "
                "Chunked((4,))"
            )
        checked = tuple(_whole_number(n, "a number of chunks", 1) for n in self.chunks)
        object.__setattr__(self, "chunks", checked)


@dataclass(frozen=True, repr=False)
class Unstacked(_Entry):
    """Dimension of which each device holds one index, so that its shard lacks this dimension.

    Attributes:
        size: Of the dimension, in elements.

    Raises:
        TilingError: The size is no integer from 1 on.

    Example:
        >>> ShardingSpec((Unstacked(8), NoSharding()), (ShardedAxis(0),)).mesh_shape
        (8,)
    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _whole_number(self.size, "an unstacked size", 1))


@dataclass(frozen=True, repr=False)
class ShardedAxis(_Entry):
    """Axis of the device grid that takes a cut of the array.

    Attributes:
        axis: The number of the cut, counted over all dimensions from the first on.

    Raises:
        TilingError: It is no integer from 0 on.

    Example:
        >>> cuts = (Chunked((2,)), Chunked((4,)))
        >>> ShardingSpec(cuts, (ShardedAxis(1), ShardedAxis(0))).mesh_shape
        (4, 2)
    """

    axis: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", _whole_number(self.axis, "a sharded axis", 0))


@dataclass(frozen=True, repr=False)
class Replicated(_Entry):
    """Axis of the device grid along which devices hold the same.

    Attributes:
        replicas: Its size.

    Raises:
        TilingError: It is no integer from 1 on.

    Example:
        >>> ShardingSpec((Chunked((2,)),), (ShardedAxis(0), Replicated(4))).mesh_shape
        (2, 4)
    """

    replicas: int

    def __post_init__(self) -> None:
        number = _whole_number(self.replicas, "a number of replicas", 1)
        object.__setattr__(self, "replicas", number)


type DimSharding = NoSharding | Chunked | Unstacked
type MeshAxis = ShardedAxis | Replicated


@dataclass(frozen=True, repr=False)
class ShardingSpec(_Entry):
    """Cuts of arrays of one rank, mapped to a grid of devices.

    Attributes:
        sharding: One entry per dimension of the array.
        mesh_mapping: One entry per axis of the device grid, major to minor.

    Raises:
        TilingError: An entry is of another kind, or the grid does not take every cut exactly once.

    Example:
        >>> spec = ShardingSpec((Chunked((2,)), NoSharding()), (Replicated(2), ShardedAxis(0)))
        >>> spec.mesh_shape
        (2, 2)
        >>> spec.tiling.tile_ids().tolist()
        [0, 1, 0, 1]
    """

    sharding: tuple[DimSharding, ...]
    mesh_mapping: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharding", _entries(self, "sharding", DimSharding.__value__))
        object.__setattr__(self, "mesh_mapping", _entries(self, "mesh_mapping", MeshAxis.__value__))
        cuts = self.cuts
        used = [entry.axis for entry in self.mesh_mapping if isinstance(entry, ShardedAxis)]
        if sorted(used) != list(range(len(cuts))):
            raise TilingError(
                f"{self.sharding} cuts an array {counted(len(cuts), 'time')} ({_listed(cuts)}), "
                f"but mesh_mapping takes the cuts {_listed(used)}: give each of "
                f"{_listed([ShardedAxis(n) for n in range(len(cuts))])} exactly once"
            )

    @property
    def ndim(self) -> int:
        """Return the rank of the arrays that the spec fits."""
        return len(self.sharding)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return the number of parts of each cut, in the numbering of `ShardedAxis`."""
        return tuple(size for entry in self.sharding for size in _factors(entry))

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the tiles per array dimension."""
        return tuple(math.prod(_factors(entry)) for entry in self.sharding)

    @property
    def unstacked_dims(self) -> tuple[int, ...]:
        """Return the dimensions that pieces may do without."""
        return tuple(n for n, entry in enumerate(self.sharding) if isinstance(entry, Unstacked))

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Return the sizes of the device grid's axes."""
        cuts = self.cuts
        return tuple(
            cuts[entry.axis] if isinstance(entry, ShardedAxis) else entry.replicas
            for entry in self.mesh_mapping
        )

    @property
    def num_devices(self) -> int:
        """Number of devices in the grid."""
        return math.prod(self.mesh_shape)

    def __getstate__(self) -> dict[str, object]:
        return {"sharding": self.sharding, "mesh_mapping": self.mesh_mapping}

    @cached_property
    def tiling(self) -> Tiling:
        """Return the tiling over device positions, row-major in the grid.

        An unstacked dimension has as many tiles as it has elements, each of size 1.
        """
        tile_strides = strides.row_major(self.cuts)
        digits = [
            (size, tile_strides[entry.axis] if isinstance(entry, ShardedAxis) else 0)
            for entry, size in zip(self.mesh_mapping, self.mesh_shape, strict=True)
        ]
        return Tiling(self.counts, self.num_devices, strides.merge(digits))

    def on_axes(self, names: Sequence[str]) -> Spec:
        """Return the partition spec with the same tiles on a mesh of the grid's shape.

        Args:
            names: Of the axes of that mesh.
        """
        by_cut = {
            entry.axis: name
            for entry, name in zip(self.mesh_mapping, names, strict=True)
            if isinstance(entry, ShardedAxis)
        }
        left = iter(by_cut[cut] for cut in range(len(by_cut)))
        return Spec(tuple(tuple(islice(left, len(_factors(e)))) for e in self.sharding))

    def to_tile_assignment(self) -> TileAssignment:
        """Return the HLO sharding with the same tiles."""
        return self.tiling.to_tile_assignment()

    def check_rank(self, ndim: int) -> None:
        """Check that the spec fits arrays of this rank.

        Raises:
            RankError: They have another rank.
        """
        if ndim != self.ndim:
            raise RankError(
                f"the array has {counted(ndim, 'dimension')}, but {self} is for {self.ndim}: give "
                "one of NoSharding(), Chunked(...) and Unstacked(...) for each dimension",
                ndim=ndim,
                needed=self.ndim,
            )

    def check_unstacked(self, shape: Sequence[int]) -> None:
        """Check rank and unstacked dimensions of a shape, but not whether the others divide.

        Raises:
            RankError: It has another rank.
            DivisibilityError: A dimension is not of the size that it is unstacked by.
        """
        self.check_rank(len(shape))
        for dim in self.unstacked_dims:
            count = self.counts[dim]
            if shape[dim] != count:
                advice = ""
                if shape[dim] % count == 0:
                    advice = f": write Chunked(({count},)) for pieces of {shape[dim] // count}"
                raise DivisibilityError(
                    f"dimension {dim} of shape {tuple(shape)} has size {shape[dim]}, but "
                    f"{self.sharding[dim]} gives each device one index of {count}{advice}",
                    dim=dim,
                    tiles=count,
                    shape=shape,
                )

    def check_shape(self, shape: Sequence[int]) -> None:
        """Check that the spec fits an array of this shape.

        Raises:
            RankError: It has another rank.
            DivisibilityError: A dimension can't be cut into equal chunks, or is not of the size
                that it is unstacked by.
        """
        self.check_unstacked(shape)
        self.tiling.shard_shape(shape)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a shard, in elements, without the unstacked dimensions.

        Raises:
            GeometryError: The spec doesn't fit the shape.
        """
        self.check_shape(shape)
        return without_dims(self.tiling.shard_shape(shape), self.unstacked_dims)

    def indices(self, shape: Sequence[int]) -> npt.NDArray[np.object_]:
        """Return the slices of an array for each device of the grid.

        Args:
            shape: Of the array, in elements.

        Returns:
            Tuples of a slice per dimension, or of a number where it is unstacked, in an array of
            the grid's shape.

        Raises:
            GeometryError: The spec doesn't fit the shape.
        """
        self.check_shape(shape)
        held = self.tiling.indices(shape)
        out = np.empty(self.mesh_shape, object)
        places = product(*(range(size) for size in self.mesh_shape))
        for place, index in zip(places, held, strict=True):
            out[place] = at_numbers(index, self.unstacked_dims)
        return out


def at_numbers(index: tuple[slice, ...], dims: Sequence[int]) -> ShardIndex:
    """Return an index with integers in place of one-element slices of some dimensions."""
    if not dims:
        return index
    # A dimension of a single element is in one tile, whose slice has no bounds.
    return tuple((cut.start or 0) if dim in dims else cut for dim, cut in enumerate(index))


def without_dims(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without some of its dimensions."""
    return tuple(size for dim, size in enumerate(shape) if dim not in dims)


def spec_over_one_dim(
    ndim: int, dim: int | None, parts: int, *, unstacked: bool = False
) -> ShardingSpec:
    """Return the spec that maps one dimension to an equal number of devices.

    Args:
        ndim: Rank of the arrays.
        dim: The dimension; None for replicas on all devices.
        parts: Number of devices.
        unstacked: Whether the dimension is `Unstacked`.
    """
    if dim is None:
        return ShardingSpec((NoSharding(),) * ndim, (Replicated(parts),))
    cut = Unstacked(parts) if unstacked else Chunked((parts,))
    whole = (NoSharding(),)
    return ShardingSpec((*whole * dim, cut, *whole * (ndim - dim - 1)), (ShardedAxis(0),))


def _factors(entry: DimSharding) -> tuple[int, ...]:
    match entry:
        case Chunked(chunks):
            return chunks
        case Unstacked(size):
            return (size,)
        case _:
            return ()


def _entries(spec: ShardingSpec, name: str, kinds: Any) -> tuple[Any, ...]:
    value = getattr(spec, name)
    names = ", ".join(kind.__name__ for kind in kinds.__args__)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TilingError(f"{name} must be a list of {names}, not {value!r}")
    for number, entry in enumerate(value):
        if not isinstance(entry, kinds):
            raise TilingError(f"{name}[{number}] must be one of {names}, not {entry!r}")
    return tuple(value)


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"


type _Digit = tuple[int, int, int]
"""Dimension, size and tile stride of a part of a step that is within one dimension."""


def sharding_spec_from_tiling(tiling: Tiling) -> ShardingSpec:
    """Return the sharding spec with the same tiles on the same device positions.

    Args:
        tiling: Which tile each position holds.

    Returns:
        The spec with the fewest cuts and the smallest device grid.

    Raises:
        TilingError: No grid of the devices has the tiles in that order.

    Example:
        >>> sharding_spec_from_tiling(Tiling((2, 1), 4, ((2, 0), (2, 1))))
        ShardingSpec((Chunked((2,)), NoSharding()), (Replicated(2), ShardedAxis(0)))
    """
    if tiling.is_partial:
        raise TilingError(
            f"each device holds one of {tiling.addends} partial results of a {tiling.reduction}: "
            "a ShardingSpec has no unreduced axes"
        )
    if tiling.listed:
        raise TilingError(
            f"no grid of {tiling.num_devices} devices has the tiles {tiling.counts} in this order: "
            "a ShardingSpec can't express it"
        )
    grid = [part for step in tiling.steps for part in _within_dims(tiling.counts, step)]
    # Cuts count from the major one on; of one dimension they stand together.
    cuts = sorted({digit for digit in grid if isinstance(digit, tuple)}, key=lambda d: -d[2])
    chunks = {
        dim: tuple(size for _, size, _ in of_dim)
        for dim, of_dim in groupby(cuts, key=lambda digit: digit[0])
    }
    dims: list[DimSharding] = [
        Chunked(chunks[dim]) if dim in chunks else NoSharding() for dim in range(tiling.ndim)
    ]
    mapping: list[MeshAxis] = [
        ShardedAxis(cuts.index(part)) if isinstance(part, tuple) else part for part in grid
    ]
    return ShardingSpec(tuple(dims), tuple(mapping))


def _within_dims(counts: tuple[int, ...], step: tuple[int, int]) -> list[_Digit | Replicated]:
    """Return the parts of a step, major to minor, each within one dimension or over replicas."""
    size, stride = step
    if stride == 0:
        return [Replicated(size)]
    parts: list[_Digit | Replicated] = []
    for dim, inner in enumerate(strides.row_major(counts)):
        low, high = max(stride, inner), min(stride * size, inner * counts[dim])
        if high > low:
            parts.append((dim, high // low, low))
    if math.prod(part[1] for part in parts if isinstance(part, tuple)) != size:
        raise TilingError(
            f"{size} devices in a row step over the borders of the dimensions that {counts} tiles "
            "cut: a ShardingSpec can't express it"
        )
    return parts
