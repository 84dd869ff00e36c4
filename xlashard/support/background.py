"""Threads, signals, output streams and children of a process, up to its end.

Before Python 3.14 a daemon thread that still runs during finalization can abort the process, for
example while it holds the lock of an output stream.
"""

import atexit
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subprocess import Popen

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and the signal of clusters before preemption."""

# Seconds for a thread to end after it was stopped. One that blocks for longer, as in a call to a
# host that does not answer, must not keep the process.
_JOIN = 10.0

_STOPS: dict[threading.Thread, Callable[[], object]] = {}
"""Running threads, each with the function that ends it."""


def at_exit(act: Callable[..., object], *args: Any) -> Callable[[], None]:
    """Call a function when this process exits normally, the function registered last first.

    A forked child inherits the handlers of its parent. Those registered here do nothing in it: the
    worker processes, connections and files that they end are those of the parent.

    Args:
        act: The function.
        args: Its arguments.

    Returns:
        A function that cancels the call.
    """
    owner = os.getpid()

    def act_in_owner() -> None:
        if os.getpid() == owner:
            act(*args)

    atexit.register(act_in_owner)
    return partial(atexit.unregister, act_in_owner)


def run_in_thread[T](work: Callable[[], T], name: str, *, daemon: bool = False) -> Future[T]:
    """Run a function in a thread of its own, and return the future of its result.

    Args:
        work: The function.
        name: Name of the thread.
        daemon: True if Python does not wait for it at exit.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return result


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


@contextmanager
def repeating(act: Callable[[], object], seconds: float, name: str) -> Iterator[Callable[[], None]]:
    """Call a function every few seconds in another thread, inside the block.

    Args:
        act: The function.
        seconds: Seconds between two calls, and before the first.
        name: Name of the thread.

    Yields:
        A function that stops the calls before the end of the block.
    """
    done = threading.Event()

    def run() -> None:
        while not done.wait(seconds):
            act()

    thread = start_background(run, done.set, name)
    try:
        yield done.set
    finally:
        end_thread(thread, done.set)


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


type SignalHandler = Callable[[int, FrameType | None], object]
"""Function of the number of a signal and of the frame that it interrupts."""


@contextmanager
def handling_signals(handle: SignalHandler, numbers: Iterable[int] = SIGNALS) -> Iterator[None]:
    """Handle signals inside the block, which must be in the main thread.

    Args:
        handle: Handler of the signals.
        numbers: The signals.
    """
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that Python did not set cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def listening_to_signals(
    handle: SignalHandler,
    listen: Callable[[int], object],
    name: str = "signals",
    numbers: Iterable[int] = SIGNALS,
) -> Iterator[None]:
    """Handle signals inside the block, in the main thread and in another one.

    Python runs handlers between two bytecodes of the main thread, so a compilation of minutes
    delays them. But it writes the number of the signal to a socket at once, which a thread reads.
    Outside of the main thread nothing changes, since Python delivers signals there only. Blocks may
    be nested: other signals are passed on to the block around.

    Args:
        handle: Handler of the signals.
        listen: Called with the number of each signal in the other thread.
        name: Name of the other thread.
        numbers: The signals; by default SIGINT and SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def read() -> None:
        while received := receiver.recv(64):
            for number in received:
                if number in numbers:
                    listen(number)
                elif woken >= 0:
                    with suppress(OSError):
                        os.write(woken, bytes([number]))

    woken, numbers = -1, tuple(numbers)

    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    listener = threading.Thread(target=read, name=name, daemon=True)
    listener.start()
    try:
        with handling_signals(handle, numbers):
            woken = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(woken)
    finally:
        sender.close()
        listener.join()
        receiver.close()


def flush_output() -> None:
    """Flush standard output and error, as far as they are open."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def drop_output() -> int:
    """Drop the rest of standard output, whose reader has exited, as in `xlashard ... | head`.

    Python's flush at exit succeeds, too.

    Returns:
        The exit code of a process that SIGPIPE ends.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def read_process_stat(pid: int) -> list[str]:
    """Return what Linux's process table has of a process, from its state on.

    Args:
        pid: The process id.

    Returns:
        The fields from the third on of `proc_pid_stat(5)`: state, parent, group, and so on.

    Raises:
        OSError: The process has ended, or this platform has no such table.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # The program name is in parentheses and may contain parentheses.
    return text.rpartition(")")[2].split()


def python_path() -> str:
    """Return a `PYTHONPATH` by which a new process imports the modules that this one does."""
    return os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path))


def end_process(process: "Popen[bytes]") -> None:
    """Kill a process that leads its own session, and its children, unless it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _begin_child() -> None:
    """Forget the threads of the parent, which do not exist in a forked child."""
    _STOPS.clear()
    at_exit(_end_all)


at_exit(_end_all)
os.register_at_fork(after_in_child=_begin_child)
