"""Data model of a comparison of two preflight reports."""

from dataclasses import dataclass
from typing import Literal

type Unit = Literal["bytes", "seconds", "flop", "part", "number"]
"""Unit of an amount."""


@dataclass(frozen=True)
class FactChange:
    """A changed text.

    Attributes:
        name: Name of the fact.
        old: Text in the first report; empty if absent.
        new: Text in the second report; empty if absent.
    """

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class AmountChange:
    """A number of both reports.

    Attributes:
        name: Name of the number.
        unit: Its unit.
        old: Value in the first report; None if absent.
        new: Value in the second report; None if absent.
    """

    name: str
    unit: Unit
    old: float | None
    new: float | None

    @property
    def ratio(self) -> float | None:
        """Second value divided by the first; None if one is missing or the first is 0."""
        return None if not self.old or self.new is None else self.new / self.old


@dataclass(frozen=True)
class UsageChange:
    """A change in memory use, or in bytes sent.

    Attributes:
        change: Kind of change.
        what: Name of the buffer or collective.
        where: Source line, from the second report if it has one; empty if unknown.
        old_bytes: Bytes in the first report; 0 if new.
        new_bytes: Bytes in the second report; 0 if removed.
        old_seconds: Network time in the first report.
        new_seconds: Network time in the second report.
    """

    change: Literal["added", "removed", "grown", "shrunk"]
    what: str
    where: str
    old_bytes: int
    new_bytes: int
    old_seconds: float = 0.0
    new_seconds: float = 0.0


@dataclass(frozen=True, repr=False)
class ComparisonFields:
    """Fields of a comparison, documented by `Comparison`."""

    old: str
    new: str
    facts: tuple[FactChange, ...]
    amounts: tuple[AmountChange, ...]
    memory: tuple[UsageChange, ...]
    traffic: tuple[UsageChange, ...]
    shardings: tuple[FactChange, ...]
    donations: tuple[FactChange, ...]
