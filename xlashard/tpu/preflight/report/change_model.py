"""What a comparison of two preflight reports is made of, as frozen values of plain types."""

from dataclasses import dataclass
from typing import Literal

type Unit = Literal["bytes", "seconds", "flop", "part", "number"]
"""What an amount is a number of."""


@dataclass(frozen=True)
class FactChange:
    """Something said in words that is now said otherwise.

    Attributes:
        name: What it is said of.
        old: What the first report says; empty for nothing.
        new: What the second says.
    """

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class AmountChange:
    """A number in both reports.

    Attributes:
        name: What it is a number of.
        unit: Its unit.
        old: In the first report; None where that does not say.
        new: In the second.
    """

    name: str
    unit: Unit
    old: float | None
    new: float | None

    @property
    def ratio(self) -> float | None:
        """The second by the first; None where one of them is missing or 0."""
        return None if not self.old or self.new is None else self.new / self.old


@dataclass(frozen=True)
class UsageChange:
    """Something that takes memory, or sends bytes, and takes or sends another amount now.

    Attributes:
        change: What became of it.
        what: What it is.
        where: The line that it comes from, in the report that has it last; empty if unknown.
        old_bytes: In the first report; 0 where it is new.
        new_bytes: In the second; 0 where it is gone.
        old_seconds: For what is sent, the time that takes in the first report.
        new_seconds: In the second.
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
    """The facts of a comparison; `Comparison`, which can print them, says what each is."""

    old: str
    new: str
    facts: tuple[FactChange, ...]
    amounts: tuple[AmountChange, ...]
    memory: tuple[UsageChange, ...]
    traffic: tuple[UsageChange, ...]
    shardings: tuple[FactChange, ...]
    donations: tuple[FactChange, ...]
