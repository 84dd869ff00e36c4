"""Tilings on the way from one tiling to another, each reached by one kind of collective.

XLA's partitioner knows a few resharding steps: it slices, exchanges between two dimensions,
permutes devices, and gathers. Two tilings that are further apart can make it replicate the whole
value on every device, and warn about it.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

from xlashard.errors import TilingError
from xlashard.geometry import strides
from xlashard.geometry.assignment import spec_from_tiling
from xlashard.geometry.mesh import MeshGrid
from xlashard.geometry.spec import Spec
from xlashard.geometry.tiling import Tiling

type _Dims = tuple[tuple[str, ...], ...]


def intermediate_tilings(source: Tiling, target: Tiling) -> list[Tiling]:
    """Return the tilings between two; none where one step leads from one to the other.

    Slices come first and gathers last: shards in between are no larger than those of the ends, but
    where the tiles of a dimension have other prime factors. The tiles of every step divide an array
    that the source and target divide.

    Args:
        source: Tiles before.
        target: Tiles after, of the same devices and rank; neither has partial results.

    Example:
        >>> grid = MeshGrid(("x", "y"), (4, 2))
        >>> ends = Spec(((), ("x", "y"))), Spec((("y",), ()))
        >>> steps = intermediate_tilings(*(Tiling.from_spec(grid, spec, 2) for spec in ends))
        >>> [tiling.counts for tiling in steps]
        [(2, 4)]
    """
    grid = _common_grid(source, target)
    try:
        before, after = (spec_from_tiling(grid, t).for_rank(t.ndim) for t in (source, target))
    except TilingError:  # a list of tiles, or other digits: XLA's own choice
        return []
    steps = _SpecRoute(grid, tuple(a or () for a in before), tuple(a or () for a in after)).steps()
    return [Tiling.from_spec(grid, Spec(dims), len(dims)) for dims in steps]


def _common_grid(*tilings: Tiling) -> MeshGrid:
    """Return a grid of axes of prime sizes, at whose borders the digits of tilings begin."""
    count = tilings[0].num_devices
    borders = {1, count}.union(*map(_digit_borders, tilings))
    sizes: list[int] = []
    for low, high in pairwise(sorted(borders)):
        sizes += strides.prime_factors(high // low)
    if math.prod(sizes) != count:  # digits that overlap
        sizes = [count]
    return MeshGrid(tuple(map(str, range(len(sizes)))), tuple(reversed(sizes)))


def _digit_borders(tiling: Tiling) -> Iterator[int]:
    """Yield the device positions at which a digit begins or passes to another dimension."""
    positions = strides.row_major([size for size, _ in tiling.steps])
    tiles = strides.row_major(tiling.counts)
    for (size, stride), position in zip(tiling.steps, positions, strict=True):
        yield position
        inner = (n // stride for n in tiles if stride and n % stride == 0)
        yield from (position * n for n in inner if n and size % n == 0)


class _SpecRoute:
    """Route between two specs on a grid of prime axes.

    A dimension has an excess of the axes behind those whose tiles divide the target's, and lacks
    the rest of the target's tiles.

    Args:
        grid: The grid.
        source: Axes of each dimension before, the major one first.
        target: Those after.
    """

    def __init__(self, grid: MeshGrid, source: _Dims, target: _Dims) -> None:
        self._sizes = grid.shape
        self._source, self._target = source, target
        self._dims = source
        self._tiles = [self._multiply_sizes(axes) for axes in target]

    def steps(self) -> list[_Dims]:
        """List the specs between source and target."""
        steps = [self._source]
        while any(self._count_lacking(dim) > 1 for dim in range(len(self._dims))):
            self._dims = self._slice() or self._exchange() or self._gather()
            steps.append(self._dims)
        steps.append(self._permute())
        between = [dims for old, dims in pairwise(steps) if dims != old]
        return between[:-1] if between[-1:] == [self._target] else between

    def _multiply_sizes(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def _count_kept(self, dim: int) -> int:
        """Return the number of leading axes that stay."""
        axes = self._dims[dim]
        return max(
            n for n in range(len(axes) + 1) if not self._tiles[dim] % self._multiply_sizes(axes[:n])
        )

    def _count_lacking(self, dim: int) -> int:
        """Return the number of parts into which the target cuts each kept tile."""
        return self._tiles[dim] // self._multiply_sizes(self._dims[dim][: self._count_kept(dim)])

    def _find_open_dims(self) -> list[int]:
        """List the dimensions that lack tiles and have no excess."""
        dims = range(len(self._dims))
        return [
            d
            for d in dims
            if self._count_lacking(d) > 1 and self._count_kept(d) == len(self._dims[d])
        ]

    def _with_axes(self, dim: int, axes: tuple[str, ...]) -> _Dims:
        return (*self._dims[:dim], axes, *self._dims[dim + 1 :])

    def _slice(self) -> _Dims | None:
        """Return the spec with unused axes where they fit; None if none does."""
        before = self._dims
        used = {axis for axes in before for axis in axes}
        for dim in self._find_open_dims():
            for axis in dict.fromkeys((*self._target[dim], *self._sizes)):
                if axis in used:
                    continue
                if self._count_lacking(dim) % self._sizes[axis] == 0:
                    self._dims = self._with_axes(dim, (*self._dims[dim], axis))
                    used.add(axis)
        sliced, self._dims = self._dims, before
        return None if sliced == before else sliced

    def _exchange(self) -> _Dims | None:
        """Return the spec with as many minor axes in excess as possible in another dimension."""
        for dim, axes in enumerate(self._dims):
            for start in range(self._count_kept(dim), len(axes)):
                moved = axes[start:]
                for to in self._find_open_dims():
                    if self._count_lacking(to) % self._multiply_sizes(moved) == 0:
                        shorter = self._with_axes(dim, axes[:start])
                        return (*shorter[:to], (*shorter[to], *moved), *shorter[to + 1 :])
        return None

    def _gather(self) -> _Dims:
        """Return the spec without the minor axis of a dimension that has an excess."""
        dims = range(len(self._dims))
        dim = max(dims, key=lambda dim: len(self._dims[dim]) - self._count_kept(dim))
        return self._with_axes(dim, self._dims[dim][:-1])

    def _permute(self) -> _Dims:
        """Return a spec of the same tiles from which the target is a gather."""
        used = {axis for axes in self._target for axis in axes}
        free = [axis for axis in self._sizes if axis not in used]
        dims = []
        for dim, axes in enumerate(self._target):
            added = []
            for own in self._dims[dim][self._count_kept(dim) :]:
                same = [axis for axis in free if self._sizes[axis] == self._sizes[own]]
                added.append(own if own in same else same[0])
                free.remove(added[-1])
            dims.append((*axes, *added))
        return tuple(dims)
