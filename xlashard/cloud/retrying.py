"""Trying again after a while: how long to wait, and a clock that tests can set."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from xlashard.cloud.commands import Command, Finished, Runner, Say


class Clock(Protocol):
    """Tells the time, and lets it pass."""

    def now(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Returns after some seconds."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Seconds since some moment; it never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Returns after some seconds."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Backoff:
    """How long to wait before each further try.

    Attributes:
        first: Seconds before the second try.
        factor: By which each wait is longer than the one before.
        most: Seconds that no wait is longer than.
        tries: How many tries there are in all.

    Example:
        >>> list(Backoff(first=1, factor=3, most=10, tries=5).waits())
        [1, 3, 9, 10]
    """

    first: float = 2.0
    factor: float = 2.0
    most: float = 60.0
    tries: int = 5

    def waits(self) -> Iterator[float]:
        """The seconds before the second try, the third, and so on."""
        wait = self.first
        for _ in range(self.tries - 1):
            yield min(wait, self.most)
            wait *= self.factor

    def wait(self, failures: int) -> float:
        """The seconds to wait after so many failures in a row, however many are meant to be."""
        return min(self.first * self.factor ** max(failures - 1, 0), self.most)


@dataclass(frozen=True)
class Patience:
    """What tries again: the clock, the waits, and whom it tells.

    Attributes:
        backoff: The waits.
        clock: By which they pass.
        say: Is told of each failure that is not the last.
    """

    backoff: Backoff
    clock: Clock
    say: Say


def run_again(
    runner: Runner,
    command: Command,
    patience: Patience,
    final: Callable[[Finished], bool] = lambda done: False,
) -> Finished:
    """Runs a command until it ends well, or for the last time.

    Args:
        runner: Runs it.
        command: May run several times without harm.
        patience: How often, and when.
        final: Whether a failure is one that no further try would change.

    Returns:
        How the last try ended.
    """
    done = runner.run(command)
    for number, wait in enumerate(patience.backoff.waits(), 2):
        if done.code == 0 or final(done):
            return done
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        patience.say(
            f"could not {command.why} (exit code {done.code}: {last}); try {number} of "
            f"{patience.backoff.tries} in {wait:g} s"
        )
        patience.clock.sleep(wait)
        done = runner.run(command)
    return done
