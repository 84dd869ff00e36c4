"""Laying the axes of a mesh on a torus, so that each has the fastest links that are left.

A torus is a box of positions, some of its dimensions closed to rings. An axis of `n` devices takes
a factor of one or several dimensions, and all factors together are `n`. The dimension's other
factors go to other axes: those laid earlier lie closer together, those laid later step over them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

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


def links_of(parts: Sequence[Part]) -> float:
    """Links by which each of the positions sends that some parts reach together.

    Rings add up. What is open is gone through in one line or circle, whatever it is made of, and
    that has two links at most.
    """
    rings = sum(p.links for p in parts if p.ring and p.size > 2)
    return rings + min(2.0, sum(p.links for p in parts if not p.ring or p.size == 2))


def lay_out(torus: Sequence[Dimension], sizes: Sequence[int]) -> tuple[tuple[Part, ...], ...]:
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
            links = links_of(_parts(torus, factors, left))
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


def _parts(torus: Sequence[Dimension], factors: Sequence[int], left: Sequence[int]) -> list[Part]:
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


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
