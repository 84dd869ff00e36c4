"""Reference implementation of the index maths, slow and plain: loops over all devices."""

import itertools
import math
from collections.abc import Iterable, Iterator

from xlashard.geometry import MeshGrid, Spec, TileAssignment, validate_spec
from xlashard.geometry.hlo_text import Subgroup

NAMES = ("x", "y", "z")


def small_grids(most: int = 16, axes: int = 3, biggest: int = 4) -> list[MeshGrid]:
    """Return every mesh of up to `axes` axes of sizes `1..biggest` and up to `most` devices."""
    return [
        MeshGrid(NAMES[:count], sizes)
        for count in range(1, axes + 1)
        for sizes in itertools.product(range(1, biggest + 1), repeat=count)
        if product(sizes) <= most
    ]


def grid_id(grid: MeshGrid) -> str:
    """Return a short name for a test's parameter."""
    return "x".join(map(str, grid.axis_sizes))


def all_specs(grid: MeshGrid, ndim: int) -> Iterator[Spec]:
    """Yield every spec for arrays of rank `ndim`: each set of axes, in each order, in each dims."""
    for count in range(len(grid.axis_names) + 1 if ndim else 1):
        for order in itertools.permutations(grid.axis_names, count):
            for where in itertools.combinations_with_replacement(range(ndim), count):
                dims: list[tuple[str, ...]] = [()] * ndim
                for axis, dim in zip(order, where, strict=True):
                    dims[dim] += (axis,)
                yield Spec(tuple(dims))


def product(numbers) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def coordinates_of(grid: MeshGrid, position: int) -> dict[str, int]:
    """Return a device's mesh coordinates, by counting through the mesh up to it."""
    ranges = [range(size) for size in grid.axis_sizes]
    for i, coordinates in enumerate(itertools.product(*ranges)):
        if i == position:
            return dict(zip(grid.axis_names, coordinates, strict=True))
    raise AssertionError(position)


def tiles_of_spec(grid: MeshGrid, spec: Spec, ndim: int) -> list[tuple[int, ...]]:
    """Return the tile coordinates of every device."""
    tiles = []
    for position in range(grid.size):
        at = coordinates_of(grid, position)
        tile = []
        for dim in range(ndim):
            coordinate = 0
            for axis in (spec.dims[dim] or ()) if dim < len(spec.dims) else ():
                coordinate = coordinate * grid.shape[axis] + at[axis]
            tile.append(coordinate)
        tiles.append(tuple(tile))
    return tiles


def counts_of_spec(grid: MeshGrid, spec: Spec, ndim: int) -> tuple[int, ...]:
    """Return the number of tiles per dimension."""
    return tuple(
        product(grid.shape[axis] for axis in (spec.dims[dim] or ())) if dim < len(spec.dims) else 1
        for dim in range(ndim)
    )


def replicas_of_tiles(tiles: list[tuple[int, ...]]) -> list[int]:
    """Return the number of earlier devices that hold the same tile."""
    return [tiles[:i].count(tile) for i, tile in enumerate(tiles)]


def indices_of_tiles(
    shape: tuple[int, ...], counts: tuple[int, ...], tiles: list[tuple[int, ...]]
) -> list[tuple[slice, ...]]:
    """Return the slices of every device; the last tiles of an uneven dimension are shorter."""
    indices = []
    for tile in tiles:
        index = []
        for size, count, coordinate in zip(shape, counts, tile, strict=True):
            extent = 0
            while extent * count < size:
                extent += 1
            elements = list(range(size))[coordinate * extent : (coordinate + 1) * extent]
            start = elements[0] if elements else min(coordinate * extent, size)
            index.append(slice(None) if count == 1 else slice(start, start + len(elements)))
        indices.append(tuple(index))
    return indices


def assignment_of(
    grid: MeshGrid,
    spec: Spec,
    ndim: int,
    *,
    manual: Iterable[str] = (),
    unreduced: Iterable[str] = (),
) -> TileAssignment:
    """Return the V2 assignment of a spec on a mesh, in XLA's shortest text.

    Args:
        grid: The mesh.
        spec: The spec; unconstrained dimensions count as uncut.
        ndim: Rank of the array.
        manual: Mesh axes that the program partitions by itself.
        unreduced: Mesh axes over which the devices hold partial sums.

    Raises:
        GeometryError: The spec doesn't fit the mesh or the rank.
    """
    validate_spec(spec, grid)
    special = set(manual), set(unreduced)
    # Checked like the axes of two more dimensions.
    validate_spec(Spec((*spec.dims, *(tuple(sorted(axes)) for axes in special))), grid)
    manual, unreduced = (
        tuple(axis for axis in grid.axis_names if axis in axes) for axes in special
    )
    sizes = grid.shape
    dims = [math.prod(sizes[a] for a in axes or ()) for axes in spec.for_rank(ndim)]
    taken = {*spec.axes, *manual, *unreduced}
    rest = tuple(a for a in grid.axis_names if a not in taken)
    groups: dict[Subgroup, tuple[str, ...]] = {
        "manual": manual,
        "unreduced": unreduced,
        "replicated": rest,
    }
    if math.prod(dims) == 1 and not manual and not unreduced:
        return TileAssignment.replicated()
    order = (*spec.axes, *manual, *unreduced, *rest)
    return TileAssignment.iota(
        (*dims, *(math.prod(sizes[a] for a in axes) for axes in groups.values())),
        grid.axis_sizes,
        tuple(grid.axis_names.index(a) for a in order),
        tuple(groups),
    )
