"""Runs of device positions that hold a tile, without a list of all of them."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from xlashard.geometry import strides
from xlashard.geometry.tiling import Tiling
from xlashard.lazily import dataclass


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
        return _shortened(_runs(np.asarray(tiling.replicas(tile))), tiling.num_replicas, most)
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


def _shortened(runs: tuple[range, ...], count: int, most: int) -> Runs:
    head, tail = head_and_tail(len(runs), most)
    return Runs(runs[:head], runs[len(runs) - tail :], count)
