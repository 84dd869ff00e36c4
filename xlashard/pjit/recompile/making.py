"""What one call had to make on its way to a program, and what that cost."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Literal

from xlashard.lazily import dataclass
from xlashard.pjit.arguments import Argument

type Stage = Literal["trace", "lower", "compile"]


@dataclass(eq=False)
class Making:
    """What a call made that was not there before. It belongs to the thread of the call.

    Attributes:
        seconds: For each stage that had something to make, how long that took.
        source: Where the executable came from, once there is one.
        arguments: The arguments, once it was looked at where they are.
        began: When the call came, by a clock that never goes back.
        place: The file and line of the call, once something was made.
        number: Its number in the function's history, once something was made.
        steps: How many stages had something to make.
        noted: How many of them the history knows of.
        told: How many of them were told of as they happened.
    """

    seconds: dict[Stage, float] = field(default_factory=dict)
    source: str | None = None
    arguments: tuple[Argument, ...] | None = None
    began: float = field(default_factory=time.perf_counter)
    place: tuple[str, int] | None = None
    number: int | None = None
    steps: int = 0
    noted: int = 0
    told: int = 0

    def finished(self, stage: Stage, since: float | None = None) -> None:
        """Notes that a stage had something to make, which took until now.

        Args:
            stage: The stage.
            since: When that began, on the same clock as `began`; None for when the call came.
        """
        began = self.began if since is None else since
        self.steps += 1
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Times the making of something; what fails does not count."""
        began = time.perf_counter()
        yield
        self.finished(stage, began)
