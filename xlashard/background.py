"""Background threads that end before the interpreter finalizes, and threads that see signals.

Before Python 3.14 a daemon thread that still runs during finalization can abort the process, for
example while it holds the lock of an output stream.
"""

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and the signal of clusters before preemption."""

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


class StopSignal(KeyboardInterrupt):
    """SIGINT or SIGTERM, raised in the main thread.

    Attributes:
        exit_code: 130 or 143.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextmanager
def listening_to_signals(
    handle: Callable[[int, FrameType | None], object],
    listen: Callable[[int], object],
    name: str = "signals",
) -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside the block, in the main thread and in another one.

    Python runs handlers between two bytecodes of the main thread, so a compilation of minutes
    delays them. But it writes the number of the signal to a socket at once, which a thread reads.
    Outside of the main thread nothing changes, since Python delivers signals there only.

    Args:
        handle: Handler of the signals.
        listen: Called with the number of each signal in the other thread.
        name: Name of the other thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def read() -> None:
        while numbers := receiver.recv(64):
            for number in numbers:
                if number in SIGNALS:
                    listen(number)

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    listener = threading.Thread(target=read, name=name, daemon=True)
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    woken = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            # None: a handler that Python did not set cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        sender.close()
        listener.join()
        receiver.close()


atexit.register(_end_all)
# The threads of a process do not exist in its forked child.
os.register_at_fork(after_in_child=_STOPS.clear)
