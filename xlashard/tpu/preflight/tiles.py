"""Arrays as they lie on a TPU: in tiles, with padding, in one of its memories."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

HBM = 0
"""The number of the chip's main memory, which layouts leave out; `S(1)` is VMEM, `S(5)` the
host's."""


@dataclass(frozen=True, slots=True)
class PlacedArray:
    """The type of one array, with its place.

    Attributes:
        dtype: As HLO writes it: `f32`, `bf16`, `pred`.
        dims: Its shape.
        nbytes: What it takes in memory, padding included.
        space: The number of the memory.
    """

    dtype: str
    dims: tuple[int, ...]
    nbytes: int
    space: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.dims)

    @property
    def hbm_bytes(self) -> int:
        """What it takes of HBM."""
        return self.nbytes if self.space == HBM else 0


_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"\((\d+(?:,\d+)*)\)")


@lru_cache(maxsize=4096)
def placed_arrays(text: str) -> tuple[PlacedArray, ...]:
    """The arrays of an HLO type, those of tuples in order; tokens are none.

    Example:
        >>> placed_arrays("bf16[3,100]{1,0:T(8,128)(2,1)S(1)}")
        (PlacedArray(dtype='bf16', dims=(3, 100), nbytes=2048, space=1),)
    """
    found = _ARRAY.findall(text)
    return tuple(_placed(*parts) for parts in found if parts[0] not in ("token", "opaque"))


def _placed(dtype: str, dims: str, layout: str) -> PlacedArray:
    shape = tuple(int(number) for number in re.findall(r"\d+", dims))
    order, _, rest = layout.partition(":")
    tiles = re.search(r"T((?:\([\d,*]+\))+)", rest)
    space = re.search(r"S\((\d+)\)", rest)
    packed = re.search(r"E\((\d+)\)", rest)
    physical = shape
    if order and len(numbers := [int(n) for n in order.split(",")]) == len(shape):
        physical = tuple(shape[n] for n in reversed(numbers))
    first = _TILE.match(tiles[1]) if tiles else None
    if first is not None:
        physical = _padded(physical, tuple(int(n) for n in first[1].split(",")))
    bits = int(packed[1]) if packed else bits_of(dtype)
    return PlacedArray(
        dtype, shape, -(-math.prod(physical) * bits // 8), int(space[1]) if space else HBM
    )


def _padded(physical: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...]:
    """A shape, major to minor, rounded up to whole tiles in its minor dimensions."""
    if 0 in physical:
        return physical
    whole = (1,) * (len(tile) - len(physical)) + physical
    start = len(whole) - len(tile)
    return whole[:start] + tuple(
        -(-size // step) * step for size, step in zip(whole[start:], tile, strict=True)
    )


def bits_of(dtype: str) -> int:
    """Bits of an element in memory; of one that is smaller than a byte, a byte."""
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)
    return max(int(found[0]), 8) if found else 8
