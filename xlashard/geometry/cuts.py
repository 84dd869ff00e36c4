"""Recognition of equal tiles from the slices that devices hold."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from xlashard.errors import TilingError

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
            f"{len(indices)} devices can't cover the {math.prod(counts)} tiles {counts} "
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
    """Start and stop per dimension of one device's index."""
    if not isinstance(index, tuple | list) or len(index) > len(shape):
        raise TilingError(
            f"the index {index!r} of device {position} is not a tuple of at most "
            f"{len(shape)} slices, one per dimension of shape {tuple(shape)}"
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
