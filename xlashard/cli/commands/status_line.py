"""Status line of long work, and the end of a command at Ctrl-C or SIGTERM."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from xlashard.support.background import StopSignal, listening_to_signals
from xlashard.support.consoles import show_progress
from xlashard.support.formatting import printable
from xlashard.workers.dump_folder import remove_own_folders

# Seconds in which the main thread handles a signal, unless it compiles: that takes minutes in C,
# and Python runs handlers in the main thread only.
_PYTHON_TIMEOUT = 0.5


@contextmanager
def status_line(what: str, *, spinner: bool = True) -> Iterator[None]:
    """Show long work in progress, and end it at Ctrl-C or SIGTERM, whatever it is doing.

    A terminal shows a spinner and the elapsed time; elsewhere a line appears on standard error
    every 15 s.

    Args:
        what: The work, such as `compiling step for v5p-128`.
        spinner: Whether to show the work in a terminal.

    Raises:
        StopSignal: At a signal, if the main thread runs Python. If it compiles, the process ends.
    """
    started = time.monotonic()
    with (
        show_progress(what, spinner=spinner, lines=True) as hide,
        _end_at_signals(printable(what), started, hide),
    ):
        yield


@contextmanager
def _end_at_signals(what: str, started: float, hide: Callable[[], None]) -> Iterator[None]:
    """Raise an exception at SIGINT and SIGTERM; exit if the main thread is not in Python.

    Args:
        what: The work.
        started: Time of its start.
        hide: Removes the status line from the terminal.
    """
    raised = threading.Event()
    seen = 0

    def message(number: int) -> str:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        return f"stopped by {name} after {time.monotonic() - started:.0f} s: {what}"

    def handle(number: int, _: FrameType | None) -> None:
        raised.set()
        raise StopSignal(message(number), number)

    def listen(number: int) -> None:
        nonlocal seen
        seen += 1
        # The second signal does not wait until the exception of the first has left the block.
        if seen == 1 and raised.wait(_PYTHON_TIMEOUT):
            return
        hide()
        print(message(number), file=sys.stderr, flush=True)
        remove_own_folders()
        # Python's own exit would wait for the main thread.
        os._exit(128 + number)

    with listening_to_signals(handle, listen):
        yield
