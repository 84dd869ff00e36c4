"""Background threads that end before the interpreter finalizes.

Before Python 3.14 a daemon thread that still runs during finalization can abort the process, for
example while it holds the lock of an output stream.
"""

import atexit
import os
import threading
from collections.abc import Callable

# Seconds for a thread to end after it was stopped. One that blocks for longer, as in a call to a
# host that does not answer, must not keep the process.
_JOIN = 10.0

_STOPS: dict[threading.Thread, Callable[[], object]] = {}
"""Running threads, each with the function that ends it."""


def start_background(
    run: Callable[[], object], stop: Callable[[], object], name: str
) -> threading.Thread:
    """Start a thread that is stopped and joined when Python exits.

    Args:
        run: Runs in the thread.
        stop: Makes `run` return soon. It is called at exit, in the main thread, if `run` has not
            returned.
        name: Name of the thread.

    Raises:
        RuntimeError: The interpreter is shutting down.
    """

    def run_once() -> None:
        try:
            run()
        finally:
            _STOPS.pop(thread, None)

    thread = threading.Thread(target=run_once, name=name, daemon=True)
    _STOPS[thread] = stop
    try:
        thread.start()
    except RuntimeError:
        del _STOPS[thread]
        raise
    return thread


def end_thread(thread: threading.Thread, stop: Callable[[], object]) -> None:
    """Stop a thread and wait for its end, unless it is the current one.

    A thread that another thread is starting right now cannot be joined. It returns soon.
    """
    stop()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_JOIN)


def _end_all() -> None:
    for thread, stop in list(_STOPS.items()):
        end_thread(thread, stop)


atexit.register(_end_all)
# The threads of a process do not exist in its forked child.
os.register_at_fork(after_in_child=_STOPS.clear)
