"""Inference of partition specs from tile assignments and tilings; runs of replicas of a tile."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from xlashard.errors import TilingError
from xlashard.geometry import strides
from xlashard.geometry.mesh import MeshGrid
from xlashard.geometry.spec import Spec
from xlashard.geometry.tile_assignment import TileAssignment
from xlashard.geometry.tiling import Tiling
from xlashard.support.lazily import dataclass


def spec_from_tile_assignment(grid: MeshGrid, assignment: TileAssignment) -> Spec:
    """Return the spec of an HLO sharding on a mesh; it names no axis of size 1.

    Raises:
        TilingError: No spec on that mesh is equivalent.

    Example:
        >>> grid = MeshGrid(("x", "y"), (2, 4))
        >>> spec_from_tile_assignment(grid, TileAssignment.parse_text("{devices=[1,8]<=[8]}"))
        Spec(dims=((), ('x', 'y')))
    """
    if assignment.kind == "tuple":
        raise TilingError(f"{assignment} is a tuple: each of its elements has its own spec")
    ndim = 0 if assignment.ndim is None else assignment.ndim
    return spec_from_tiling(grid, Tiling.from_tile_assignment(assignment, ndim, grid.size))


def spec_from_tiling(grid: MeshGrid, tiling: Tiling) -> Spec:
    """Return the spec of a tiling on a mesh; it names no axis of size 1.

    Raises:
        TilingError: No spec on that mesh is equivalent.
    """
    if tiling.num_devices != grid.size:
        raise TilingError(
            f"the tiling is for {tiling.num_devices} devices, the mesh {grid.describe()} has "
            f"{grid.size}"
        )
    if tiling.listed:
        raise TilingError(
            f"the device order of the tiles {tiling.counts} is not a transposition of the mesh "
            f"{grid.describe()}"
        )
    # Cut the tiling's digits at the borders of the mesh's axes: each axis then moves by one stride.
    groups = strides.split(tiling.steps, grid.axis_sizes)
    moves: list[tuple[int, int, str]] = []
    for i, (name, size) in enumerate(grid.shape.items()):
        steps = None if groups is None else strides.merge(groups[i])
        if steps is None or len(steps) > 1:
            raise TilingError(
                f"the tiles {tiling.counts} would need a part of a mesh axis; the mesh has "
                f"{grid.describe()}"
            )
        if steps and steps[0][1]:
            moves.append((steps[0][1], size, name))
    moves.sort()
    dims: list[tuple[str, ...]] = []
    # The partial results of a tile are numbered like a last dimension.
    counts = (*tiling.counts, tiling.addends)
    for dim in reversed(range(len(counts))):
        axes: list[str] = []
        left = counts[dim]
        while left > 1:
            _, size, name = moves.pop(0)
            if left % size:
                raise TilingError(
                    f"the mesh axis {name!r} of size {size} would be needed for dimension {dim} "
                    f"and another one: the tiles are {tiling.counts}, the mesh has "
                    f"{grid.describe()}"
                )
            axes.append(name)
            left //= size
        dims.append(tuple(reversed(axes)))
    unreduced = frozenset(dims[0])
    return Spec(tuple(reversed(dims[1:])), unreduced, reduction=tiling.reduction)


@dataclass(frozen=True)
class Runs:
    """Ascending runs of numbers, possibly with a gap of known size.

    Attributes:
        first: The runs from the first on.
        last: The last runs, where runs between are left out; otherwise empty.
        count: Number of numbers, with those left out.
    """

    first: tuple[range, ...]
    last: tuple[range, ...]
    count: int

    @property
    def is_whole(self) -> bool:
        """Return whether all runs are listed."""
        return not self.last

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers that are listed."""
        for run in (*self.first, *self.last):
            yield from run

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Runs":
        """Return the runs of some numbers, in ascending order."""
        return cls(_runs(np.unique(np.asarray(numbers, np.int64))), (), len(set(numbers)))


def replica_runs(tiling: Tiling, tile: int, most: int) -> Runs:
    """Return the positions that hold a tile, as runs of neighbours.

    For a tiling with steps the cost depends on `most`, not on the number of devices.

    Args:
        tiling: The tiling.
        tile: The number of a tile, row-major.
        most: Runs to list, at least 2; of more, the first and the last.
    """
    if tiling.listed or tiling.is_partial:
        listed = _runs(np.asarray(tiling.replicas(tile)))
        head, tail = head_and_tail(len(listed), most)
        return Runs(listed[:head], listed[len(listed) - tail :], tiling.num_replicas)
    steps = list(tiling.steps)
    # Positions that differ in the last digit are neighbours, where that digit copies.
    length = steps.pop()[0] if steps and not steps[-1][1] else 1
    numbers = math.prod(size for size, stride in steps if not stride)
    head, tail = head_and_tail(numbers, most)
    shown = [*range(head), *range(numbers - tail, numbers)]
    starts = [_start(steps, tile, number) * length for number in shown]
    runs = [range(start, start + length) for start in starts]
    return Runs(tuple(runs[:head]), tuple(runs[head:]), tiling.num_replicas)


def head_and_tail(count: int, most: int) -> tuple[int, int]:
    """Return the numbers of items to show at the start and at the end of a row.

    All items are at the start if they fit. A single item is never left out, since a mark for the
    gap would take as much room.
    """
    if count <= most + 1:
        return count, 0
    tail = max(1, most // 4)
    return most - tail, tail


def _start(steps: Sequence[strides.Step], tile: int, number: int) -> int:
    """Return the start of a run, in runs; the digits of replicas count the runs."""
    position = 0
    by = 1
    for size, stride in reversed(steps):
        if stride:
            digit = tile // stride % size
        else:
            number, digit = divmod(number, size)
        position += digit * by
        by *= size
    return position


def _runs(ascending: npt.NDArray[np.int64]) -> tuple[range, ...]:
    breaks = np.flatnonzero(np.diff(ascending) != 1) + 1
    parts = [part.tolist() for part in np.split(ascending, breaks)]
    return tuple(range(part[0], part[-1] + 1) for part in parts if part)
