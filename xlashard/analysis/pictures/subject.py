"""Subject of a picture: an array, or a shape with a sharding, and where its tiles are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from xlashard.geometry import Runs, Tiling, replica_runs

if TYPE_CHECKING:
    from xlashard._jax.runtime.shardings import Device

type Places = tuple[int, ...]
"""The coordinates of a tile, one per dimension."""


@dataclass(frozen=True)
class Tiles:
    """Equal tiles; where a dimension doesn't divide, the last ones are smaller or empty."""

    tiling: Tiling
    shape: tuple[int, ...]

    @property
    def addends(self) -> int:
        """Number of partial results that make up each tile; 1 where the tiles are whole."""
        return self.tiling.addends

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many ranges each dimension is cut."""
        return self.tiling.counts

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.tiling.num_devices

    @property
    def tile(self) -> tuple[int, ...]:
        """The shape of the biggest tile."""
        return self.tiling.shard_shape(self.shape, uneven=True)

    @property
    def is_even(self) -> bool:
        """True if all tiles have that shape."""
        return all(n % count == 0 for n, count in zip(self.shape, self.counts, strict=True))

    def cut(self, dim: int, place: int) -> slice:
        """Return one range of a dimension."""
        size, extent = self.shape[dim], self.tile[dim]
        return slice(min(place * extent, size), min((place + 1) * extent, size))

    def holders(self, places: Places, most: int) -> Runs:
        """Return the positions of the devices that hold a tile, as a limited number of runs."""
        return replica_runs(self.tiling.whole, int(np.ravel_multi_index(places, self.counts)), most)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of any size, from the index of each device; some may have no holder.

    Attributes:
        cuts: For each dimension the ranges that anybody holds, in ascending order.
        held: The positions of the holders by the coordinates of the piece.
        num_devices: Number of devices.
        tile: The shape of the biggest piece.
    """

    cuts: tuple[tuple[tuple[int, int], ...], ...]
    held: Mapping[Places, Sequence[int]]
    num_devices: int
    tile: tuple[int, ...]

    @classmethod
    def from_indices(cls, shape: Sequence[int], indices: Sequence[Sequence[Any]]) -> "Pieces":
        """Return the pieces behind one index per device."""
        bounds = [_bounds(shape, index) for index in indices]
        cuts = tuple(tuple(sorted({b[dim] for b in bounds})) for dim in range(len(shape)))
        numbers = [{cut: i for i, cut in enumerate(of_dim)} for of_dim in cuts]
        held: dict[Places, list[int]] = {}
        for position, bound in enumerate(bounds):
            places = tuple(number[cut] for number, cut in zip(numbers, bound, strict=True))
            held.setdefault(places, []).append(position)
        shapes = (tuple(stop - start for start, stop in bound) for bound in bounds)
        return cls(cuts, held, len(bounds), max(shapes, key=math.prod))

    @property
    def addends(self) -> int:
        """Number of partial results that make up each tile: these pieces are whole."""
        return 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many ranges each dimension is cut."""
        return tuple(map(len, self.cuts))

    @property
    def is_even(self) -> bool:
        """True if all pieces have that shape."""
        return all(
            stop - start == n
            for n, c in zip(self.tile, self.cuts, strict=True)
            for start, stop in c
        )

    def cut(self, dim: int, place: int) -> slice:
        """Return one range of a dimension."""
        return slice(*self.cuts[dim][place])

    def holders(self, places: Places, most: int) -> Runs:
        """Return the positions of the devices that hold a piece."""
        return Runs.of(self.held.get(places, ()))


def _bounds(shape: Sequence[int], index: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    whole = (*index, *(slice(None) for _ in shape[len(index) :]))
    bounds = []
    for size, entry in zip(shape, whole, strict=True):
        # The old shardings of pmap say a dimension that they unstack by a number.
        entry = entry if isinstance(entry, slice) else slice(entry, entry + 1)
        start, stop, _ = entry.indices(size)
        bounds.append((start, max(start, stop)))
    return tuple(bounds)


LISTED = 4096
"""Devices that one picture looks at, one by one."""


@dataclass(frozen=True, eq=False)
class PictureSubject:
    """An array, or one that might be, and where its tiles are.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype; None for a shape alone.
        itemsize: Bytes per element; None for a shape alone.
        sharding: The sharding in words.
        memory_kind: The memory that holds the data, where it is not the devices' usual one.
        mesh: Mesh axes with their sizes; empty without a mesh.
        dim_axes: Mesh axes of each dimension, None for an unconstrained one; None without a mesh.
        unreduced: The mesh axes over which the devices hold partial results.
        reduction: Reduction of the unreduced axes: `sum`, `max` or `min`; empty without any.
        devices: The devices by position; None on a mesh without devices.
        placement: Positions of the tiles.
    """

    shape: tuple[int, ...]
    dtype: str | None
    itemsize: int | None
    sharding: str
    memory_kind: str | None
    mesh: tuple[tuple[str, int], ...]
    dim_axes: tuple[tuple[str, ...] | None, ...] | None
    devices: "Sequence[Device] | None"
    placement: Tiles | Pieces
    unreduced: frozenset[str] = frozenset()
    reduction: str = ""

    @property
    def unreduced_along(self) -> tuple[tuple[str, int], ...]:
        """The mesh axes along which the devices hold partial results."""
        return tuple((name, size) for name, size in self.mesh if name in self.unreduced)

    @property
    def copied_along(self) -> tuple[tuple[str, int], ...]:
        """The mesh axes along which each tile is repeated."""
        used = {axis for axes in self.dim_axes or () for axis in axes or ()} | self.unreduced
        return tuple((name, size) for name, size in self.mesh if name not in used and size > 1)

    @cached_property
    def num_hosts(self) -> int | None:
        """Number of processes of its devices, if they are few enough to count."""
        if self.devices is None or len(self.devices) > LISTED:
            return None
        return len({device.process_index for device in self.devices})

    @property
    def nbytes(self) -> int | None:
        """Bytes of all elements."""
        return None if self.itemsize is None else math.prod(self.shape) * self.itemsize

    @property
    def tile_bytes(self) -> int | None:
        """Bytes of the biggest tile."""
        return None if self.itemsize is None else math.prod(self.placement.tile) * self.itemsize
