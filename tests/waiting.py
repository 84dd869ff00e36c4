"""Wait for asynchronous work of other threads or processes."""

import os
import select
import time
from collections.abc import Callable, Iterable


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
    """Running processes, which stay the same when the system gives their numbers to others."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = [os.pidfd_open(pid) for pid in pids]

    def all_gone(self, seconds: float = 30) -> bool:
        """Return whether all processes end within some seconds."""
        return all(select.select([d], [], [], seconds)[0] for d in self._descriptors)

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def all_gone(pids: Iterable[int], seconds: float = 30) -> bool:
    """Return whether all processes end within some seconds."""
    return all(_gone(pid, seconds) for pid in pids)


def _gone(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
