"""Wait for asynchronous work of other threads or processes."""

import os
import select
import time
from collections.abc import Callable, Iterable
from contextlib import suppress


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Return once a condition holds.

    Raises:
        AssertionError: If it doesn't in some seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"in {seconds:g} s there was no {what}"
        time.sleep(0.02)


class Watched:
    """Processes, which stay the same when the system gives their numbers to others.

    Those that have ended already are left out.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors: list[int] = []
        for pid in pids:
            with suppress(ProcessLookupError):
                self._descriptors.append(os.pidfd_open(pid))

    def all_gone(self, seconds: float = 30) -> bool:
        """Return whether all processes end within some seconds."""
        return all(select.select([d], [], [], seconds)[0] for d in self._descriptors)

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def all_gone(pids: Iterable[int], seconds: float = 30) -> bool:
    """Return whether all processes end within some seconds."""
    return Watched(pids).all_gone(seconds)
