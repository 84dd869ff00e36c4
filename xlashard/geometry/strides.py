"""Index arithmetic: mixed-radix layouts of device positions, and the slices of tiles.

Every partition spec maps a device position to a tile by the position's digits in some mixed radix:
the tile is the sum of digit times stride. A handful of steps represents the whole pod, and the tile
of one device costs the same on 8 devices as on 65,536. A step with stride 0 replicates: its digit
does not change the tile.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from xlashard.errors import GridError, TilingError, counted

MOST_LISTED = 1 << 26
"""Most positions to list; the number in a text may be arbitrarily large."""

type Step = tuple[int, int]
"""`(size, stride)` of one digit."""

type Steps = tuple[Step, ...]
"""Digits of a position, major to minor."""


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def prime_factors(number: int) -> list[int]:
    """Return the prime factors, largest first."""
    primes, factor = [], 2
    while number > 1:
        if number % factor == 0:
            primes.append(factor)
            number //= factor
        else:
            factor = factor + 1 if factor * factor <= number else number
    return primes[::-1]


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return strides, in elements, of a dense array whose last dimension is fastest."""
    strides = []
    stride = 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def merge(steps: Sequence[Step]) -> Steps:
    """Return the shortest equivalent list of steps; equal maps have equal lists."""
    merged: list[Step] = []
    for size, stride in steps:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def place[T: (int, npt.NDArray[np.int64])](steps: Steps, positions: T) -> T:
    """Return the places of positions: of one position, or of an array of positions."""
    placed = positions * 0
    for size, stride in reversed(steps):
        if stride:
            placed += positions % size * stride
        positions = positions // size
    return placed


