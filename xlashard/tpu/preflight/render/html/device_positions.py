"""Positions of mesh devices on the torus, for drawing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xlashard.tpu.preflight.report.preflight_model import AxisReport, TopologyReport

DIMENSIONS = ("x", "y", "z")
MOST_CHIPS = 1024
"""Maximum number of chips drawn; a larger torus shows its first planes and the last one."""

_HOSTS = {1: ((1, 1),), 2: ((2, 1), (1, 2)), 4: ((2, 2), (4, 1), (1, 4)), 8: ((2, 4), (4, 2))}
"""Chips per host along x and y, by number of chips."""


@dataclass(frozen=True)
class Plane:
    """Chips of one slice with the same `z`.

    Attributes:
        slice: Number of the slice.
        z: Coordinate along the third dimension.
    """

    slice: int
    z: int


@dataclass(frozen=True)
class DevicePositions:
    """Positions of the mesh devices on a torus.

    Attributes:
        topology: The devices.
        axes: Mesh axes of size 2 or more with a known position on the torus.
    """

    topology: TopologyReport
    axes: tuple[AxisReport, ...]

    @property
    def size(self) -> tuple[int, int, int]:
        """Chips of a slice along x, y and z."""
        x, y, z = (*self.topology.shape, 1, 1)[:3]
        return x, y, z

    @property
    def cores(self) -> int:
        """Devices per chip."""
        return max(1, self.topology.devices // max(1, self.topology.chips))

    @property
    def host(self) -> tuple[int, int] | None:
        """Chips of a host along x and y; None if hosts are not rectangles."""
        topology = self.topology
        x, y, z = self.size
        each = topology.chips // max(1, topology.hosts)
        if each == x * y and z == 1:
            return x, y
        fitting = (h for h in _HOSTS.get(each, ()) if x % h[0] == 0 and y % h[1] == 0)
        return next(fitting, None)

    def planes(self) -> tuple[tuple[Plane | None, ...], ...]:
        """Return the planes to draw per slice, with None for omitted ones."""
        x, y, z = self.size
        slices = self.topology.slices
        most = max(2, MOST_CHIPS // (x * y))
        drawn = max(1, min(slices, most // min(z, most)))
        numbers = _ends(slices, drawn)
        return tuple(
            ()
            if number is None
            else tuple(
                None if at is None else Plane(number, at) for at in _ends(z, max(2, most // drawn))
            )
            for number in numbers
        )

    def position(self, axis: AxisReport, at: tuple[int, int, int], core: int, slice_: int) -> int:
        """Return the position of a device along a mesh axis.

        Args:
            axis: The mesh axis.
            at: x, y and z of the chip.
            core: Device of the chip.
            slice_: Number of the slice.
        """
        places = {**dict(zip(DIMENSIONS, at, strict=True)), "core": core, "slice": slice_}
        position = 0
        for (dimension, count), stride in zip(axis.along, axis.strides, strict=True):
            position = position * count + places[dimension] // stride % count
        return position


def device_positions(topology: TopologyReport, mesh: tuple[AxisReport, ...]) -> DevicePositions:
    """Return the positions of mesh devices on a torus."""
    sizes = {
        **dict(zip(DIMENSIONS, topology.shape, strict=False)),
        "core": topology.devices // max(1, topology.chips),
        "slice": topology.slices,
    }
    axes = (replace(axis, strides=_strides(axis, sizes)) for axis in mesh if axis.size > 1)
    return DevicePositions(topology, tuple(axis for axis in axes if axis.strides))


def _strides(axis: AxisReport, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the distance of neighbours along each dimension; empty if unknown."""
    if math.prod(count for _, count in axis.along) != axis.size:
        return ()
    if any(name not in sizes for name, _ in axis.along):
        return ()
    if len(axis.strides) == len(axis.along):
        return axis.strides
    is_whole = all(sizes[name] == count for name, count in axis.along)
    return (1,) * len(axis.along) if is_whole else ()


def _ends(count: int, most: int) -> tuple[int | None, ...]:
    """Return all numbers below `count`, or the first ones and the last with None between."""
    if count <= most:
        return tuple(range(count))
    return (*range(max(1, most - 1)), None, count - 1) if most > 1 else (0, None)
