"""Wait for asynchronous work of other threads or processes."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Return once a condition holds.

    Raises:
        AssertionError: If it doesn't in some seconds.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"in {seconds:g} s there was no {what}"
        time.sleep(0.02)
