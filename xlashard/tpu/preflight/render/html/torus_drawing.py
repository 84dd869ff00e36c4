"""Positions of mesh devices on the torus, and their drawing: one square per chip."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from xlashard.pictures.picture_plan import COLOURS
from xlashard.tpu.preflight.render.html.markup import Child, Html, join, tag, user_text
from xlashard.tpu.preflight.render.report_text import is_visible_ring, many
from xlashard.tpu.preflight.report.preflight_model import AxisReport, TimeEstimate, TopologyReport
from xlashard.wording import in_bytes, in_seconds

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


_LABELLED = 512
"""Maximum number of chips that are labelled with their position."""

_AROUND = 14
_WIDE = 1140
_ROUND = ("#99ddff", "#77aadd", "#cfb8e6", "#ffaabb", "#ee8866", "#eedd88", "#bbcc33", "#44bb99")
"""The palette in hue order, so that interpolated colours stay distinguishable."""


def mesh_section(
    topology: TopologyReport, mesh: tuple[AxisReport, ...], time: TimeEstimate, group: str
) -> Html:
    """Return the drawing, the axis selector, and a table of axis positions.

    Args:
        topology: The devices.
        mesh: Mesh axes.
        time: Time estimate, for the traffic along each axis.
        group: Name of the radio buttons, unique on the page.
    """
    layout = device_positions(topology, mesh)
    return join(
        tag("p", _words(topology), class_="lead"),
        tag(
            "div",
            _switch(layout, group),
            tag(
                "div",
                tag("div", tag("div", _slices(layout), class_="slices"), _key(layout)),
                _axes(mesh, time),
                class_="beside",
            ),
            class_="torus",
        ),
    )


def _words(topology: TopologyReport) -> str:
    shape = " × ".join(map(str, topology.shape))
    pairs = zip(DIMENSIONS, topology.wraps, strict=False)
    rings = [name for name, wraps in pairs if wraps]
    closed = f"; links close to rings along {', '.join(rings)}" if rings else "; no rings"
    slices = f"{topology.slices} slices of " if topology.slices > 1 else ""
    numbers = {"chip": topology.chips, "device": topology.devices, "host": topology.hosts}
    counts = ", ".join(many(number, noun) for noun, number in numbers.items())
    return f"{slices}{shape} chips{closed}. {counts}."


def _switch(layout: DevicePositions, group: str) -> Html | None:
    if not layout.axes:
        return None
    choices = []
    for number, axis in enumerate(layout.axes):
        button = tag(
            "input", type="radio", name=group, value=number, checked=number == 0, class_="unseen"
        )
        choices.append(tag("label", button, tag("span", user_text(axis.name), f" = {axis.size}")))
    legend = tag("legend", "Coloured by the place along")
    return tag("fieldset", legend, choices, class_="choices")


def _key(layout: DevicePositions) -> Html:
    """Return the legend, and the status line of the chip under the pointer."""
    host = layout.host
    words: list[Child] = ["x goes to the right, y down"]
    if host is not None:
        words += [tag("i", class_="key host"), f"a host, {host[0]} × {host[1]} chips"]
    if any(layout.topology.wraps[:2]):
        words += [tag("i", class_="key ring"), "wraps around"]
    if len(layout.axes) > 0:
        words += [tag("i", class_="key along"), "links along the axis"]
    status = tag("p", class_="chip-status needs-script", role="status") if layout.axes else None
    return join(tag("p", words, class_="keys note"), status)


def _slices(layout: DevicePositions) -> Iterator[Html]:
    planes = layout.planes()
    shown = sum(p is not None for row in planes for p in row)
    x, y, z = layout.size
    is_labelled = shown * x * y * layout.cores <= _LABELLED and len(layout.axes) > 0
    cell = _cell(layout)
    for row in planes:
        if not row:
            left_out = layout.topology.slices - sum(bool(r) for r in planes)
            yield tag("p", f"… {left_out:,} more slices, laid out alike …", class_="note")
            continue
        drawn: list[Child] = []
        for plane in row:
            if plane is None:
                left_out = z - sum(p is not None for p in row)
                drawn.append(tag("p", f"… {left_out:,} more planes …", class_="note"))
                continue
            picture = _PlaneDrawing(layout, plane, cell, is_labelled).svg()
            name = f"z = {plane.z}" if z > 1 else None
            caption = tag("figcaption", name, class_=_along(layout, "z")) if name else None
            drawn.append(tag("figure", caption, picture))
        number = next(p.slice for p in row if p is not None)
        name = f"slice {number}"
        is_one = layout.topology.slices == 1
        label = None if is_one else tag("h4", name, class_=_along(layout, "slice"))
        yield tag("div", label, tag("div", drawn, class_="planes"), class_="slice")


def _cell(layout: DevicePositions) -> int:
    """Return the pixels per chip, for up to four planes side by side."""
    x, y, z = layout.size
    slices = layout.topology.slices
    side_by_side = min(4, z * slices)
    around = 2 * _AROUND + (14 if slices == 1 else 58)
    room = _WIDE // side_by_side - around
    return max(16, min(56, 560 // max(x, y), room // x))


def _along(layout: DevicePositions, dimension: str) -> str:
    """Return the classes that highlight a dimension while an axis along it is selected."""
    axes = enumerate(layout.axes)
    return " ".join(f"a{n}" for n, axis in axes if dimension in dict(axis.along))


class _PlaneDrawing:
    """Drawing of one plane of one slice."""

    def __init__(self, layout: DevicePositions, plane: Plane, cell: int, is_labelled: bool) -> None:
        self.layout = layout
        self.plane = plane
        self.cell = cell
        self.is_labelled = is_labelled

    def svg(self) -> Html:
        """Return the plane as an SVG element."""
        x, y, z = self.layout.size
        width, height = (2 * _AROUND + n * self.cell for n in (x, y))
        where = f", z = {self.plane.z}" if z > 1 else ""
        return tag(
            "svg",
            self._links(),
            tag("g", self._chips(), class_="chips"),
            self._hosts(),
            viewBox=f"0 0 {width} {height}",
            width=width,
            height=height,
            role="img",
            class_="dense" if self.cell < 24 else None,
            aria_label=f"{x} × {y} chips of slice {self.plane.slice}{where}",
        )

    def _links(self) -> Iterator[Html]:
        """Yield the lines between neighbours; wrap-around links extend past both ends."""
        x, y, _ = self.layout.size
        wraps = (*self.layout.topology.wraps, False, False)[:2]
        for dimension, (count, lines) in enumerate(((x, y), (y, x))):
            ends = [self._middle(0), self._middle(count - 1)]
            if wraps[dimension]:
                ends = [2, 2 * _AROUND + count * self.cell - 2]
            command = ("M{0} {2}H{1}", "M{2} {0}V{1}")[dimension]
            d = "".join(command.format(*ends, self._middle(n)) for n in range(lines))
            closes = " closes" if wraps[dimension] else ""
            along = _along(self.layout, DIMENSIONS[dimension])
            yield tag("path", d=d, class_=f"link{closes} {along}".rstrip())

    def _middle(self, place: int) -> int:
        return _AROUND + place * self.cell + self.cell // 2

    def _chips(self) -> Iterator[Html]:
        x, y, _ = self.layout.size
        gap = 2 if self.cell < 24 else 4 if self.cell < 44 else 7
        width = (self.cell - 2 * gap) / self.layout.cores
        for row in range(y):
            for column in range(x):
                for core in range(self.layout.cores):
                    left = _AROUND + column * self.cell + gap + core * width
                    box = (left, _AROUND + row * self.cell + gap, width, self.cell - 2 * gap)
                    yield self._chip((column, row, self.plane.z), core, box)

    def _chip(
        self, at: tuple[int, int, int], core: int, box: tuple[float, float, float, float]
    ) -> Html:
        left, top, width, height = box
        axes = self.layout.axes
        places = [self.layout.position(axis, at, core, self.plane.slice) for axis in axes]
        colours = ";".join(
            f"--c{n}:{colour(place, axis.size)}"
            for n, (place, axis) in enumerate(zip(places, axes, strict=True))
        )
        square = tag("rect", x=left, y=top, width=width, height=height, rx=3)
        # Centre the text vertically.
        x, y = left + width / 2, top + height / 2 + 4
        labels = [tag("text", p, x=x, y=y, class_=f"a{n}") for n, p in enumerate(places)]
        return tag(
            "g",
            square,
            labels if self.is_labelled and width >= 16 else None,
            style=colours or None,
            data_at=",".join(map(str, at)),
            data_mesh=",".join(map(str, places)),
            data_core=core if self.layout.cores > 1 else None,
            data_slice=self.plane.slice,
        )

    def _hosts(self) -> Html | None:
        host = self.layout.host
        if host is None:
            return None
        x, y, _ = self.layout.size
        width, height = (n * self.cell - 2 for n in host)
        boxes = [
            f"M{_AROUND + left * self.cell + 1} {_AROUND + top * self.cell + 1}"
            f"h{width}v{height}h{-width}z"
            for top in range(0, y, host[1])
            for left in range(0, x, host[0])
        ]
        return tag("path", d="".join(boxes), class_="hosts")


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


def _lies(axis: AxisReport, number: int) -> str:
    """Return the text of an axis along a dimension: `y (4)`, `y (2, each 4 apart)`."""
    name, count = axis.along[number]
    stride = axis.strides[number] if axis.strides else 1
    return f"{name} ({count}{f', each {stride} apart' if stride > 1 else ''})"


def _strip(size: int) -> Html | None:
    """Return the colours along an axis, from the first position to the last."""
    if size < 2:
        return None
    shown = [colour(n * size // min(size, 64), size) for n in range(min(size, 64))]
    each = 100 / len(shown)
    stops = (f"{c} {n * each:.4g}% {(n + 1) * each:.4g}%" for n, c in enumerate(shown))
    style = f"background:linear-gradient(90deg,{','.join(stops)})"
    return tag("i", style=style, class_="strip", title=f"0 … {size - 1}")


def _channels(text: str) -> Iterable[int]:
    return (int(text[n : n + 2], 16) for n in (1, 3, 5))


def _axes(mesh: tuple[AxisReport, ...], time: TimeEstimate) -> Html | None:
    if not mesh:
        return None
    columns = ("mesh axis", "size", "lies along", "ring", "sent along it", "takes")
    rows = []
    for axis in mesh:
        found = [t for t in time.traffic if axis.name in t.along.split(", ")]
        sent, seconds = sum(t.sent_bytes for t in found), sum(t.seconds for t in found)
        places = " × ".join(_lies(axis, n) for n in range(len(axis.along)))
        spread = places or ("" if axis.size == 1 else "no dimension")
        cells = (spread, "closed" if is_visible_ring(axis) else "open" if axis.size > 1 else "")
        rows.append(
            tag(
                "tr",
                tag("th", user_text(axis.name), _strip(axis.size), scope="row"),
                tag("td", axis.size, class_="number"),
                [tag("td", text) for text in cells],
                tag("td", in_bytes(sent), class_="number", data_value=sent),
                tag("td", in_seconds(seconds), class_="number", data_value=repr(seconds)),
                data_axis=axis.name,
            )
        )
    numbers = {"size", "sent along it", "takes"}
    head = [tag("th", c, scope="col", class_="number" if c in numbers else None) for c in columns]
    made = tag(
        "table",
        tag("caption", "Mesh axes", class_="unseen"),
        tag("thead", tag("tr", head)),
        tag("tbody", rows),
        class_="plain",
    )
    return tag("div", made, class_="scrolls", tabindex=0, role="region", aria_label="Mesh axes")
