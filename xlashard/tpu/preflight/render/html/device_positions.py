"""Where on the torus each position of the mesh lies, and which chips are worth drawing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xlashard.tpu.preflight.report.preflight_model import AxisReport, TopologyReport

DIMENSIONS = ("x", "y", "z")
MOST_CHIPS = 1024
"""Chips that are drawn; of more, the first planes and the last one stand for all."""

_HOSTS = {1: ((1, 1),), 2: ((2, 1), (1, 2)), 4: ((2, 2), (4, 1), (1, 4)), 8: ((2, 4), (4, 2))}
"""Chips of a host along x and y, by how many it has."""


@dataclass(frozen=True)
class Plane:
    """Chips of one slice that have one `z`.

    Attributes:
        slice: The slice's number.
        z: Their place along the third dimension.
    """

    slice: int
    z: int


@dataclass(frozen=True)
class DevicePositions:
    """How the torus is drawn.

    Attributes:
        topology: The devices.
        axes: The mesh axes of which the place on the torus is known, of more than one position.
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
        """Devices of a chip."""
        return max(1, self.topology.devices // max(1, self.topology.chips))

    @property
    def host(self) -> tuple[int, int] | None:
        """Chips of a host along x and y; None where hosts are no rectangles of the drawing."""
        topology = self.topology
        x, y, z = self.size
        each = topology.chips // max(1, topology.hosts)
        if each == x * y and z == 1:
            return x, y
        fitting = (h for h in _HOSTS.get(each, ()) if x % h[0] == 0 and y % h[1] == 0)
        return next(fitting, None)

    def planes(self) -> tuple[tuple[Plane | None, ...], ...]:
        """By slice the planes to draw, None where some are left out."""
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
        """The position along a mesh axis of the device at some place.

        Args:
            axis: The mesh axis.
            at: The chip's x, y and z.
            core: Which of the chip's devices.
            slice_: The number of its slice.
        """
        places = {**dict(zip(DIMENSIONS, at, strict=True)), "core": core, "slice": slice_}
        position = 0
        for (dimension, count), stride in zip(axis.along, axis.strides, strict=True):
            position = position * count + places[dimension] // stride % count
        return position


def device_positions(topology: TopologyReport, mesh: tuple[AxisReport, ...]) -> DevicePositions:
    """How to draw a mesh on a torus."""
    sizes = {
        **dict(zip(DIMENSIONS, topology.shape, strict=False)),
        "core": topology.devices // max(1, topology.chips),
        "slice": topology.slices,
    }
    axes = (replace(axis, strides=_strides(axis, sizes)) for axis in mesh if axis.size > 1)
    return DevicePositions(topology, tuple(axis for axis in axes if axis.strides))


def _strides(axis: AxisReport, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """How far apart neighbours are along each dimension; empty where that is not known."""
    if math.prod(count for _, count in axis.along) != axis.size:
        return ()
    if any(name not in sizes for name, _ in axis.along):
        return ()
    if len(axis.strides) == len(axis.along):
        return axis.strides
    is_whole = all(sizes[name] == count for name, count in axis.along)
    return (1,) * len(axis.along) if is_whole else ()


def _ends(count: int, most: int) -> tuple[int | None, ...]:
    """All numbers up to `count`, or the first and the last with None between."""
    if count <= most:
        return tuple(range(count))
    return (*range(max(1, most - 1)), None, count - 1) if most > 1 else (0, None)
