"""Roofline plot of a step.

HBM and each network have a line of their own, whose slope is the bandwidth. The
program has one point per line, at its FLOP per byte of that resource and at the estimated FLOP/s.
The point that touches its line shows the bound. FLOP are those of matrix products, as the roof is
that of the matrix units.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

from xlashard.predict.preflight.render.report_text import ResourceNames, in_thousands, three_digits
from xlashard.predict.preflight.report.preflight_model import TimeEstimate, TopologyReport

_LETTER = 6.6
_BESIDE = 90


@dataclass(frozen=True)
class Slope:
    """Bandwidth of a resource and the program's use of it.

    Attributes:
        name: `hbm`, `ici` or `dcn`.
        nbytes: Bytes that the program moves.
        bandwidth: Bytes per second.
    """

    name: str
    nbytes: float
    bandwidth: float


@dataclass(frozen=True)
class Roofline:
    """Data of the plot, in FLOP, bytes and seconds.

    Attributes:
        roof: Peak FLOP per second for the program's dtypes.
        reached: Estimated FLOP per second.
        flops: FLOP of matrix products; all FLOP for a program without any.
        slopes: Memory and networks.
    """

    roof: float
    reached: float
    flops: float
    slopes: tuple[Slope, ...]

    def intensity(self, slope: Slope) -> float:
        """Return the FLOP per byte of a resource."""
        return self.flops / slope.nbytes


def read_roofline(time: TimeEstimate, topology: TopologyReport) -> Roofline | None:
    """Return the data of the plot, or None for a program without arithmetic."""
    if time.flops <= 0 or time.seconds <= 0:
        return None
    flops = sum(flops for _, flops in time.flops_by_dtype)
    if flops > 0 and time.compute_seconds > 0:
        roof = flops / time.compute_seconds
    else:
        flops = time.flops
        roof = dict(topology.peak_flops).get("bfloat16", 0.0)
    slopes = [Slope("hbm", time.hbm_bytes, topology.hbm_bandwidth)]
    for name, seconds in (("ici", time.ici_seconds), ("dcn", time.dcn_seconds)):
        sent = sum(t.sent_bytes for t in time.traffic if t.network == name)
        if seconds > 0:
            slopes.append(Slope(name, sent, sent / seconds))
    moving = tuple(s for s in slopes if s.nbytes > 0 and s.bandwidth > 0)
    reached = flops / (time.roofline_seconds or time.seconds)
    return Roofline(roof, reached, flops, moving) if roof > 0 else None


class PlotLine(NamedTuple):
    """Line of a resource.

    Attributes:
        name: `hbm`, `ici` or `dcn`.
        path: SVG path.
        label: Text along the line.
        transform: Place of the label.
    """

    name: str
    path: str
    label: str
    transform: str


class PlotPoint(NamedTuple):
    """Point of the program on the line of a resource.

    Attributes:
        slope: The resource.
        label: Its name and the FLOP per byte of it.
        title: The same in words.
        x: Coordinate.
        is_low: Whether the label stands lower than that of a point beside it.
    """

    slope: Slope
    label: str
    title: str
    x: float
    is_low: bool


class RooflinePlot:
    """Coordinates of the plot, in pixels.

    Args:
        roofline: Data of the plot.
        time: The estimate.
        resources: Names of the resources.
        lead: What it shows, in words.
    """

    template = "roofline.html"
    markers: ClassVar[Mapping[str, str]] = {
        "hbm": "M-7 0A7 7 0 1 0 7 0A7 7 0 1 0 -7 0Z",
        "ici": "M0-8.5L8.5 0L0 8.5L-8.5 0Z",
        "dcn": "M-6.5-6.5H6.5V6.5H-6.5Z",
    }
    width, height = 640, 400
    box = (66, 18, width - 18, height - 50)

    def __init__(
        self,
        roofline: Roofline,
        time: TimeEstimate,
        resources: Mapping[str, ResourceNames],
        lead: str,
    ) -> None:
        self.names = {slope.name: resources[slope.name].short for slope in roofline.slopes}
        self.lead = lead
        self.roof_text = f"compute {in_thousands(roofline.roof)}FLOP/s"
        self.roofline = roofline
        self.bound = time.bound
        self.predicted = roofline.flops / time.seconds
        self._turns = [roofline.roof / slope.bandwidth for slope in roofline.slopes]
        across = [1.0, *self._turns, *map(roofline.intensity, roofline.slopes)]
        self._across = _decades(min(across) / 2, max(across) * 4)
        heights = [roofline.reached, roofline.roof, self.predicted]
        self._up = _decades(min(heights) / 8, max(heights) * 1.6, least=3)

    def x(self, intensity: float) -> float:
        """Return the coordinate of an intensity."""
        left, _, right, _ = self.box
        low, high = self._across
        return left + (math.log10(intensity) - low) / (high - low) * (right - left)

    def y(self, flops: float) -> float:
        """Return the coordinate of FLOP per second."""
        _, top, _, bottom = self.box
        low, high = self._up
        return bottom - (math.log10(flops) - low) / (high - low) * (bottom - top)

    def columns(self) -> Iterator[tuple[float, str]]:
        """Yield the lines of the grid across, with a label for some."""
        across = range(self._across[0], self._across[1] + 1)
        step = max(1, len(across) // 9)
        for n, power in enumerate(across):
            yield self.x(10.0**power), "" if n % step else _power(power)

    def rows(self) -> Iterator[tuple[float, str]]:
        """Yield the lines of the grid up, with their labels."""
        for power in range(self._up[0], self._up[1] + 1):
            yield self.y(10.0**power), _power(power)

    @property
    def roof_start(self) -> float:
        """Left end of the roof."""
        return self.x(min(self._turns, default=10.0 ** self._across[0]))

    def lines(self) -> Iterator[PlotLine]:
        """Yield the lines of the resources."""
        for slope, turn in zip(self.roofline.slopes, self._turns, strict=True):
            foot = max(10.0 ** self._across[0], 10.0 ** self._up[0] / slope.bandwidth)
            if foot >= turn:
                continue
            (x1, y1), (x2, y2) = ((self.x(x), self.y(x * slope.bandwidth)) for x in (foot, turn))
            label = f"{self.names[slope.name]} {in_thousands(slope.bandwidth)}B/s"
            angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
            along = min(0.5, (_LETTER * len(label) / 2 + 14) / math.hypot(x2 - x1, y2 - y1))
            x, y = x1 + along * (x2 - x1), y1 + along * (y2 - y1)
            yield PlotLine(
                name=slope.name,
                path=f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}",
                label=label,
                transform=f"translate({x:.1f} {y:.1f}) rotate({angle:.1f})",
            )

    def joins(self) -> Iterator[tuple[float, float]]:
        """Yield the coordinates of neighbouring points."""
        slopes = self.roofline.slopes
        return pairwise(sorted(self.x(self.roofline.intensity(slope)) for slope in slopes))

    def points(self) -> list[PlotPoint]:
        """Return the points; that of the bound is drawn last, on top."""
        points: list[PlotPoint] = []
        before, is_low = -math.inf, False
        for slope in sorted(self.roofline.slopes, key=self.roofline.intensity):
            intensity, name = self.roofline.intensity(slope), self.names[slope.name]
            x = self.x(intensity)
            reached = in_thousands(self.roofline.reached)
            title = f"{three_digits(intensity)} FLOP per byte of {name}, {reached}FLOP/s"
            label = f"{name} {in_thousands(intensity)}"
            is_low = not is_low if x - before < _BESIDE else False
            before = x
            points.append(PlotPoint(slope, label, title, x, is_low))
        return sorted(points, key=lambda point: point.slope.name == self.bound)


def _decades(low: float, high: float, least: int = 2) -> tuple[int, int]:
    """Return the powers of ten around two numbers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return min(first, last - least), last


def _power(power: int) -> str:
    if power < 0:
        return f"{10.0**power:g}"
    return in_thousands(10.0**power).replace(".00", "").replace(".0", "")
