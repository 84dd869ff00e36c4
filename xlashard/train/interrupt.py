"""Ctrl-C as a request that a loop grants between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether somebody asked to stop."""

    asked: bool = False


@contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """Turns the first Ctrl-C inside the block into ``Stop.asked``; a second one interrupts at once.

    Python delivers signals to the main thread only; elsewhere nothing is changed.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
