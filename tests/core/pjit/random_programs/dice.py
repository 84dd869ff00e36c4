"""Choices that depend on a seed alone, under every version of Python."""

import random
from collections.abc import Sequence


class Dice:
    """Draws from `random.random()`, the one method whose numbers Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        """Draw a number from 0 to `count - 1`."""
        return int(self._random() * count)

    def between(self, low: int, high: int) -> int:
        """Draw a number from `low` to `high`, inclusive."""
        return low + self.below(high - low + 1)

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick[T](self, things: Sequence[T]) -> T:
        return things[self.below(len(things))]

    def sample[T](self, things: Sequence[T], count: int) -> list[T]:
        """Draw some of the items, each at most once, in any order."""
        left = list(things)
        return [left.pop(self.below(len(left))) for _ in range(min(count, len(left)))]
