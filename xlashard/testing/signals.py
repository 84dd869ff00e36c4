"""Signals that tell this process to stop, kept for a loop that looks at them when it can."""

import contextlib
import signal
from collections import deque
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def kept_signals() -> Iterator[deque[int]]:
    """The signals that tell this process to stop, kept instead of followed."""
    told: deque[int] = deque()

    def keep(number: int, _: FrameType | None) -> None:
        told.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, keep) for number in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
