"""Sharding rules of primitives: along which dimensions an operation can be split."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Factor:
    """Index along which an operation can be split over devices.

    Attributes:
        size: Number of its values.
        operands: For each operand the dimension that it indexes, or None where each device needs
            all of the operand.
        results: For each result the dimension that it indexes, or None: then each device computes
            all of the result, or a partial result if `reduced`.
        reduced: Whether the devices' results are partial and must be combined, as by an all-reduce.
        divides_work: Whether each device does its share of the work only.
    """

    size: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduced: bool = False
    divides_work: bool = True


@dataclass(frozen=True)
class OpRule:
    """Sharding rule of one equation.

    Attributes:
        factors: Its factors. Dimensions that no factor indexes are needed whole.
        flops: FLOP of one run on matrix units, unsharded.
        elementwise: Whether every operand and result that isn't a scalar has the same dimensions.
        known: Whether the primitive is known; an unknown one is computed whole by each device.
    """

    factors: tuple[Factor, ...]
    flops: float = 0.0
    elementwise: bool = False
    known: bool = True


def op_rule(eqn: Any) -> OpRule:
    """Return the sharding rule of an equation without inner jaxprs.

    Args:
        eqn: The equation.
    """
    raise NotImplementedError
