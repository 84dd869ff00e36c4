"""Positions of the tiles of an array: slices and holders of the requested tiles."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xlashard.geometry import Runs, Tiling, replica_runs

type Places = tuple[int, ...]
"""The coordinates of a tile, one per dimension."""


def tile_number(places: Places, counts: Sequence[int]) -> int:
    """Return the number of a tile, row-major."""
    number = 0
    for place, count in zip(places, counts, strict=True):
        number = number * count + place
    return number


class TileLayout(Protocol):
    """Sharding and shape, as needed by a picture."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many ranges each dimension is cut."""
        ...

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        ...

    @property
    def tile(self) -> tuple[int, ...]:
        """The shape of the biggest tile."""
        ...

    @property
    def is_even(self) -> bool:
        """True if all tiles have that shape."""
        ...

    @property
    def addends(self) -> int:
        """Number of partial results that make up each tile; 1 where the tiles are whole."""
        ...

    def cut(self, dim: int, place: int) -> slice:
        """Return one range of a dimension."""
        ...

    def holders(self, places: Places, most: int) -> Runs:
        """Return the positions of the devices that hold a tile, as a limited number of runs."""
        ...


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
        return replica_runs(self.tiling.whole, tile_number(places, self.counts), most)


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
