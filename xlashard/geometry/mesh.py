"""The grid of a mesh: axis names and sizes, without the devices that stand on it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xlashard.errors import BoxError, GridError
from xlashard.geometry.strides import check_positions, unravel
from xlashard.support.lazily import dataclass


class Box(NamedTuple):
    """A contiguous sub-mesh.

    Attributes:
        offsets: Per mesh axis the first coordinate.
        sizes: Per mesh axis the number of coordinates.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class MeshGrid:
    """Named axes over device positions `0 .. size - 1`, the last axis fastest.

    Attributes:
        axis_names: The names, major to minor.
        axis_sizes: Their sizes.

    Raises:
        GridError: Names and sizes differ in number, a name repeats, or a size is below 1.

    Example:
        >>> MeshGrid(("data", "model"), (2, 4)).shape
        {'data': 2, 'model': 4}
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis_names", tuple(self.axis_names))
        object.__setattr__(self, "axis_sizes", tuple(int(s) for s in self.axis_sizes))
        if len(self.axis_names) != len(self.axis_sizes):
            raise GridError(
                f"{len(self.axis_names)} axis names {self.axis_names} for "
                f"{len(self.axis_sizes)} axis sizes {self.axis_sizes}"
            )
        if len(set(self.axis_names)) != len(self.axis_names):
            raise GridError(f"an axis name repeats in {self.axis_names}")
        for name, size in zip(self.axis_names, self.axis_sizes, strict=True):
            if size < 1:
                raise GridError(f"axis {name!r} has size {size}; an axis has at least one device")

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.axis_sizes)

    @property
    def shape(self) -> Mapping[str, int]:
        """Return a new dict of axis names and sizes, in axis order."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    def describe(self) -> str:
        """Return the axes with their sizes, for messages."""
        if not self.axis_names:
            return "no axes"
        return ", ".join(f"{n!r}={s}" for n, s in self.shape.items())

    def coordinates(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return mesh coordinates of device positions.

        Args:
            positions: Positions of any shape `[...]`.

        Returns:
            Coordinates, `[..., axes]`.

        Raises:
            GridError: A position is not in `0 .. size - 1`.
        """
        flat = np.asarray(positions, dtype=np.int64)
        check_positions(flat, self.size)
        return unravel(flat, self.axis_sizes)

    def local_box(self, positions: Sequence[int]) -> Box:
        """Return the contiguous sub-mesh that the positions fill, in any order.

        Args:
            positions: Distinct device positions, for example those of one process.

        Raises:
            BoxError: The list is empty, a position repeats, or the box around them has a gap.
        """
        if not len(positions):
            raise BoxError("no device positions: a sub-mesh has at least one device")
        if len(set(positions)) != len(positions):
            raise BoxError(f"a position repeats among {sorted(positions)}")
        coords = self.coordinates(positions)
        low, high = coords.min(axis=0), coords.max(axis=0)
        sizes = high - low + 1
        if int(sizes.prod()) != len(positions):
            raise BoxError(self._gap(coords, low, sizes))
        return Box(tuple(low.tolist()), tuple(sizes.tolist()))

    def boxes_of(self, owners: npt.ArrayLike) -> dict[int, Box | None]:
        """Return the contiguous sub-mesh of each owner of devices, for all owners at once.

        Args:
            owners: The owner of each device position, such as a process index.

        Returns:
            The box of each owner, lowest owner first; None where its devices leave a gap, which
            `local_box` reports.

        Raises:
            GridError: The number of owners is not the number of devices.
        """
        flat = np.asarray(owners, dtype=np.int64).ravel()
        if len(flat) != self.size:
            raise GridError(f"{len(flat)} owners for the {self.size} devices of {self.describe()}")
        names, counts = np.unique(flat, return_counts=True)
        coords = self.coordinates(np.argsort(flat, kind="stable"))
        starts = np.cumsum(counts) - counts
        low = np.minimum.reduceat(coords, starts, axis=0)
        sizes = np.maximum.reduceat(coords, starts, axis=0) - low + 1
        filled = sizes.prod(axis=1) == counts
        rows = zip(names.tolist(), low.tolist(), sizes.tolist(), filled.tolist(), strict=True)
        return {
            owner: Box(tuple(offsets), tuple(extents)) if is_filled else None
            for owner, offsets, extents, is_filled in rows
        }

    def _gap(
        self,
        coords: npt.NDArray[np.int64],
        low: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
    ) -> str:
        filled = np.zeros(sizes, dtype=bool)
        filled[tuple((coords - low).T)] = True
        missing = np.argwhere(~filled)[0] + low
        at = ", ".join(f"{n!r}={c}" for n, c in zip(self.axis_names, missing.tolist(), strict=True))
        span = ", ".join(
            f"{n!r} {a}..{a + s - 1}"
            for n, a, s in zip(self.axis_names, low.tolist(), sizes.tolist(), strict=True)
        )
        return (
            f"{len(coords)} devices span {span}, a box of {int(sizes.prod())}, and do not fill it: "
            f"the device at {at} is missing"
        )
