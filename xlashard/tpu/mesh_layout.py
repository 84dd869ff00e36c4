"""Lay the axes of a device mesh on a torus."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xlashard.errors import TopologyError

# How much less the next axis in order counts than the one before it.
_PRECEDENCE = 4.0


@dataclass(frozen=True)
class Dimension:
    """One dimension of a torus.

    Attributes:
        name: `x`.
        size: Positions along it.
        wraps: Whether its ends are joined.
    """

    name: str
    size: int
    wraps: bool = False


@dataclass(frozen=True)
class AxisPart:
    """What an axis has of a dimension.

    Attributes:
        dimension: Its name.
        size: How many positions of it the axis runs over.
        stride: How far apart they are.
        ring: Whether it closes: going on from the last, the first is next.
    """

    dimension: str
    size: int
    stride: int
    ring: bool

    @property
    def links(self) -> float:
        """Links by which a position sends along it, shared ones by their share.

        A position in a ring sends both ways, one at the end of a line has one link; where the
        positions are `stride` apart, as many groups of them share each link.
        """
        if self.size == 1:
            return 0.0
        return (2.0 if self.ring and self.size > 2 else 1.0) / self.stride


def part(dimension: Dimension, size: int, stride: int) -> AxisPart:
    """What an axis has that runs over so many positions of a dimension, so far apart."""
    closes = dimension.wraps and size * stride == dimension.size
    return AxisPart(dimension.name, size, stride, closes or (size == 2 and stride == 1))


class _Choice(NamedTuple):
    """Factors for some axes; the least is the best.

    Attributes:
        cuts: How often a dimension is cut between axes.
        seconds: The measure of their speed.
        factors: For each axis those of each dimension.
    """

    cuts: int
    seconds: float
    factors: tuple[tuple[int, ...], ...]


def usable_links(parts: Sequence[AxisPart]) -> float:
    """Links by which each of the positions sends that some parts reach together.

    Rings add up. What is open is gone through in one line or circle, whatever it is made of, and
    that has two links at most.
    """
    rings = sum(p.links for p in parts if p.ring and p.size > 2)
    return rings + min(2.0, sum(p.links for p in parts if not p.ring or p.size == 2))


def lay_out_axes(
    torus: Sequence[Dimension], sizes: Sequence[int]
) -> tuple[tuple[AxisPart, ...], ...]:
    """Lays axes on a torus.

    Of all ways of dealing out factors those are looked at that cut the fewest dimensions, and of
    these the one is taken that gives the axes the fastest links, each counting four times as much
    as the one after it: the least sum of the times in which each gathers a byte from its devices.

    Args:
        torus: Its dimensions.
        sizes: Of the axes, the one that talks most first; together they are the whole torus.

    Returns:
        For each axis its parts, in the order of the dimensions.
    """
    whole = tuple(dimension.size for dimension in torus)

    @cache
    def best(axis: int, left: tuple[int, ...]) -> _Choice:
        """The best factors of this axis and all after it."""
        if axis == len(sizes):
            return _Choice(0, 0.0, ())
        found = []
        for factors in _factorings(sizes[axis], left):
            later = best(axis + 1, tuple(a // b for a, b in zip(left, factors, strict=True)))
            links = usable_links(_parts(torus, factors, left))
            seconds = (1 - 1 / sizes[axis]) / links if links else 0.0
            cuts = sum(1 for f, size in zip(factors, left, strict=True) if 1 < f < size)
            found.append(
                _Choice(
                    later.cuts + cuts,
                    round(seconds + later.seconds / _PRECEDENCE, 12),
                    (factors, *later.factors),
                )
            )
        # Of equal ones that which leaves the first dimensions to later axes.
        return min(found)

    left, laid = whole, []
    for factors in best(0, whole).factors:
        laid.append(tuple(p for p in _parts(torus, factors, left) if p.size > 1))
        left = tuple(a // b for a, b in zip(left, factors, strict=True))
    return tuple(laid)


def _parts(
    torus: Sequence[Dimension], factors: Sequence[int], left: Sequence[int]
) -> list[AxisPart]:
    """What an axis of these factors gets, where of each dimension so much is left."""
    return [
        part(d, factor, d.size // rest)
        for d, factor, rest in zip(torus, factors, left, strict=True)
    ]


@lru_cache(maxsize=4096)
def _factorings(size: int, left: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All ways to write a size as a product of divisors of what is left of each dimension."""
    if not left:
        return ((),) if size == 1 else ()
    first, *others = left
    return tuple(
        (factor, *rest)
        for factor in _divisors(math.gcd(first, size))
        for rest in _factorings(size // factor, tuple(others))
    )


def resolve_axis_sizes(axes: Mapping[str, int], devices: int, where: str) -> dict[str, int]:
    """The sizes of mesh axes, with a number in place of -1.

    Raises:
        TopologyError: If they are not sizes, or not as many devices as there are.
    """
    if not isinstance(axes, Mapping) or not axes:
        raise TopologyError(
            f"the axes of a mesh are names with sizes, not {axes!r}", axes={"data": devices}
        )
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise TopologyError(
                f"mesh axis {name!r} has the size {size!r}; it is a number of devices, at least 1, "
                "or -1 for those that the other axes leave",
                axes=dict(axes) | {name: 1 if -1 in axes.values() else -1},
            )
    free = [name for name, size in axes.items() if size == -1]
    if len(free) > 1:
        raise TopologyError(
            f"mesh axes {free[0]!r} and {free[1]!r} are both -1; one of them can take what the "
            "others leave",
            axes=dict(axes) | dict.fromkeys(free[1:], 1),
        )
    said = math.prod(size for size in axes.values() if size != -1)
    if devices % said if free else said != devices:
        raise _mismatch(axes, devices, where)
    return {name: devices // said if size == -1 else size for name, size in axes.items()}


def arrange_devices(
    grid: npt.NDArray[np.object_],
    dimensions: Sequence[Dimension],
    sizes: Mapping[str, int],
    order: Sequence[str] | None,
) -> npt.NDArray[np.object_]:
    """The devices of a mesh.

    Args:
        grid: All devices by their coordinates.
        dimensions: Of the grid: slices first, the torus, the devices of a chip last.
        sizes: Of the axes, together as many as there are devices.
        order: The axes, the one that talks most first; None for the last axis first.
    """
    names = _by_talk(sizes, order)
    digits = _digits(dimensions, {name: sizes[name] for name in names})
    # Every dimension is cut into what each axis has of it, the part with the longest steps first.
    cuts = [
        sorted(
            ((p.stride, name, p.size) for name, p in digits if p.dimension == dimension.name),
            reverse=True,
        )
        for dimension in dimensions
    ]
    flat = [(name, size) for cut in cuts for _, name, size in cut]
    fine = grid.reshape([size for _, size in flat])
    places = [i for name in sizes for i, (owner, _) in enumerate(flat) if owner == name]
    return fine.transpose(places).reshape(tuple(sizes.values()))


def _digits(
    dimensions: Sequence[Dimension], sizes: Mapping[str, int]
) -> list[tuple[str, AxisPart]]:
    """What each axis has of each dimension; the axes come as they talk, the most first."""
    slices, *torus, cores = dimensions
    left = dict(sizes)
    outer = _shared(slices, left, reversed(left))
    inner = _shared(cores, left, left)
    laid = lay_out_axes(torus, tuple(left.values()))
    middle = [(name, p) for name, parts in zip(left, laid, strict=True) for p in parts]
    return [*outer, *middle, *inner]


def _shared(
    dimension: Dimension, left: dict[str, int], names: Iterable[str]
) -> list[tuple[str, AxisPart]]:
    """Deals one dimension out to the axes, each as much as it can take, and takes it from them."""
    parts, remaining = [], dimension.size
    for name in tuple(names):
        factor = math.gcd(remaining, left[name])
        if factor > 1:
            remaining //= factor
            left[name] //= factor
            parts.append((name, part(dimension, factor, remaining)))
    return parts


def _by_talk(sizes: Mapping[str, int], order: Sequence[str] | None) -> tuple[str, ...]:
    if order is None:
        return tuple(sizes)[::-1]
    if isinstance(order, str) or sorted(order) != sorted(sizes):
        raise TopologyError(
            f"order is {order!r}; it names each mesh axis once, the one that sends the most "
            f"first: order={list(sizes)[::-1]}"
        )
    return tuple(order)


def _mismatch(axes: Mapping[str, int], devices: int, where: str) -> TopologyError:
    said = " x ".join(f"{name}={size}" for name, size in axes.items())
    product = math.prod(size for size in axes.values() if size != -1)
    counts = f"a mesh of {said} has {product:,} devices, and {where} has {devices:,}"
    if -1 in axes.values():
        counts = f"mesh axes {said}: {product:,} doesn't divide the {devices:,} devices of {where}"
    # The first axis that comes out whole is the one to change.
    for name, size in axes.items():
        others = product // size
        if size != -1 and devices % others == 0:
            fitting = devices // others
            if -1 in axes.values():
                fitting = min(_divisors(fitting), key=lambda divisor: abs(divisor - size))
            return TopologyError(counts, axes=dict(axes) | {name: fitting})
    return TopologyError(
        f"{counts}; the size of an axis divides that: {_listed(_divisors(devices))}",
        axes=dict.fromkeys(list(axes)[:1], devices),
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) <= 12:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:8]))}, ... {numbers[-1]}"
