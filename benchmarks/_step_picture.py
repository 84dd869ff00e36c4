"""Picture of predicted by measured step times, with their error bars, by chip."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple


class Ratio(NamedTuple):
    """Predicted by measured time of a run.

    Attributes:
        name: Name of the run.
        value: The ratio.
        low: Lower end of the error bar.
        high: Its upper end; None for a lower bound.
    """

    name: str
    value: float
    low: float
    high: float | None


_GAP, _LEFT, _TOP, _HEIGHT = 16, 46, 52, 240
_WIDTH = 640
"""Width of all runs, of which none takes more than 24."""
_LOWEST, _HIGHEST = 0.5, 1.75
_TICKS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
_STYLE = (
    ".steps{color:#1f2328;--paper:#fff;--held:#0969da;--missed:#bc4c00}"
    ".steps .paper{fill:var(--paper)}"
    ".steps .held{fill:var(--held)}.steps g.held{stroke:var(--held)}"
    ".steps .missed{fill:var(--missed)}.steps g.missed{stroke:var(--missed)}"
    "@media(prefers-color-scheme:dark)"
    "{.steps{color:#e6edf3;--paper:#0d1117;--held:#58a6ff;--missed:#f0883e}}"
)


def draw_ratios(groups: Mapping[str, Sequence[Ratio]], title: str) -> str:
    """Return the picture as SVG: a column of runs for each chip, and the line of the measurements.

    Args:
        groups: Ratios by chip.
        title: Title of the picture.
    """
    parts, at = [], _LEFT + _GAP
    step = min(_WIDTH / max(sum(map(len, groups.values())), 1), 24)
    for chip, ratios in groups.items():
        width = max(len(ratios) * step, 8 * len(chip))
        parts.append(
            f'<text x="{at + width / 2:.0f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">'
            f"{escape(chip)}</text>"
        )
        begin = at + (width - len(ratios) * step) / 2 + step / 2
        for number, ratio in enumerate(sorted(ratios, key=lambda each: each.value)):
            parts += _draw_run(ratio, begin + number * step)
        at += width + _GAP
    width, height = max(at, 560), _TOP + _HEIGHT + 30
    label = escape(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="steps" role="img" '
            f'aria-label="{label}" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
            f'height="{height}" style="max-width:100%;height:auto" '
            'font-family="system-ui,sans-serif" font-size="12" fill="currentColor">',
            f"<title>{label}</title><style>{_STYLE}</style>",
            f'<rect class="paper" width="{width:.0f}" height="{height}" rx="6"/>',
            f'<text x="8" y="20" font-weight="bold">{label}</text>',
            '<text x="8" y="38">A point is a run; its bar is <tspan class="held">blue where it '
            'holds the measurement</tspan>, <tspan class="missed">orange elsewhere</tspan></text>',
            *_draw_scale(width),
            *parts,
            "</svg>\n",
        ]
    )


def _draw_scale(width: float) -> list[str]:
    lines = []
    for tick in _TICKS:
        y = _height(tick)
        strong = ' stroke-width="1.5"' if tick == 1 else ' stroke-opacity=".2"'
        lines.append(
            f'<path d="M{_LEFT} {y:.1f}H{width - 8:.0f}" stroke="currentColor"{strong}/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>'
        )
    return lines


def _draw_run(ratio: Ratio, x: float) -> list[str]:
    """Return a run's point and bar; a point off the scale stands at its edge as a triangle."""
    high = _HIGHEST if ratio.high is None else ratio.high
    kind = "held" if ratio.low <= 1 <= high else "missed"
    bar = f"M{x:.1f} {_height(ratio.low):.1f}V{_height(high):.1f}"
    y, text = _height(ratio.value), f"{ratio.name}: {ratio.value:.0%} of the measured time"
    point = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" stroke="none"/>'
    if not _LOWEST <= ratio.value <= _HIGHEST:
        way = 6 if ratio.value < _LOWEST else -6
        point = f'<path d="M{x - 4:.1f} {y - way:.1f}h8l-4 {way}z" stroke="none"/>'
    return [
        f'<g class="{kind}"><title>{escape(text)}</title>'
        f'<path d="{bar}" stroke-width="2" stroke-opacity=".6"/>{point}</g>'
    ]


def _height(ratio: float) -> float:
    share = (min(max(ratio, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return _TOP + _HEIGHT * (1 - share)
