"""Time of a step: bars per resource, and the roofline plot.

HBM and each network have a line of their own in the plot, whose slope is the bandwidth. The program
has one point per line, at its FLOP per byte of that resource and at the estimated FLOP/s. The point
that touches its line shows the bound. FLOP are those of matrix products, as the roof is that of the
matrix units.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from xlashard.errors import counted
from xlashard.tpu.preflight.render.html.markup import Html, join, tag, user_text
from xlashard.tpu.preflight.render.report_text import in_thousands, three_digits
from xlashard.tpu.preflight.report.preflight_model import TimeEstimate, TopologyReport
from xlashard.wording import in_bytes, in_flop, in_percent, in_seconds

BOUNDS = {
    "compute": "arithmetic",
    "hbm": "the chip's memory (HBM)",
    "ici": "the links between chips (ICI)",
    "dcn": "the network between slices (DCN)",
}
"""Descriptions of the resources that bound the time."""

SHORT = {"compute": "compute", "hbm": "HBM", "ici": "ICI", "dcn": "DCN"}
"""Short names of the resources."""


@dataclass(frozen=True)
class _Bar:
    key: str
    name: Html | str
    seconds: float
    words: str
    kind: str


def time_section(time: TimeEstimate) -> Html:
    """Return the bars, and notes on uncounted work."""
    bars = list(_bars(time))
    longest = max(bar.seconds for bar in bars) or 1.0
    rows = [_row(bar, longest, is_bound=bar.key == time.bound) for bar in bars]
    head = tag(
        "thead",
        tag(
            "tr",
            [tag("th", name, scope="col") for name in ("what", "of what", "how long")],
        ),
        class_="unseen",
    )
    lead = f"The step waits for {BOUNDS[time.bound]}: {in_seconds(time.roofline_seconds)} at least."
    return join(
        tag("p", lead, class_="lead"),
        [tag("p", user_text(words), class_="warns note") for words in _uncounted(time)],
        tag(
            "table",
            tag("caption", "Time of one step", class_="unseen"),
            head,
            tag("tbody", rows),
            class_="times",
        ),
    )


def _bars(time: TimeEstimate) -> Iterator[_Bar]:
    yield _Bar("compute", "compute", time.compute_seconds, _work(time), "compute")
    moved = f"{in_bytes(time.hbm_bytes)} read and written"
    yield _Bar("hbm", "HBM", time.hbm_seconds, moved, "hbm")
    for network, seconds in (("ici", time.ici_seconds), ("dcn", time.dcn_seconds)):
        parts = [t for t in time.traffic if t.network == network]
        sent = in_bytes(sum(t.sent_bytes for t in parts))
        if parts or network == "ici":
            words = f"{sent} sent" if parts else "nothing sent"
            yield _Bar(network, SHORT[network], seconds, words, network)
        for part in parts:
            name = join("along ", user_text(part.along))
            words = f"{in_bytes(part.sent_bytes)} sent"
            yield _Bar(f"{network} {part.along}", name, part.seconds, words, f"{network} detail")
    if time.compiler_seconds is not None:
        words = "the compiler's schedule, by the cycles that it notes, loops counted"
        yield _Bar("compiler", "compiler", time.compiler_seconds, words, "compiler")


def _work(time: TimeEstimate) -> str:
    kinds = ", ".join(f"{in_flop(flops)} {dtype}" for dtype, flops in time.flops_by_dtype)
    parts = [f"{kinds} in matrix products"] if kinds else []
    if time.elementwise_flops:
        parts.append(f"{in_flop(time.elementwise_flops)} besides, which count as free")
    return "; ".join(parts) or f"{in_flop(time.flops)}, none of it in matrix products"


def _uncounted(time: TimeEstimate) -> Iterator[str]:
    """Yield notes on work that the times leave out."""
    if time.unknown_loops:
        loops = counted(time.unknown_loops, "loop")
        verb = "counts" if time.unknown_loops == 1 else "count"
        yield f"{loops} of unknown trip count {verb} as one iteration: the true times are longer."
    if time.unknown_calls:
        calls = ", ".join(f"{name} ×{times:,}" for name, times in time.unknown_calls)
        yield f"Custom calls without a cost estimate count as zero: {calls}."


def _row(bar: _Bar, longest: float, *, is_bound: bool) -> Html:
    width = f"width:{bar.seconds / longest * 100:.2f}%"
    fill = tag("i", style=width, class_="fill")
    badge = tag("span", "bound", class_="tag") if is_bound else None
    return tag(
        "tr",
        tag("th", bar.name, badge, scope="row"),
        tag("td", fill if bar.seconds else None, tag("span", bar.words, class_="words")),
        tag("td", in_seconds(bar.seconds), class_="number", data_value=repr(bar.seconds)),
        class_=f"{bar.kind}{' bound' if is_bound else ''}",
        data_bar=bar.key,
    )


_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 18, 18, 50
_LETTER = 6.6
_BESIDE = 90
_SHAPES = {
    "hbm": "M-7 0A7 7 0 1 0 7 0A7 7 0 1 0 -7 0Z",
    "ici": "M0-8.5L8.5 0L0 8.5L-8.5 0Z",
    "dcn": "M-6.5-6.5H6.5V6.5H-6.5Z",
}


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


def roofline_section(time: TimeEstimate, topology: TopologyReport) -> Html:
    """Return the plot and its legend."""
    roofline = read_roofline(time, topology)
    if roofline is None:
        return tag("p", "The program does no arithmetic: there is nothing to plot.", class_="lead")
    share = in_percent(roofline.reached / roofline.roof)
    reached, roof = (f"{in_thousands(n)}FLOP/s" for n in (roofline.reached, roofline.roof))
    lead = f"{reached} on each device, {share} of the {roof} that its matrix units do."
    rows = [_legend_row(roofline, s, is_bound=s.name == time.bound) for s in roofline.slopes]
    head = ("", "FLOP per byte", "turns at", "bandwidth")
    return join(
        tag("p", lead, class_="lead"),
        tag("div", _Plot(roofline, time).svg(lead), class_="plot"),
        tag(
            "table",
            tag("caption", "Arithmetic intensity", class_="unseen"),
            tag("thead", tag("tr", [tag("th", n or "what", scope="col") for n in head])),
            tag("tbody", rows),
            class_="legend intensities",
        ),
    )


def _legend_row(roofline: Roofline, slope: Slope, *, is_bound: bool) -> Html:
    intensity = roofline.intensity(slope)
    marker = tag(
        "svg", tag("path", d=_SHAPES[slope.name]), viewBox="-9 -9 18 18", aria_hidden="true"
    )
    cells = (
        (in_thousands(intensity), intensity),
        (in_thousands(roofline.roof / slope.bandwidth), roofline.roof / slope.bandwidth),
        (f"{in_thousands(slope.bandwidth)}B/s", slope.bandwidth),
    )
    badge = tag("span", "bound", class_="tag") if is_bound else None
    return tag(
        "tr",
        tag("th", marker, " ", SHORT[slope.name], badge, scope="row"),
        [tag("td", text, class_="number", data_value=repr(float(v))) for text, v in cells],
        class_=slope.name,
        data_slope=slope.name,
    )


class _Plot:
    """Coordinates of the plot, in pixels."""

    def __init__(self, roofline: Roofline, time: TimeEstimate) -> None:
        self.roofline = roofline
        self.bound = time.bound
        self.compiler = None
        if time.compiler_seconds:
            self.compiler = roofline.flops / time.compiler_seconds
        across = [1.0]
        for slope in roofline.slopes:
            across += [roofline.intensity(slope), roofline.roof / slope.bandwidth]
        self.across = _decades(min(across) / 2, max(across) * 4)
        heights = [roofline.reached, roofline.roof, *([self.compiler] if self.compiler else [])]
        self.up = _decades(min(heights) / 8, max(heights) * 1.6, least=3)

    def svg(self, words: str) -> Html:
        """Return the plot as an SVG element."""
        title = "Roofline, both axes logarithmic"
        return tag(
            "svg",
            tag("title", title),
            tag("desc", words),
            tag("g", *self._grid(), class_="grid"),
            tag("g", *self._lines()),
            tag("g", *self._points()),
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            role="img",
            aria_label=f"{title}: {words}",
            class_="roofline",
        )

    def _x(self, intensity: float) -> float:
        low, high = self.across
        share = (math.log10(intensity) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, flops: float) -> float:
        low, high = self.up
        share = (math.log10(flops) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def _grid(self) -> Iterator[Html]:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        across, up = range(self.across[0], self.across[1] + 1), range(*self.up)
        step = max(1, len(across) // 9)
        for n, power in enumerate(across):
            x = self._x(10.0**power)
            yield tag("path", d=f"M{x:.1f} {_TOP}V{bottom}")
            if n % step == 0:
                yield _text(x, bottom + 18, _power(power), text_anchor="middle")
        for power in (*up, self.up[1]):
            y = self._y(10.0**power)
            yield tag("path", d=f"M{_LEFT} {y:.1f}H{right}")
            yield _text(_LEFT - 8, y + 4, _power(power), text_anchor="end")
        middle = (_LEFT + right) / 2
        yield _text(middle, _HEIGHT - 8, "FLOP per byte moved", text_anchor="middle")
        place = f"rotate(-90 14 {(_TOP + bottom) / 2})"
        yield _text(14, (_TOP + bottom) / 2, "FLOP/s", text_anchor="middle", transform=place)

    def _lines(self) -> Iterator[Html]:
        roofline = self.roofline
        y, right = self._y(roofline.roof), _WIDTH - _RIGHT
        turns = [roofline.roof / slope.bandwidth for slope in roofline.slopes]
        start = self._x(min(turns, default=10.0 ** self.across[0]))
        bound = " bound" if self.bound == "compute" else ""
        yield tag("path", d=f"M{start:.1f} {y:.1f}H{right}", class_=f"line compute{bound}")
        label = f"compute {in_thousands(roofline.roof)}FLOP/s"
        # Above the points that lie on the roof.
        lift = 15 if abs(self._y(roofline.reached) - y) < 12 else 7
        yield _text(right - 2, y - lift, label, text_anchor="end", class_="label")
        for slope, turn in zip(roofline.slopes, turns, strict=True):
            yield from self._slope(slope, turn)
        if self.compiler is not None:
            height = self._y(self.compiler)
            yield tag("path", d=f"M{_LEFT} {height:.1f}H{right}", class_="line compiler")
            yield _text(_LEFT + 6, height - 5, "compiler's estimate", class_="label quiet")

    def _slope(self, slope: Slope, turn: float) -> Iterator[Html]:
        foot = max(10.0 ** self.across[0], 10.0 ** self.up[0] / slope.bandwidth)
        if foot >= turn:
            return
        (x1, y1), (x2, y2) = ((self._x(x), self._y(x * slope.bandwidth)) for x in (foot, turn))
        bound = " bound" if slope.name == self.bound else ""
        d = f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"
        yield tag("path", d=d, class_=f"line {slope.name}{bound}")
        label = f"{SHORT[slope.name]} {in_thousands(slope.bandwidth)}B/s"
        angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
        along = min(0.5, (_LETTER * len(label) / 2 + 14) / math.hypot(x2 - x1, y2 - y1))
        x, y = x1 + along * (x2 - x1), y1 + along * (y2 - y1)
        turned = f"translate({x:.1f} {y:.1f}) rotate({angle:.1f})"
        yield _text(0, -7, label, text_anchor="middle", transform=turned, class_="label")

    def _points(self) -> Iterator[Html]:
        roofline = self.roofline
        y = self._y(roofline.reached)
        found = [(self._x(roofline.intensity(s)), s) for s in roofline.slopes]
        places = sorted(found, key=lambda place: place[0])
        for (one, _), (other, _) in pairwise(places):
            yield tag("path", d=f"M{one:.1f} {y:.1f}H{other:.1f}", class_="joins")
        drawn: list[tuple[bool, Html]] = []
        before, is_low = -math.inf, False
        for x, slope in places:
            is_low = not is_low if x - before < _BESIDE else False
            before = x
            is_bound = slope.name == self.bound
            drawn.append((is_bound, self._point(x, y, slope, is_low=is_low)))
        # The point of the bound is drawn last, on top.
        for _, point in sorted(drawn, key=lambda one: one[0]):
            yield point

    def _point(self, x: float, y: float, slope: Slope, *, is_low: bool) -> Html:
        intensity = self.roofline.intensity(slope)
        name = SHORT[slope.name]
        tip = (
            f"{three_digits(intensity)} FLOP per byte of {name}, "
            f"{in_thousands(self.roofline.reached)}FLOP/s"
        )
        label = f"{name} {in_thousands(intensity)}"
        return tag(
            "g",
            tag("title", tip),
            tag("path", d=_SHAPES[slope.name], transform=f"translate({x:.1f} {y:.1f})"),
            _text(x, y + (38 if is_low else 24), label, text_anchor="middle", class_="label"),
            class_=f"point {slope.name}{' bound' if slope.name == self.bound else ''}",
            data_point=slope.name,
        )


def _decades(low: float, high: float, least: int = 2) -> tuple[int, int]:
    """Return the powers of ten around two numbers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return min(first, last - least), last


def _power(power: int) -> str:
    if power < 0:
        return f"{10.0**power:g}"
    return in_thousands(10.0**power).replace(".00", "").replace(".0", "")


def _text(x: float, y: float, text: str, **attributes: str | None) -> Html:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)
