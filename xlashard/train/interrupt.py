"""Signals that ask a run to stop, heard at once, whatever the main thread is doing.

Python runs a signal's handler in the main thread, and only when that comes back from compiling or
from waiting for devices. But the system writes into a socket at the moment of the signal, and
another thread reads that right away.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from xlashard.processes.thread_stacks import OWN_THREADS

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what clusters send before they take a machine away."""

_PATIENCE = 10.0
"""Seconds after a second signal in which the main thread may still write what it has."""


def exit_code(name: str) -> int:
    """The exit code of a program that a signal ended: 130 of SIGINT, 143 of SIGTERM."""
    return 128 + signal.Signals[name]


@contextmanager
def on_signal(ask: Callable[[str], None]) -> Iterator[None]:
    """Calls a function with the name of the first signal that comes inside the block.

    A second one raises KeyboardInterrupt in the main thread; if that does not leave the block in
    10 s, the process ends. Python gives signals to the main thread only; elsewhere nothing is
    changed.

    Args:
        ask: Is called in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came > 1:
            raise KeyboardInterrupt

    ours, kernels = socket.socketpair()
    kernels.setblocking(False)
    left = threading.Event()
    name = f"{OWN_THREADS}signals"
    listener = threading.Thread(target=_listen, args=(ours, ask, left), name=name, daemon=True)
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    woken = signal.set_wakeup_fd(kernels.fileno(), warn_on_full_buffer=False)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            # None: it was not set by Python, and can't be set again by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        left.set()
        kernels.close()
        listener.join()
        ours.close()


def _listen(ours: socket.socket, ask: Callable[[str], None], left: threading.Event) -> None:
    came = 0
    while numbers := ours.recv(64):
        for number in numbers:
            if number not in SIGNALS:
                continue
            came += 1
            if came == 1:
                ask(signal.Signals(number).name)
            elif not left.wait(_PATIENCE):
                os._exit(128 + number)
