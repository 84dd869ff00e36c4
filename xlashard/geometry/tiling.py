"""Tilings, which map devices to tiles of an array: all index maths of the package.

A `Tiling` represents devices as positions `0 .. n - 1` in device-assignment order. Tiles are
numbered row-major; a `Tiling` maps each position to a tile number by a few strided steps, or by a
list where no steps exist. All queries are computed from these for just the requested positions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import product
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from xlashard.errors import DivisibilityError, RankError, TilingError, counted
from xlashard.geometry import strides
from xlashard.geometry.divisibility import divisibility_text
from xlashard.geometry.mesh import MeshGrid
from xlashard.geometry.spec import Spec, checked_rank, validate_spec
from xlashard.geometry.strides import Index, cuts_of, slices_of_tiles, tiles_of_indices
from xlashard.geometry.tile_assignment import TileAssignment
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class Tiling:
    """Tiles of arrays of one rank over device positions. Make it with a class method.

    The attributes are a normal form: two tilings are equal exactly when every position holds the
    same tile in both.

    Attributes:
        counts: Tiles per array dimension.
        num_devices: Number of device positions.
        steps: Digits of a position, major to minor, that add up to its tile number; empty where
            `listed` is not.
        listed: The tile number of each position, where no steps exist.
        addends: Number of partial results of a reduction per tile. Above one, `steps` and
            `listed` number these: partial result `i` of tile `t` is `t * addends + i`.
        reduction: The pending reduction: `sum`, `max` or `min`; empty where `addends` is one.
    """

    counts: tuple[int, ...]
    num_devices: int
    steps: strides.Steps = ()
    listed: tuple[int, ...] = ()
    addends: int = 1
    reduction: str = ""

    @classmethod
    def from_spec(cls, grid: MeshGrid, spec: Spec, ndim: int) -> "Tiling":
        """Return the tiling of a spec on a mesh; unconstrained dimensions count as uncut.

        Raises:
            GeometryError: The spec doesn't fit the mesh or the rank.
        """
        validate_spec(spec, grid)
        sizes = grid.shape
        dims = spec.for_rank(ndim)
        unreduced = tuple(a for a in grid.axis_names if a in spec.unreduced)
        addends = math.prod(sizes[a] for a in unreduced)
        tile_strides = dict.fromkeys(grid.axis_names, 0)
        stride = 1
        for axes in reversed((*dims, unreduced)):
            for axis in reversed(axes or ()):
                tile_strides[axis] = stride
                stride *= sizes[axis]
        return cls(
            tuple(math.prod(sizes[a] for a in axes or ()) for axes in dims),
            grid.size,
            strides.merge([(size, tile_strides[axis]) for axis, size in sizes.items()]),
            addends=addends,
            reduction=spec.reduction if addends > 1 else "",
        )

    @classmethod
    def replicated(cls, num_devices: int, ndim: int) -> "Tiling":
        """Return the tiling by which every device holds the whole array."""
        if num_devices < 1:
            raise TilingError(f"a tiling needs at least one device, got {num_devices}")
        return cls((1,) * checked_rank(ndim), num_devices, strides.merge([(num_devices, 0)]))

    @classmethod
    def from_tile_assignment(
        cls, assignment: TileAssignment, ndim: int, num_devices: int | None = None
    ) -> "Tiling":
        """Return the tiling of an HLO sharding; partial results are taken as sums.

        Args:
            assignment: The sharding.
            ndim: Rank of the array.
            num_devices: Number of devices; needed for kinds without one.

        Raises:
            TilingError: The kind has no tiles (manual, unknown, tuple, a maximal one among several
                devices), or the number of devices is missing or disagrees.
            RankError: The assignment is for another rank.
        """
        if assignment.kind != "tiled":
            return _from_untiled(assignment, ndim, num_devices)
        if "manual" in assignment.subgroups:
            raise TilingError(f"{assignment} has a sub-group of manual devices, which has no tiles")
        if assignment.ndim != ndim:
            raise RankError(
                f"{assignment} tiles {counted(assignment.ndim or 0, 'dimension')}, the array has "
                f"{ndim}: give tiles of {counted(ndim, 'dimension')}",
                ndim=ndim,
                needed=assignment.ndim or 0,
            )
        count = math.prod(assignment.dims)
        if num_devices not in (None, count):
            raise TilingError(f"{assignment} is for {count} devices, not {num_devices}")
        addends = assignment.num_unreduced
        tiles = math.prod(assignment.tile_dims) * addends
        steps = strides.inverted(assignment.steps(), tiles) if assignment.is_iota else None
        if steps is None:
            order = assignment.device_array().reshape(-1)
            tile_of = np.empty(count, np.int64)
            tile_of[order] = np.arange(count) // (count // tiles)
            tiling = cls._from_tile_ids(assignment.tile_dims, tile_of)
        else:
            tiling = cls(assignment.tile_dims, count, steps)
        return tiling if addends == 1 else replace(tiling, addends=addends, reduction="sum")

    @classmethod
    def from_indices(cls, shape: Sequence[int], indices: Sequence[Sequence[slice]]) -> "Tiling":
        """Return the tiling behind a list of indices, one per device position.

        A dimension of size 0 has only one index, so it counts as uncut.

        Args:
            shape: Global shape, in elements.
            indices: Per position one slice per dimension; missing trailing ones are whole.

        Raises:
            TilingError: The indices are not equal tiles that cover the array, each held by equally
                many devices.
        """
        return cls._from_tile_ids(*tiles_of_indices(shape, indices))

    @classmethod
    def _from_tile_ids(cls, counts: tuple[int, ...], tile_of: npt.NDArray[np.int64]) -> "Tiling":
        steps = strides.find(tile_of)
        if steps is None:
            return cls(counts, tile_of.size, listed=tuple(tile_of.tolist()))
        return cls(counts, tile_of.size, steps)

    @property
    def ndim(self) -> int:
        """Return the rank of the arrays that it tiles."""
        return len(self.counts)

    @cached_property
    def num_tiles(self) -> int:
        """Number of distinct tiles."""
        return math.prod(self.counts)

    @property
    def num_replicas(self) -> int:
        """Return the number of devices that hold each tile."""
        return self.num_devices // (self.num_tiles * self.addends)

    @property
    def is_replicated(self) -> bool:
        """Return whether every device holds the whole array."""
        return self.num_tiles == self.addends == 1

    @property
    def is_partial(self) -> bool:
        """Return True if the devices hold partial results, which are to be reduced to the array."""
        return self.addends > 1

    @cached_property
    def whole(self) -> "Tiling":
        """Return the tiling of the reduced array, with the same tile on each device."""
        if not self.is_partial:
            return self
        steps = strides.coarser(self.steps, self.addends)
        if self.listed or steps is None:
            return self._from_tile_ids(self.counts, self._places.all // self.addends)
        return Tiling(self.counts, self.num_devices, steps)

    def addend_ids(self) -> npt.NDArray[np.int64]:
        """Return the number of the partial result that each device holds of its tile, in order."""
        return self._places.all % self.addends

    def same_tiles(self, other: "Tiling") -> bool:
        """Return whether every device position holds the same tile in both."""
        return self == other

    def reordered(self, positions: Sequence[int]) -> "Tiling":
        """Return the same tiles on the same devices, listed in another order.

        Args:
            positions: For each new position the one where that device stood; each once.

        Raises:
            TilingError: A position is missing or repeats.
        """
        if sorted(positions) != list(range(self.num_devices)):
            raise TilingError(
                f"{list(positions)} does not list each position 0 .. {self.num_devices - 1} once"
            )
        tiling = self._from_tile_ids(self.counts, self._places.at(positions))
        return replace(tiling, addends=self.addends, reduction=self.reduction)

    def shard_shape(self, shape: Sequence[int], *, uneven: bool = False) -> tuple[int, ...]:
        """Return the shape of one tile, in elements.

        Args:
            shape: Global shape.
            uneven: Allow dimensions that don't divide; then this is the shape of the biggest tile.

        Raises:
            RankError: The shape has another rank.
            DivisibilityError: A dimension doesn't divide, and `uneven` is not set.
        """
        if len(shape) != len(self.counts):
            raise RankError(
                f"shape {tuple(shape)} has rank {len(shape)}, the tiling is for rank {self.ndim}",
                ndim=len(shape),
                needed=self.ndim,
            )
        if uneven:
            return tuple([-(-n // c) for n, c in zip(shape, self.counts, strict=True)])
        for dim, count in enumerate(self.counts):
            if count > 1 and shape[dim] % count:
                text = divisibility_text(dim, shape, count)
                raise DivisibilityError(text, dim=dim, tiles=count, shape=shape)
        return tuple([n // c for n, c in zip(shape, self.counts, strict=True)])

    def tile_ids(self, positions: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
        """Return tile numbers `[...]`, row-major over `counts`.

        Args:
            positions: Device positions `[...]`; all of them, in order, if not given.

        Raises:
            GridError: A position is outside `0 .. num_devices - 1`.
        """
        return self._tiles.all if positions is None else self._tiles.at(positions)

    def replica_ids(self, positions: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
        """Return replica numbers: 0 for the first position of each tile, then 1, and so on.

        Arguments and errors are those of `tile_ids`.
        """
        return self._copies.all if positions is None else self._copies.at(positions)

    def coordinates(self, positions: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
        """Return tile coordinates, `[..., dims]`.

        Arguments and errors are those of `tile_ids`.
        """
        return strides.unravel(self.tile_ids(positions), self.counts)

    def replicas(self, tile: int) -> list[int]:
        """Return the positions that hold a tile, in order of their replica ids.

        Raises:
            TilingError: The tile number is out of range.
        """
        if not 0 <= tile < self.num_tiles:
            raise TilingError(f"tile {tile} is outside 0..{self.num_tiles - 1}")
        if self.listed or self.is_partial:
            return np.flatnonzero(self._tiles.all == tile).tolist()
        return strides.positions_at(self.steps, tile)

    def indices(
        self,
        shape: Sequence[int],
        positions: Sequence[int] | None = None,
        *,
        uneven: bool = False,
    ) -> list[Index]:
        """Return the slices of the global array for each device.

        A dimension in one tile is `slice(None)`; the others have start and stop, also where they
        are empty.

        Args:
            shape: Global shape, in elements.
            positions: Device positions; all of them, in order, if not given.
            uneven: Allow dimensions that don't divide; then the last tiles are smaller or empty.

        Returns:
            One tuple of slices per position. Positions with the same tile may share it.

        Raises:
            RankError: The shape has another rank.
            DivisibilityError: A dimension doesn't divide, and `uneven` is not set.
            GridError: A position is outside `0 .. num_devices - 1`.
        """
        extents = self.shard_shape(shape, uneven=uneven)
        limits = shape if uneven else (None,) * len(extents)
        dims = list(zip(self.counts, extents, limits, strict=True))
        if positions is None:
            return self._spread_tiles(
                list(product(*(cuts_of(range(dim[0]), *dim) for dim in dims)))
            )
        return slices_of_tiles(self._tiles.few(positions), dims)

    def order(self) -> tuple[int, ...]:
        """Return the positions ordered by tile: those of the first tile, then of the second, ..."""
        return tuple(np.argsort(self._places.all, kind="stable").tolist())

    def to_tile_assignment(self) -> TileAssignment:
        """Return the equivalent HLO sharding: an iota if one exists, otherwise a list."""
        if self.is_replicated:
            return TileAssignment.replicated()
        dims, kinds = (*self.counts, self.addends, self.num_replicas), ("unreduced", "replicated")
        if self.listed:
            return TileAssignment.listed(dims, self.order(), kinds)
        sizes = tuple(size for size, _ in self.steps)
        return TileAssignment.iota(dims, sizes, strides.by_stride(self.steps), kinds)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.counts, self.num_devices, self.steps, self.listed, self.addends, self.reduction)
        )

    @cached_property
    def _places(self) -> strides.Numbering:
        listed = np.array(self.listed, np.int64) if self.listed else None
        return strides.Numbering(self.num_devices, self.steps, listed)

    @property
    def _tiles(self) -> strides.Numbering:
        """Return the tile of each position; every use of tiles as slices of an array reads this."""
        if self.is_partial:
            raise TilingError(
                f"each device holds one of {self.addends} partial results of a pending "
                f"{self.reduction}, which is no slice of the array: reduce it first, by "
                "device_put(x, sharding) or jax.sharding.reshard(x, sharding) with a sharding "
                "without unreduced axes"
            )
        return self._places

    @cached_property
    def _copies(self) -> strides.Numbering:
        tiles = self._tiles
        if not self.listed:
            return strides.Numbering(self.num_devices, strides.copies(self.steps))
        copies = np.empty(self.num_devices, np.int64)
        order = np.argsort(tiles.all, kind="stable")
        copies[order] = np.arange(self.num_devices) % self.num_replicas
        return strides.Numbering(self.num_devices, (), copies)

    @cached_property
    def _spread_tiles(self) -> Callable[[list[Index]], list[Index]]:
        """Return a function from the list of tiles to the tile of each position."""
        if self.is_replicated:
            return lambda tiles: tiles * self.num_devices
        ids = self._tiles.all.tolist()
        if ids == list(range(self.num_tiles)):
            return lambda tiles: tiles
        pick = itemgetter(*ids)
        return lambda tiles: list(pick(tiles))


def _from_untiled(assignment: TileAssignment, ndim: int, num_devices: int | None) -> Tiling:
    if assignment.kind in ("replicated", "unreduced"):
        if num_devices is None:
            raise TilingError(f"{assignment} has no number of devices: give num_devices")
        if assignment.kind == "replicated" or num_devices == 1:
            return Tiling.replicated(num_devices, ndim)
        steps = strides.merge([(num_devices, 1)])
        return Tiling((1,) * ndim, num_devices, steps, addends=num_devices, reduction="sum")
    match assignment.kind:
        case "maximal" if num_devices == 1 and assignment.devices == (0,):
            return Tiling.replicated(1, ndim)
        case "maximal":
            raise TilingError(
                f"{assignment} leaves the other devices empty, which equal tiles can't express"
            )
        case "tuple":
            raise TilingError(
                f"{assignment} is for a tuple of {counted(len(assignment.elements), 'value')}, not "
                "for one array: pass one of its elements"
            )
        case kind:
            raise TilingError(f"a {kind} sharding does not specify which device holds which tile")