def place_all(steps: Steps) -> npt.NDArray[np.int64]:
    """Return the place of every position, in order.

    Raises:
        GridError: The number of positions is above `MOST_LISTED`.
    """
    count = math.prod(size for size, _ in steps)
    if count > MOST_LISTED:
        raise GridError(f"{count} devices are too many to go through one by one")
    placed = np.zeros(1, np.int64)
    for size, stride in steps:
        placed = (placed[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return placed


def positions_at(steps: Steps, place: int) -> list[int]:
    """Return the positions of a place, in ascending order of their replica digits."""
    positions = [0]
    position_strides = row_major([size for size, _ in steps])
    for (size, stride), by in zip(steps, position_strides, strict=True):
        digits = [place // stride % size] if stride else range(size)
        positions = [position + digit * by for position in positions for digit in digits]
    return positions


def unravel(places: npt.NDArray[np.int64], sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the coordinates `[..., dims]` of row-major places `[...]` in a dense array."""
    coordinates = np.empty((*places.shape, len(sizes)), np.int64)
    for dim in reversed(range(len(sizes))):
        places, coordinates[..., dim] = np.divmod(places, sizes[dim])
    return coordinates


def copies(steps: Steps) -> Steps:
    """Return the steps that number the positions of each place from 0."""
    numbered: list[Step] = []
    stride = 1
    for size, old in reversed(steps):
        numbered.append((size, 0 if old else stride))
        stride *= 1 if old else size
    return tuple(reversed(numbered))


def find(places: npt.NDArray[np.int64]) -> Steps | None:
    """Return the merged steps behind a list of places, or `None` where no steps exist.

    Args:
        places: Where each position goes, `[positions]`; every place from 0 on, equally often.
    """
    if not places.size or places[0] != 0:
        return None
    steps: list[Step] = []
    while places.size > 1:
        stride = int(places[1])
        run = np.arange(places.size, dtype=np.int64) * stride
        broken = np.flatnonzero(places != run)
        size = int(broken[0]) if broken.size else places.size
        if places.size % size:
            return None
        rows = places.reshape(-1, size)
        if not np.array_equal(rows, rows[:, :1] + run[:size]):
            return None
        steps.append((size, stride))
        places = rows[:, 0]
    return tuple(reversed(steps))


def split(steps: Steps, sizes: Sequence[int]) -> list[Steps] | None:
    """Cut the digits into one group per size, or `None` where a digit lies across a border.

    Args:
        steps: Digits, major to minor.
        sizes: Product of the digits of each group, major to minor.
    """
    left = list(steps)
    groups: list[Steps] = []
    for needed in reversed(sizes):
        group: list[Step] = []
        while needed > 1:
            size, stride = left.pop()
            if size > needed:
                if size % needed:
                    return None
                left.append((size // needed, stride * needed))
                size = needed
            if needed % size:
                return None
            group.append((size, stride))
            needed //= size
        groups.append(tuple(reversed(group)))
    return list(reversed(groups))


def coarser(steps: Steps, factor: int) -> Steps | None:
    """Return the steps of places in units of `factor`; None where a digit crosses the border."""
    out: list[Step] = []
    for size, stride in steps:
        if not stride or stride * size <= factor:
            out.append((size, 0))
        elif stride >= factor and stride % factor == 0:
            out.append((size, stride // factor))
        elif factor % stride or size % (factor // stride):
            return None
        else:
            inner = factor // stride
            out += [(size // inner, 1), (inner, 0)]
    return merge(out)


def inverted(steps: Steps, tiles: int) -> Steps | None:
    """Return the steps from device to tile; None where digits cross tiles and replicas.

    Args:
        steps: Digits of the device at each place; the places of a tile are adjacent.
        tiles: The number of tiles.
    """
    count = math.prod(size for size, _ in steps)
    parts = split(steps, (tiles, count // tiles))
    if parts is None:
        return None
    tile_digits, copy_digits = parts
    tile_strides = row_major([size for size, _ in tile_digits])
    digits = [
        (device_stride, size, tile_stride)
        for (size, device_stride), tile_stride in zip(tile_digits, tile_strides, strict=True)
    ]
    digits += [(device_stride, size, 0) for size, device_stride in copy_digits]
    return merge([(size, tile) for _, size, tile in sorted(digits, reverse=True)])


def by_stride(steps: Steps) -> tuple[int, ...]:
    """Return indices of the steps by falling stride; steps of replicas come last."""
    moving = sorted((i for i, s in enumerate(steps) if s[1]), key=lambda i: -steps[i][1])
    return (*moving, *(i for i, s in enumerate(steps) if not s[1]))


class Numbering:
    """A number for every device position, computed for the requested positions.

    Args:
        count: Number of positions.
        steps: Digits that add up to the number.
        values: The numbers, `[count]`, where no steps exist.
    """

    # Below this many positions plain integers are faster than arrays.
    _FEW = 48

    def __init__(
        self, count: int, steps: Steps, values: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._count = count
        self._steps = steps
        self._values = values

    @cached_property
    def all(self) -> npt.NDArray[np.int64]:
        """Return the numbers of all positions in order, read-only."""
        values = place_all(self._steps) if self._values is None else self._values
        values.flags.writeable = False
        return values

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the numbers of the positions `[...]`."""
        needed = np.asarray(positions, np.int64)
        check_positions(needed, self._count)
        placed = place(self._steps, needed) if self._values is None else self.all[needed]
        return np.asarray(placed)

    def few(self, positions: Sequence[int]) -> list[int]:
        """Return the numbers of a list of positions; the fastest for a handful of positions."""
        if self._values is not None or len(positions) > self._FEW:
            return self.at(positions).tolist()
        for position in positions:
            if not 0 <= position < self._count:
                raise GridError(f"device position {position} is outside 0..{self._count - 1}")
        return [place(self._steps, int(position)) for position in positions]


def check_positions(positions: npt.NDArray[np.int64], count: int) -> None:
    """Raise a `GridError` if a position lies outside `0 .. count - 1`."""
    if not positions.size:
        return
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= count:
        raise GridError(f"device position {low if low < 0 else high} is outside 0..{count - 1}")


type Index = tuple[slice, ...]
"""One slice per dimension of the global array."""


def tiles_of_indices(
    shape: Sequence[int], indices: Sequence[Sequence[slice]]
) -> tuple[tuple[int, ...], npt.NDArray[np.int64]]:
    """Recognise equal tiles.

    Args:
        shape: Global shape, in elements.
        indices: Per device one slice per dimension; missing trailing ones are whole.

    Returns:
        Tiles per dimension, and the row-major number of each device's tile, `[devices]`.

    Raises:
        TilingError: The indices are not equal tiles that cover the array, each held by equally
            many devices.
    """
    if not len(indices):
        raise TilingError("no indices: a tiling needs at least one device")
    bounds = np.array(
        [_bounds(position, shape, index) for position, index in enumerate(indices)],
        dtype=np.int64,
    ).reshape(len(indices), len(shape), 2)
    cuts = [_equal_cuts(dim, size, bounds[:, dim]) for dim, size in enumerate(shape)]
    counts = tuple(count for _, count in cuts)
    if math.prod(counts) > len(indices):
        raise TilingError(
            f"{counted(len(indices), 'device')} can't cover the {math.prod(counts)} tiles {counts} "
            f"that shape {tuple(shape)} is cut into"
        )
    tile_of = np.zeros(len(indices), np.int64)
    for coordinates, count in cuts:
        tile_of = tile_of * count + coordinates
    held = np.bincount(tile_of, minlength=math.prod(counts))
    if held.min() != held.max():
        raise TilingError(_uneven_copies(held, counts))
    return counts, tile_of


def _bounds(position: int, shape: Sequence[int], index: Sequence[slice]) -> list[tuple[int, int]]:
    """Return start and stop per dimension of one device's index."""
    if not isinstance(index, tuple | list) or len(index) > len(shape):
        raise TilingError(
            f"the index {index!r} of device {position} is not a tuple of at most "
            f"{counted(len(shape), 'slice')}, one per dimension of shape {tuple(shape)}"
        )
    bounds: list[tuple[int, int]] = []
    for dim, size in enumerate(shape):
        cut = index[dim] if dim < len(index) else slice(None)
        if not isinstance(cut, slice) or cut.step not in (None, 1):
            raise TilingError(
                f"the index of device {position} has {cut!r} for dimension {dim}; "
                "tiles need a slice of step 1"
            )
        start, stop, _ = cut.indices(size)
        bounds.append((start, max(start, stop)))
    return bounds


def _equal_cuts(
    dim: int, size: int, bounds: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the tile coordinate of every device along one dimension, and the number of tiles."""
    if size == 0:
        return np.zeros(len(bounds), np.int64), 1
    starts, extents = bounds[:, 0], bounds[:, 1] - bounds[:, 0]
    extent = int(extents[0])
    odd = np.flatnonzero((extents != extent) | (starts % max(extent, 1) != 0))
    if extent == 0 or size % extent or odd.size:
        shown = sorted({(int(a), int(b)) for a, b in bounds[[0, *odd[:1]]]})
        raise TilingError(
            f"dimension {dim} of size {size} is not cut into equal tiles: devices hold "
            f"{' and '.join(f'{a}..{b}' for a, b in shown)} of it"
        )
    return starts // extent, size // extent


def _uneven_copies(held: npt.NDArray[np.int64], counts: Sequence[int]) -> str:
    least, most = int(held.argmin()), int(held.argmax())
    at = [tuple(int(c) for c in np.unravel_index(t, counts)) for t in (least, most)]
    return (
        f"the tiles {tuple(counts)} are not held by equally many devices: tile {at[0]} by "
        f"{held[least]}, tile {at[1]} by {held[most]}"
    )


def cuts_of(coordinates: Sequence[int], count: int, extent: int, limit: int | None) -> list[slice]:
    """Return the slices at coordinates of a dimension in `count` tiles, cut off at `limit`."""
    if count == 1:
        return [slice(None)] * len(coordinates)
    if limit is None:
        return [slice(c * extent, (c + 1) * extent) for c in coordinates]
    return [slice(min(c * extent, limit), min((c + 1) * extent, limit)) for c in coordinates]


def slices_of_tiles(tiles: list[int], dims: Sequence[tuple[int, int, int | None]]) -> list[Index]:
    """Return the slices of each tile.

    Args:
        tiles: Row-major tile numbers.
        dims: Number of tiles, extent and limit per dimension, as for `cuts_of`.
    """
    if not dims:
        return [()] * len(tiles)
    columns: list[list[slice]] = []
    for dim in reversed(dims):
        count = dim[0]
        columns.append(cuts_of([tile % count for tile in tiles], *dim))
        tiles = [tile // count for tile in tiles] if count > 1 else tiles
    return list(zip(*reversed(columns), strict=True))
