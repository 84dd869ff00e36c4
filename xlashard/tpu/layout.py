"""Laying the axes of a mesh on a torus, so that each has the fastest links that are left.

A torus is a box of positions, some of its dimensions closed to rings. An axis of `n` devices takes
a factor of one or several dimensions, and all factors together are `n`. The dimension's other
factors go to other axes: those laid earlier lie closer together, those laid later step over them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

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
class Part:
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


def part(dimension: Dimension, size: int, stride: int) -> Part:
    """What an axis has that runs over so many positions of a dimension, so far apart."""
    closes = dimension.wraps and size * stride == dimension.size
    return Part(dimension.name, size, stride, closes or (size == 2 and stride == 1))


def lay_out(torus: Sequence[Dimension], sizes: Sequence[int]) -> tuple[tuple[Part, ...], ...]:
    """Lays axes on a torus.

    Among all ways of dealing out factors the one is taken that gives the axes the fastest links,
    each counting four times as much as the one after it: the sum of the time in which each axis
    gathers a byte from all of its devices.

    Args:
        torus: Its dimensions.
        sizes: Of the axes, the one that talks most first; together they are the whole torus.

    Returns:
        For each axis its parts, in the order of the dimensions.
    """
    whole = tuple(dimension.size for dimension in torus)

    @cache
    def best(axis: int, left: tuple[int, ...]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """The least time of this axis and all after it, and their factors."""
        if axis == len(sizes):
            return 0.0, ()
        found = []
        for factors in _factorings(sizes[axis], left):
            links = sum(
                part(d, f, d.size // rest).links
                for d, f, rest in zip(torus, factors, left, strict=True)
            )
            rest = tuple(a // b for a, b in zip(left, factors, strict=True))
            later, after = best(axis + 1, rest)
            own = (1 - 1 / sizes[axis]) / links if links else 0.0
            cut = sum(1 for f, size in zip(factors, left, strict=True) if 1 < f < size)
            # Of equal ones the one that cuts fewer dimensions, and takes the last of them.
            found.append(
                (round(own + later / _PRECEDENCE, 12), cut, tuple(factors), (factors, *after))
            )
        least = min(found, key=lambda each: each[:3])
        return least[0], least[3]

    left, laid = whole, []
    for factors in best(0, whole)[1]:
        laid.append(
            tuple(
                part(d, f, d.size // rest)
                for d, f, rest in zip(torus, factors, left, strict=True)
                if f > 1
            )
        )
        left = tuple(a // b for a, b in zip(left, factors, strict=True))
    return tuple(laid)


@cache
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


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
