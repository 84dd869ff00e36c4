"""Factors of operations: the indices along which an operation can be split over devices."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_MOST_PADDING = 4 / 3
"""Largest size of a padded dimension over its own."""

type Shape = tuple[int, ...]


@dataclass(frozen=True)
class Factor:
    """Index along which an operation can be split over devices.

    Attributes:
        size: Number of its values. A dimension that it indexes has this size or a multiple of it:
            then the factor is the dimension's major part, and cutting the dimension into a number
            of pieces that divides `size` cuts the factor.
        operands: For each operand the dimension that it indexes, or None where each device needs
            all of the operand.
        results: For each result the dimension that it indexes, or None: then each device computes
            all of the result, or a partial result if `reduced`.
        reduced: Whether the devices' results are partial and must be combined, as by an all-reduce.
        divides_work: Whether each device does its share of the work only.
        halo: Share of the first operand that each device takes from others, as its neighbours'
            edges where windows overlap.
        most_padded: Most pieces that are padded to equal size; 0 if only even pieces are possible.
    """

    size: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduced: bool = False
    divides_work: bool = True
    halo: float = 0.0
    most_padded: int = 0

    @cached_property
    def role(self) -> tuple[bool, ...]:
        """Return the sides of a product that it indexes: the first two operands, and the result."""
        return tuple(dim is not None for dim in (*self.operands[:2], self.results[0]))


type Factors = Iterator[Factor]


@dataclass(frozen=True)
class OpRule:
    """Sharding rule of one equation.

    Attributes:
        factors: Its factors. Dimensions that no factor indexes are needed whole.
        flops: FLOP of one run on matrix units, unsharded.
        elementwise: Whether every operand and result that isn't a scalar has the same dimensions.
        passes: Times that the operands are read and the results written, beside FLOP.
        known: Whether the primitive is known; an unknown one is computed whole by each device.
        pairwise: Whether result i is a copy of operand i and depends on no other operand, as of
            `optimization_barrier`: each pair is an operation of its own, and a factor indexes one
            pair.
    """

    factors: tuple[Factor, ...]
    flops: float = 0.0
    passes: float = 1.0
    elementwise: bool = False
    known: bool = True
    pairwise: bool = False


@dataclass(frozen=True)
class Operation:
    """Shapes and parameters of an equation.

    Attributes:
        name: Name of its primitive.
        operands: Shapes of its operands.
        results: Shapes of its results.
        params: Its parameters.
        eqn: The equation.
    """

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    params: Mapping[str, Any]
    eqn: Any

    def factor(
        self,
        operands: Mapping[int, int],
        results: Mapping[int, int],
        *,
        size: int | None = None,
        reduced: bool = False,
        divides_work: bool = True,
        halo: float = 0.0,
        most_padded: int = 0,
    ) -> Factors:
        """Yield a factor, or nothing if it can't be cut.

        Args:
            operands: Dimension that it indexes, by position of the operand.
            results: The same for results.
            size: Its size; None for the greatest common divisor of the dimensions' sizes.
            reduced: As in `Factor`.
            divides_work: As in `Factor`.
            halo: As in `Factor`.
            most_padded: As in `Factor`.
        """
        if size is None:
            sizes = [self.operands[i][d] for i, d in operands.items()]
            sizes += [self.results[i][d] for i, d in results.items()]
            # Sizes of exported programs may be symbols, which no device count divides for sure.
            size = math.gcd(*sizes) if all(isinstance(s, int) for s in sizes) else 1
        if not isinstance(most_padded, int):
            most_padded = 0
        if max(size, most_padded) > 1:
            yield Factor(
                size,
                tuple(operands.get(i) for i in range(len(self.operands))),
                tuple(results.get(i) for i in range(len(self.results))),
                reduced,
                divides_work,
                halo,
                most_padded,
            )


def piece(size: int, pieces: int) -> int:
    """Return the size of the pieces of a dimension, of which the last may be padded."""
    return -(-size // pieces)


def can_shard(size: int, pieces: int) -> bool:
    """Return True if a dimension divides into some pieces, or with little padding."""
    padded = pieces * piece(size, pieces)
    return padded == size or (pieces <= size and padded <= _MOST_PADDING * size)


def is_near_size(part: int, whole: int) -> bool:
    """Return True if a dimension is so little smaller than another one that both may be sharded."""
    return part < whole <= _MOST_PADDING * part


def operation_of(eqn: Any) -> Operation:
    """Return the shapes and parameters of an equation.

    Args:
        eqn: The equation.
    """
    operands, results = (
        tuple(tuple(getattr(v.aval, "shape", ())) for v in side)
        for side in (eqn.invars, eqn.outvars)
    )
    return Operation(eqn.primitive.name, operands, results, eqn.params, eqn)


def remaining(rank: int, *groups: Any) -> list[int]:
    """Return the dimensions of a rank that none of some collections contains."""
    removed = {d for dims in groups for d in dims}
    return [d for d in range(rank) if d not in removed]


def wide_pieces(size: int, wide: int, halo: int) -> int:
    """Return the largest divisor of a factor's size whose pieces are no narrower than a halo.

    1 where the whole dimension is narrower.

    Args:
        size: Size of the factor.
        wide: Size of the dimension that the halo is a part of.
        halo: Size of the halo, on both sides together.
    """
    return next((n for n in range(size, 0, -1) if size % n == 0 and wide >= n * halo), 1)
