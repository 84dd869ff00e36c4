"""The meshes that a number of devices can form, and how a person says which of them to try."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError

_RANGE = re.compile(r"(\d*)\.\.(\d*)")


@dataclass(frozen=True)
class AxisRange:
    """The sizes that a mesh axis may have.

    Attributes:
        least: The smallest.
        most: The largest; None for as many as there are devices.
    """

    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        if self.least < 1 or (self.most is not None and self.most < self.least):
            raise ArgumentError(
                f"a mesh axis has no sizes from {self.least} to {self.most}: write 2..8, ..8, 2.. "
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
"""What a mesh axis may be: a size, `"auto"`, `"2..8"`, `"..8"`, `"2.."`, or a range."""


def read_axes(axes: Mapping[str, AxisSizes]) -> dict[str, AxisRange]:
    """The ranges of mesh axes, as somebody wrote them.

    Raises:
        ArgumentError: If there are none, or one is no size and no range.

    Example:
        >>> read_axes({"data": "auto", "model": "..8", "expert": 4})["model"]
        AxisRange(least=1, most=8)
    """
    if not isinstance(axes, Mapping) or not axes:
        raise ArgumentError(
            f"the axes of a sweep are names with sizes, not {axes!r}: write "
            "{'data': 'auto', 'model': '..8'}"
        )
    with short_tracebacks:
        return {name: _range(name, said) for name, said in axes.items()}


def _range(name: str, said: AxisSizes) -> AxisRange:
    if isinstance(said, AxisRange):
        return said
    if isinstance(said, int) and not isinstance(said, bool) and said >= 1:
        return AxisRange(said, said)
    text = said.strip() if isinstance(said, str) else ""
    if text == "auto":
        return AxisRange()
    if text.isascii() and text.isdecimal() and int(text):
        return AxisRange(int(text), int(text))
    found = _RANGE.fullmatch(text)
    if found is None or text == "..":
        raise ArgumentError(
            f"mesh axis {name!r} has the size {said!r}: write a number of devices, auto, or a "
            f"range such as {name}=2..8 or {name}=..8"
        )
    return AxisRange(int(found[1] or 1), int(found[2]) if found[2] else None)


def parse_axes(text: str) -> dict[str, AxisRange]:
    """The axes of a command line: `data=auto,tensor=..8,expert=4`.

    Raises:
        ArgumentError: If it is no such list.

    Example:
        >>> {name: str(sizes) for name, sizes in parse_axes("data=auto,tensor=..8").items()}
        {'data': 'auto', 'tensor': '..8'}
    """
    found: dict[str, AxisRange] = {}
    for part in text.split(","):
        name, equals, said = (word.strip() for word in part.partition("="))
        if not equals or not name or name in found:
            raise ArgumentError(
                f"--mesh {text}: {part!r} is no axis with a size; write --mesh "
                "data=auto,tensor=..8,expert=4"
            )
        found[name] = _range(name, said)
    return found


def factorisations(count: int, axes: Mapping[str, AxisRange]) -> tuple[dict[str, int], ...]:
    """All meshes of a number of devices over some axes, the first axis largest first.

    Args:
        count: How many devices there are.
        axes: The sizes that each axis may have, in the order of the mesh.

    Returns:
        The sizes of each mesh by axis.

    Raises:
        ArgumentError: If no mesh of these axes has as many devices.

    Example:
        >>> factorisations(8, {"data": AxisRange(), "model": AxisRange(most=2)})
        ({'data': 8, 'model': 1}, {'data': 4, 'model': 2})
    """
    found = tuple(
        dict(zip(axes, sizes, strict=True)) for sizes in _products(count, tuple(axes.values()))
    )
    if not found:
        said = ", ".join(f"{name}={sizes}" for name, sizes in axes.items())
        raise ArgumentError(
            f"no mesh of {said} has {count:,} devices: the sizes of the axes multiply to that, so "
            "leave one of them auto"
        )
    return found


def _products(count: int, ranges: tuple[AxisRange, ...]) -> Iterator[tuple[int, ...]]:
    """Sizes within ranges that multiply to a count."""
    if not ranges:
        if count == 1:
            yield ()
        return
    first, *rest = ranges
    least = math.prod(r.least for r in rest)
    for size in reversed(_divisors(count)):
        if size in first and count // size >= least:
            for others in _products(count // size, tuple(rest)):
                yield (size, *others)


def _divisors(count: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    return low + [count // n for n in reversed(low) if n * n != count]
