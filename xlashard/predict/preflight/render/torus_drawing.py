"""Positions of mesh devices on the torus, and their drawing: one square per chip.

Nodes of GPUs are drawn as rows, without links: a switch joins the GPUs of a node.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from xlashard.analysis.pictures.picture_plan import COLOURS
from xlashard.errors import counted
from xlashard.predict.preflight.render.report_text import words_of
from xlashard.predict.preflight.report.preflight_model import AxisReport, TopologyReport

DIMENSIONS = ("x", "y", "z")


MOST_CHIPS = 1024
"""Maximum number of chips drawn; a larger torus shows its first planes and the last one."""


_HOSTS = {1: ((1, 1),), 2: ((2, 1), (1, 2)), 4: ((2, 2), (4, 1), (1, 4)), 8: ((2, 4), (4, 2))}
"""Chips per host along x and y, by number of chips."""

_LABELLED = 512
"""Maximum number of chips that are labelled with their position."""

_AROUND = 14
_WIDE = 1140
_ROUND = ("#99ddff", "#77aadd", "#cfb8e6", "#ffaabb", "#ee8866", "#eedd88", "#bbcc33", "#44bb99")
"""The palette in hue order, so that interpolated colours stay distinguishable."""


@dataclass(frozen=True)
class Plane:
    """Chips of one slice with the same `z`.

    Attributes:
        slice: Number of the slice.
        z: Coordinate along the third dimension.
    """

    slice: int
    z: int


class DrawnChip(NamedTuple):
    """Square of a device.

    Attributes:
        at: x, y and z of the chip.
        core: Device of the chip.
        places: Position along each axis.
        colours: CSS variables with the colour along each axis.
        left: Left edge.
        top: Top edge.
        width: Width.
        height: Height.
    """

    at: tuple[int, int, int]
    core: int
    places: tuple[int, ...]
    colours: str
    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class DevicePositions:
    """Positions of the mesh devices on a torus.

    Attributes:
        topology: The devices.
        axes: Mesh axes of size 2 or more with a known position on the torus.
    """

    topology: TopologyReport
    axes: tuple[AxisReport, ...]

    template = "torus.html"

    def strip(self, axis: AxisReport) -> str:
        """Return the colours along an axis as CSS."""
        return gradient(axis.size)

    @property
    def size(self) -> tuple[int, int, int]:
        """Chips of a slice along x, y and z."""
        sizes = self.topology.shape[::-1] if self.has_nodes else self.topology.shape
        x, y, z = (*sizes, 1, 1)[:3]
        return x, y, z

    @property
    def has_nodes(self) -> bool:
        """True for nodes of GPUs."""
        return self.topology.links != "ici"

    @property
    def is_drawn(self) -> bool:
        """True unless there are too many nodes to draw."""
        return not self.has_nodes or self.topology.chips <= MOST_CHIPS

    @property
    def cores(self) -> int:
        """Devices per chip."""
        return max(1, self.topology.devices // max(1, self.topology.chips))

    @property
    def host(self) -> tuple[int, int] | None:
        """Chips of a host along x and y, or of a node; None if hosts are not rectangles."""
        topology = self.topology
        x, y, z = self.size
        if self.has_nodes:
            return x, 1
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
        names = ("gpu", "node", "") if self.has_nodes else DIMENSIONS
        places = {**dict(zip(names, at, strict=True)), "core": core, "slice": slice_}
        position = 0
        for (dimension, count), stride in zip(axis.along, axis.strides, strict=True):
            position = position * count + places[dimension] // stride % count
        return position

    @cached_property
    def cell(self) -> int:
        """Pixels per chip, for up to four planes side by side."""
        x, y, z = self.size
        slices = self.topology.slices
        around = 2 * _AROUND + (14 if slices == 1 else 58)
        room = _WIDE // min(4, z * slices) - around
        return max(16, min(56, 560 // max(x, y), room // x))

    @cached_property
    def is_labelled(self) -> bool:
        """True if chips are few enough to show their positions."""
        x, y, _ = self.size
        shown = sum(plane is not None for row in self.planes() for plane in row)
        return shown * x * y * self.cores <= _LABELLED and bool(self.axes)

    @property
    def pixels(self) -> tuple[int, int]:
        """Width and height of a plane."""
        x, y, _ = self.size
        return 2 * _AROUND + x * self.cell, 2 * _AROUND + y * self.cell

    def along(self, dimension: str) -> str:
        """Return the classes that highlight a dimension while an axis along it is selected."""
        axes = enumerate(self.axes)
        return " ".join(f"a{n}" for n, axis in axes if dimension in dict(axis.along))

    def links(self) -> Iterator[tuple[str, str]]:
        """Yield the lines between neighbours, which extend past both ends if they wrap around.

        Each is an SVG path with its CSS classes.
        """
        if self.has_nodes:
            return
        x, y, _ = self.size
        wraps = (*self.topology.wraps, False, False)[:2]
        for dimension, (count, lines) in enumerate(((x, y), (y, x))):
            ends = [self._middle(0), self._middle(count - 1)]
            if wraps[dimension]:
                ends = [2, 2 * _AROUND + count * self.cell - 2]
            command = ("M{0} {2}H{1}", "M{2} {0}V{1}")[dimension]
            path = "".join(command.format(*ends, self._middle(n)) for n in range(lines))
            closes = " closes" if wraps[dimension] else ""
            yield path, f"link{closes} {self.along(DIMENSIONS[dimension])}".rstrip()

    def _middle(self, place: int) -> int:
        return _AROUND + place * self.cell + self.cell // 2

    def chips(self, plane: Plane) -> Iterator[DrawnChip]:
        """Yield the devices of a plane, row by row."""
        x, y, _ = self.size
        gap = 2 if self.cell < 24 else 4 if self.cell < 44 else 7
        height = self.cell - 2 * gap
        width = height / self.cores
        for row, column, core in product(range(y), range(x), range(self.cores)):
            at = (column, row, plane.z)
            places = tuple(self.position(axis, at, core, plane.slice) for axis in self.axes)
            colours = ";".join(
                f"--c{n}:{colour(place, axis.size)}"
                for n, (place, axis) in enumerate(zip(places, self.axes, strict=True))
            )
            left = _AROUND + column * self.cell + gap + core * width
            top = _AROUND + row * self.cell + gap
            yield DrawnChip(at, core, places, colours, left, top, width, height)

    def hosts(self) -> str:
        """Return the SVG path around the chips of each host; empty if these are no rectangles."""
        if self.host is None:
            return ""
        x, y, _ = self.size
        across, down = self.host
        width, height = across * self.cell - 2, down * self.cell - 2
        return "".join(
            f"M{_AROUND + left * self.cell + 1} {_AROUND + top * self.cell + 1}"
            f"h{width}v{height}h{-width}z"
            for top in range(0, y, down)
            for left in range(0, x, across)
        )


def device_positions(topology: TopologyReport, mesh: tuple[AxisReport, ...]) -> DevicePositions:
    """Return the positions of mesh devices on a torus."""
    return DevicePositions(topology, tuple(filter(_is_drawn, mesh)))


def _is_drawn(axis: AxisReport) -> bool:
    counts = [count for _, count in axis.along]
    return axis.size > 1 and len(axis.strides) == len(counts) and math.prod(counts) == axis.size


def _ends(count: int, most: int) -> tuple[int | None, ...]:
    """Return all numbers below `count`, or the first ones and the last with None between."""
    if count <= most:
        return tuple(range(count))
    return (*range(max(1, most - 1)), None, count - 1) if most > 1 else (0, None)


def colour(place: int, size: int) -> str:
    """Return the colour of a position along an axis.

    Up to eight positions have a palette colour each. With more, neighbours have adjacent colours on
    a colour circle, which closes as a ring of chips does.
    """
    if size <= len(COLOURS):
        return COLOURS[place]
    at = place / size * len(_ROUND)
    one, other = _ROUND[int(at)], _ROUND[(int(at) + 1) % len(_ROUND)]
    share = at - int(at)
    mixed = (
        round(a + (b - a) * share) for a, b in zip(_channels(one), _channels(other), strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(text: str) -> Iterator[int]:
    return (int(text[n : n + 2], 16) for n in (1, 3, 5))


def gradient(size: int) -> str:
    """Return the colours along an axis as CSS, from the first position to the last."""
    shown = [colour(n * size // min(size, 64), size) for n in range(min(size, 64))]
    each = 100 / len(shown)
    stops = (f"{c} {n * each:.4g}% {(n + 1) * each:.4g}%" for n, c in enumerate(shown))
    return f"linear-gradient(90deg,{','.join(stops)})"


def lies_along(axis: AxisReport) -> str:
    """Return the dimensions of an axis: `x (4) × y (2, each 4 apart)`."""
    strides = axis.strides or (1,) * len(axis.along)
    places = (
        f"{name} ({count}{f', each {stride} apart' if stride > 1 else ''})"
        for (name, count), stride in zip(axis.along, strides, strict=True)
    )
    return " × ".join(places) or ("" if axis.size == 1 else "several dimensions")


def torus_lead(topology: TopologyReport) -> str:
    """Return the chips of a topology, and the dimensions whose links close to rings."""
    hosts = counted(topology.hosts, "host")
    if topology.links != "ici":
        nodes, gpus = topology.shape
        joined = f"joined by {words_of(topology).networks['ici']} within a node"
        chips = counted(topology.chips, "GPU")
        nodes_text = counted(nodes, "node")
        return f"{nodes_text} of {counted(gpus, 'GPU')}, {joined}. {chips}, {hosts}."
    pairs = zip(DIMENSIONS, topology.wraps, strict=False)
    rings = ", ".join(name for name, wraps in pairs if wraps)
    closes = f"links close to rings along {rings}" if rings else "no rings"
    slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
    counts = (
        counted(topology.chips, "chip"),
        counted(topology.devices, "device"),
    )
    shape = " × ".join(map(str, topology.shape))
    return f"{slices}{shape} chips; {closes}. {', '.join(counts)}, {hosts}."
