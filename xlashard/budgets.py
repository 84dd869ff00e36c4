"""Budgets of commands, parsed before the work and without JAX: `memory=80GiB`, `time=250ms`."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from xlashard.errors import ArgumentError

type Unit = Literal["bytes", "seconds", "flop", "part", "number"]
"""Unit of an amount."""

_UNITS: dict[Unit, dict[str, float]] = {
    "bytes": {
        "b": 1,
        **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
        **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
    },
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60},
    "part": {"%": 0.01},
    "flop": {"flop": 1, **{f"{p}flop": 1000**i for i, p in enumerate("kmgtp", 1)}},
    "number": {},
}
_EXAMPLES = {"bytes": "2GB", "seconds": "250ms", "part": "90%", "flop": "3PFLOP", "number": "100"}


@dataclass(frozen=True)
class Limit:
    """Limit of one figure.

    Attributes:
        key: Key: `all_gather_bytes`.
        quantity: Unit of the value.
        value: The limit.
        text: Text as entered: `all_gather_bytes=2GB`.
    """

    key: str
    quantity: Unit
    value: float
    text: str


def parse_limits(words: Iterable[str], units: Mapping[str, Sequence[Unit]]) -> tuple[Limit, ...]:
    """Parse limits.

    Args:
        words: Each `KEY=VALUE`: `memory=80GiB`, `all_gather_bytes=2GB`, `time=250ms`. GB are 10⁹
            bytes, GiB 2³⁰.
        units: The units of the limits of each figure, by its key.

    Raises:
        ArgumentError: If a key or value is invalid.
    """
    return tuple(_limit(word, units) for word in words)


def _limit(word: str, units: Mapping[str, Sequence[Unit]]) -> Limit:
    name, equals, text = word.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        first = next(iter(units))
        raise ArgumentError(
            f"budget {word!r} has no value: write KEY=VALUE, such as "
            f"{first}={_EXAMPLES[units[first][0]]} or all_gather_bytes=2GB; a program goes before "
            "the budget"
        )
    if name not in units:
        near = difflib.get_close_matches(name, units, n=2, cutoff=0.5)
        known = ", ".join(units)
        meant = f"; did you mean {' or '.join(near)}?" if near else f": the keys are {known}"
        raise ArgumentError(f"budget {word!r} has an unknown key{meant}")
    for unit in units[name]:
        # A number alone would be ambiguous beside a percentage.
        value = _value(text, unit, plain=len(units[name]) == 1)
        if value is not None:
            return Limit(name, unit, value, word)
    examples = " or ".join(f"{name}={_EXAMPLES[unit]}" for unit in units[name])
    raise ArgumentError(f"budget {word!r} has the invalid value {text!r}: write {examples}")


def _value(text: str, expected: Unit, *, plain: bool) -> float | None:
    """Return a number with its unit, or None if the text is invalid for the unit.

    Args:
        text: The text.
        expected: Expected unit.
        plain: Whether a number without a unit is accepted for bytes, FLOP and numbers.
    """
    found = re.fullmatch(
        r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ%]*)\s*",
        text.lower().replace("\N{GREEK SMALL LETTER MU}", "µ"),
    )
    if found is None:
        return None
    units = _UNITS[expected]
    unit = found[2]
    is_clear = plain and expected in ("bytes", "flop", "number")
    factor = units.get(unit) if unit else 1.0 if is_clear else None
    try:
        value = float(found[1])
    except ValueError:
        return None
    return None if factor is None or not math.isfinite(value) else value * factor
