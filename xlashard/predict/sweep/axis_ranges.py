"""Axes of the meshes of a sweep: valid sizes, and the meshes that they allow."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xlashard.errors import ArgumentError, counted
from xlashard.geometry.strides import divisors
from xlashard.support.tracebacks import short_tracebacks

_RANGE = re.compile(r"(\d*)\.\.(\d*)")


@dataclass(frozen=True)
class AxisRange:
    """Valid sizes of a mesh axis.

    Attributes:
        least: Minimum.
        most: Maximum; None for the number of devices.
    """

    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        if self.least < 1 or (self.most is not None and self.most < self.least):
            raise ArgumentError(
                f"invalid range of mesh axis sizes, {self.least} to {self.most}: write 2..8, "
                f"..8, 2.. "
                "or auto"
            )

    def __contains__(self, size: object) -> bool:
        if not isinstance(size, int):
            return False
        return self.least <= size and (self.most is None or size <= self.most)

    def __str__(self) -> str:
        if self == AxisRange():
            return "auto"
        if self.least == self.most:
            return str(self.least)
        least = "" if self.least == 1 else self.least
        return f"{least}..{'' if self.most is None else self.most}"


type AxisSizes = int | str | AxisRange
"""Valid sizes of a mesh axis: a size, `"auto"`, `"2..8"`, `"..8"`, `"2.."`, or a range."""


def read_axes(axes: Mapping[str, AxisSizes]) -> dict[str, AxisRange]:
    """Parse the valid sizes of mesh axes.

    Raises:
        ArgumentError: If there are no axes, or a size is invalid.

    Example:
        >>> read_axes({"data": "auto", "model": "..8", "expert": 4})["model"]
        AxisRange(least=1, most=8)
    """
    if not isinstance(axes, Mapping) or not axes:
        raise ArgumentError(
            f"mesh={axes!r} is invalid: expected axis names with sizes, "
            "{'data': 'auto', 'model': '..8'}"
        )
    with short_tracebacks:
        return {name: _range(name, size) for name, size in axes.items()}


def _range(name: str, size: AxisSizes) -> AxisRange:
    if isinstance(size, AxisRange):
        return size
    if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
        return AxisRange(size, size)
    text = size.strip() if isinstance(size, str) else ""
    if text == "auto":
        return AxisRange()
    if text.isascii() and text.isdecimal() and int(text):
        return AxisRange(int(text), int(text))
    match = _RANGE.fullmatch(text)
    if match is None or text == "..":
        raise ArgumentError(
            f"mesh axis {name!r} has the invalid size {size!r}: write a number of devices, auto, "
            f"or a range such as {name}=2..8 or {name}=..8"
        )
    return AxisRange(int(match[1] or 1), int(match[2]) if match[2] else None)


def parse_axes(text: str) -> dict[str, AxisRange]:
    """Parse the axes of a command line: `data=auto,tensor=..8,expert=4`.

    Raises:
        ArgumentError: If the text is invalid.

    Example:
        >>> {name: str(sizes) for name, sizes in parse_axes("data=auto,tensor=..8").items()}
        {'data': 'auto', 'tensor': '..8'}
    """
    ranges: dict[str, AxisRange] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not name or name in ranges:
            raise ArgumentError(
                f"--mesh {text}: {part!r} is not NAME=SIZE; write --mesh "
                "data=auto,tensor=..8,expert=4"
            )
        ranges[name] = _range(name, size)
    return ranges


def factorisations(count: int, axes: Mapping[str, AxisRange]) -> tuple[dict[str, int], ...]:
    """Return all meshes of a number of devices, the first axis largest first.

    Args:
        count: Number of devices.
        axes: Valid sizes of each axis, in mesh order.

    Returns:
        Axis sizes of each mesh.

    Raises:
        ArgumentError: If no mesh has this many devices.

    Example:
        >>> factorisations(8, {"data": AxisRange(), "model": AxisRange(most=2)})
        ({'data': 8, 'model': 1}, {'data': 4, 'model': 2})
    """
    meshes = tuple(
        dict(zip(axes, sizes, strict=True)) for sizes in _products(count, tuple(axes.values()))
    )
    if not meshes:
        size = ", ".join(f"{name}={sizes}" for name, sizes in axes.items())
        raise ArgumentError(
            f"no mesh of {size} has {counted(count, 'device')}: the axis sizes must multiply to "
            "that; make one of them auto"
        )
    return meshes


def _products(count: int, ranges: tuple[AxisRange, ...]) -> Iterator[tuple[int, ...]]:
    """Yield sizes within ranges that multiply to a count."""
    if not ranges:
        if count == 1:
            yield ()
        return
    first, *rest = ranges
    least = math.prod(r.least for r in rest)
    for size in reversed(divisors(count)):
        if size in first and count // size >= least:
            for others in _products(count // size, tuple(rest)):
                yield (size, *others)
