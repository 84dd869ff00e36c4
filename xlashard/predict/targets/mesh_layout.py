"""Layout of mesh axes on a torus, maximising the bandwidth of each axis.

A torus is a box of positions; some dimensions wrap around. An axis of `n` devices takes factors of
one or more dimensions whose product is `n`. Axes placed earlier have smaller strides; axes placed
later step over them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xlashard.errors import TopologyError, counted
from xlashard.geometry.strides import divisors

# Weight of an axis relative to the next one in order.
_PRECEDENCE = 4.0


@dataclass(frozen=True)
class Dimension:
    """Dimension of a torus.

    Attributes:
        name: Name: `x`.
        size: Number of positions.
        wraps: Whether the dimension wraps around.
    """

    name: str
    size: int
    wraps: bool = False


@dataclass(frozen=True)
class AxisSegment:
    """Extent of a mesh axis along one dimension.

    Attributes:
        dimension: Name of the dimension.
        size: Number of positions of the axis.
        stride: Distance between neighbouring positions of the axis.
        ring: Whether the positions form a ring.
    """

    dimension: str
    size: int
    stride: int
    ring: bool

    @property
    def links(self) -> float:
        """Links per position, weighted by share.

        A position in a ring sends both ways; the end of a line has one link. With a stride,
        `stride` groups share each link.
        """
        if self.size == 1:
            return 0.0
        return (2.0 if self.ring and self.size > 2 else 1.0) / self.stride


def part(dimension: Dimension, size: int, stride: int) -> AxisSegment:
    """Return the extent of an axis of `size` positions along a dimension."""
    closes = dimension.wraps and size * stride == dimension.size
    return AxisSegment(dimension.name, size, stride, closes or (size == 2 and stride == 1))


def extents(
    dimensions: Sequence[Dimension], coordinates: npt.NDArray[np.int64]
) -> tuple[AxisSegment, ...]:
    """Return the extent of a group of positions along each dimension in which they differ.

    Of several groups, the widest extent and the largest stride. Groups that each fill a box of one
    extent have as many members as the product of its sizes.

    Args:
        dimensions: The dimensions.
        coordinates: Coordinates of the positions: `[positions, dimensions]`, or of the positions of
            each group: `[groups, positions, dimensions]`.

    Example:
        >>> plane = Dimension("x", 4, wraps=True), Dimension("y", 2)
        >>> extents(plane, np.array([[0, 1], [2, 1]]))
        (AxisSegment(dimension='x', size=2, stride=2, ring=True),)
    """
    groups = np.sort(coordinates.reshape(-1, *coordinates.shape[-2:]), axis=1)
    segments = []
    for index, dimension in enumerate(dimensions):
        places = groups[..., index]
        gaps = np.diff(places, axis=1)
        size = int((gaps > 0).sum(axis=1).max()) + 1
        if size == 1:
            continue
        strides = np.where(gaps > 0, gaps, dimension.size).min(axis=1)
        if dimension.wraps:
            # The first and the last position can be neighbours.
            strides = np.minimum(strides, places[:, 0] + dimension.size - places[:, -1])
        segments.append(part(dimension, size, int(strides.max())))
    return tuple(segments)


class _Choice(NamedTuple):
    """Factors for the remaining axes; the smallest tuple is the best.

    Attributes:
        cuts: Number of dimensions split between axes.
        seconds: Weighted gather time.
        factors: Per axis, one factor per dimension.
    """

    cuts: int
    seconds: float
    factors: tuple[tuple[int, ...], ...]


def usable_links(parts: Sequence[AxisSegment]) -> float:
    """Return the links with which each position of a group sends.

    Rings add up. Open dimensions form a single line or cycle with at most two links.
    """
    rings = sum(p.links for p in parts if p.ring and p.size > 2)
    return rings + min(2.0, sum(p.links for p in parts if not p.ring or p.size == 2))


def lay_out_axes(
    torus: Sequence[Dimension], sizes: Sequence[int]
) -> tuple[tuple[AxisSegment, ...], ...]:
    """Lay mesh axes on a torus.

    Among the factorisations that split the fewest dimensions, choose the one with the least
    weighted sum of all-gather times per byte; each axis weighs four times as much as the next.

    Args:
        torus: Dimensions of the torus.
        sizes: Axis sizes, the axis with the most communication first; their product is the size of
            the torus.

    Returns:
        For each axis its parts, in the order of the dimensions.
    """
    whole = tuple(dimension.size for dimension in torus)

    @cache
    def best(axis: int, left: tuple[int, ...]) -> _Choice:
        """Return the best factors of this axis and the following ones."""
        if axis == len(sizes):
            return _Choice(0, 0.0, ())
        choices = []
        for factors in _factorings(sizes[axis], left):
            later = best(axis + 1, tuple(a // b for a, b in zip(left, factors, strict=True)))
            links = usable_links(_parts(torus, factors, left))
            seconds = (1 - 1 / sizes[axis]) / links if links else 0.0
            cuts = sum(1 for f, size in zip(factors, left, strict=True) if 1 < f < size)
            choices.append(
                _Choice(
                    later.cuts + cuts,
                    round(seconds + later.seconds / _PRECEDENCE, 12),
                    (factors, *later.factors),
                )
            )
        # Ties leave the first dimensions to later axes.
        return min(choices)

    left, layout = whole, []
    for factors in best(0, whole).factors:
        layout.append(tuple(p for p in _parts(torus, factors, left) if p.size > 1))
        left = tuple(a // b for a, b in zip(left, factors, strict=True))
    return tuple(layout)


def _parts(
    torus: Sequence[Dimension], factors: Sequence[int], left: Sequence[int]
) -> list[AxisSegment]:
    """Return the extent of an axis with these factors, given the remaining size per dimension."""
    return [
        part(d, factor, d.size // rest)
        for d, factor, rest in zip(torus, factors, left, strict=True)
    ]


@lru_cache(maxsize=4096)
def _factorings(size: int, left: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return all factorisations of a size into divisors of the remaining sizes."""
    if not left:
        return ((),) if size == 1 else ()
    first, *others = left
    return tuple(
        (factor, *rest)
        for factor in divisors(math.gcd(first, size))
        for rest in _factorings(size // factor, tuple(others))
    )


def resolve_axis_sizes(axes: Mapping[str, int], devices: int, where: str) -> dict[str, int]:
    """Return the mesh axis sizes, with -1 resolved.

    Raises:
        TopologyError: If a size is invalid, or the product differs from the number of devices.
    """
    if not isinstance(axes, Mapping) or not axes:
        raise TopologyError(
            f"axes={axes!r} is invalid: expected mesh axis names with sizes", axes={"data": devices}
        )
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise TopologyError(
                f"mesh axis {name!r} has the invalid size {size!r}: expected a number of "
                f"devices, or -1 for the remaining ones",
                axes=dict(axes) | {name: 1 if -1 in axes.values() else -1},
            )
    free = [name for name, size in axes.items() if size == -1]
    if len(free) > 1:
        raise TopologyError(
            f"mesh axes {free[0]!r} and {free[1]!r} are both -1: at most one axis may be -1",
            axes=dict(axes) | dict.fromkeys(free[1:], 1),
        )
    product = math.prod(size for size in axes.values() if size != -1)
    if devices % product if free else product != devices:
        raise _mismatch(axes, devices, where)
    return {name: devices // product if size == -1 else size for name, size in axes.items()}


def arrange_devices(
    grid: npt.NDArray[np.object_],
    dimensions: Sequence[Dimension],
    sizes: Mapping[str, int],
    order: Sequence[str] | None,
) -> npt.NDArray[np.object_]:
    """Return the device array of a mesh.

    Args:
        grid: All devices by their coordinates.
        dimensions: Dimensions of the grid: slices first, then the torus, then the devices of a
            chip.
        sizes: Axis sizes; their product is the number of devices.
        order: Axis names, the axis with the most communication first; None for the last axis first.
    """
    names = _by_talk(sizes, order)
    digits = _digits(dimensions, {name: sizes[name] for name in names})
    # Split each dimension by the extents of the axes, largest stride first.
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
) -> list[tuple[str, AxisSegment]]:
    """Return the extents of each axis, the axis with the most communication first."""
    slices, *torus, cores = dimensions
    left = dict(sizes)
    outer = _shared(slices, left, tuple(left)[::-1])
    # From the inside out: an axis with much communication has neighbours, and devices keep the
    # order of their numbers, which is the only one that XLA's compiler for GPUs plans with.
    inner = _shared(cores, left, tuple(left), inwards=False)
    layout = lay_out_axes(torus, tuple(left.values()))
    middle = [(name, p) for name, parts in zip(left, layout, strict=True) for p in parts]
    return [*outer, *middle, *inner]


def _shared(
    dimension: Dimension, left: dict[str, int], names: Sequence[str], inwards: bool = True
) -> list[tuple[str, AxisSegment]]:
    """Split one dimension over the axes and divide it out of `left`.

    Args:
        dimension: The dimension.
        left: Remaining size of each axis.
        names: Axes in the order in which they take their part.
        inwards: Whether the first part has the largest stride, not the smallest.
    """
    parts, remaining = [], dimension.size
    for name in names:
        factor = math.gcd(remaining, left[name])
        if factor > 1:
            stride = remaining // factor if inwards else dimension.size // remaining
            remaining //= factor
            left[name] //= factor
            parts.append((name, part(dimension, factor, stride)))
    return parts


def _by_talk(sizes: Mapping[str, int], order: Sequence[str] | None) -> tuple[str, ...]:
    if order is None:
        return tuple(sizes)[::-1]
    if isinstance(order, str) or sorted(order) != sorted(sizes):
        raise TopologyError(
            f"order={order!r} is invalid: expected each mesh axis once, the axis with the most "
            f"communication first: order={list(sizes)[::-1]}"
        )
    return tuple(order)


def _mismatch(axes: Mapping[str, int], devices: int, where: str) -> TopologyError:
    sizes = " x ".join(f"{name}={size}" for name, size in axes.items())
    product = math.prod(size for size in axes.values() if size != -1)
    counts = f"a mesh of {sizes} has {counted(product, 'device')}, and {where} has {devices:,}"
    if -1 in axes.values():
        whole = counted(devices, "device")
        counts = f"mesh axes {sizes}: {product:,} doesn't divide the {whole} of {where}"
    # Suggest changing the first axis whose size comes out as an integer.
    for name, size in axes.items():
        others = product // size
        if size != -1 and devices % others == 0:
            fitting = devices // others
            if -1 in axes.values():
                fitting = min(divisors(fitting), key=lambda divisor: abs(divisor - size))
            return TopologyError(counts, axes=dict(axes) | {name: fitting})
    return TopologyError(
        f"{counts}; valid axis sizes are its divisors: {_listed(divisors(devices))}",
        axes=dict.fromkeys(list(axes)[:1], devices),
    )


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) <= 12:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:8]))}, ... {numbers[-1]}"
