"""Stop of a run at a point that all processes agree on.

A run passes stop points: before each step, each batch of an evaluation, and so on. Every process
passes the same points and counts them. On a request to stop, a background thread of every process
reports its count, and the main thread waits if it reaches another point meanwhile. All stop at
the first point that no process has passed. Background threads answer, so the agreement takes
milliseconds, also during compilation.

Signals are received at once, even while the main thread is in C: Python runs handlers in the main
thread only, but writes the signal to a socket that another thread reads.
"""

import json
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

import jax
from jax.experimental import multihost_utils

from xlashard import multihost
from xlashard.core.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, store
from xlashard.core.processes.stack_dump import OWN_THREADS
from xlashard.support.background import listening_to_signals, start_background
from xlashard.support.documents import JsonRecord
from xlashard.support.formatting import error_line, print_error
from xlashard.train import errors
from xlashard.train.errors import PeerError, RunError

_POLL_TIMEOUT = 30.0
"""Timeout in seconds of one wait for messages."""

_AGREEMENT_TIMEOUT = 120.0
"""Timeout in seconds for every process to report its count, which takes milliseconds."""

_BARRIER_TIMEOUT = 600.0
"""Timeout in seconds of a barrier of the main threads."""

_CAUSE_TIMEOUT = 2.0
"""Seconds for which a process with a failed collective waits for the cause from a peer."""

_EXIT_TIMEOUT = 10.0
"""Seconds in which the main thread may end by itself after a peer failed."""

_SAME_SIGNAL = 2.0
"""Seconds for which further signals are copies of the first: systemd and Slurm send it to every
process of a job, and the launcher among them passes its own on."""

_SIGNAL_TIMEOUT = 10.0
"""Seconds after a second signal in which the main thread may still write results."""


@dataclass(frozen=True)
class Group:
    """Processes of a run.

    Attributes:
        run: Unique identifier of the run.
        index: Index of this process.
        count: Number of processes.
    """

    run: str = ""
    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class StopMessage(JsonRecord):
    """Message of one process to all processes.

    Attributes:
        kind: ``stop``: stop at an agreed point; ``fail``: the sender failed; ``end``: the run is
            complete.
        process: Sender.
        reason: Name of the signal, or the error.
    """

    kind: Literal["stop", "fail", "end"]
    process: int
    reason: str = ""


class SharedCalls:
    """Messages through the key-value store of a pod.

    Messages are numbered, and a number is written once, so all processes receive the same messages
    in the same order.

    Args:
        folder: Prefix of the run's keys.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._received = 0
        self._sent = 0

    def send(self, call: StopMessage) -> None:
        """Send a message to all processes, including this one."""
        value = call.to_json().encode()
        while not store.write(f"{self._folder}/{self._sent}", value):
            self._sent += 1  # Taken by another message.

    def receive(self, seconds: float) -> StopMessage | None:
        """Return the next message; None after a timeout in seconds."""
        value = store.read(f"{self._folder}/{self._received}", seconds)
        if value is None:
            return None
        self._received += 1
        return StopMessage.from_json(value)


class OwnCalls:
    """Messages of a single process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[StopMessage] = queue.SimpleQueue()

    def send(self, call: StopMessage) -> None:
        """Send a message."""
        self._calls.put(call)

    def receive(self, seconds: float) -> StopMessage | None:
        """Return the next message; None after a timeout in seconds."""
        try:
            return self._calls.get(timeout=seconds)
        except queue.Empty:
            return None


class Stop:
    """Stop state of a run.

    Args:
        group: Processes of the run.
        calls: Messages between them.
        show: Prints a line.
        leave: Exits this process with an exit code while its main thread hangs.

    Attributes:
        group: Processes of the run.
        call: Request of the agreed stop.
        failure: Message of the process that failed.
    """

    def __init__(
        self,
        group: Group,
        calls: SharedCalls | OwnCalls,
        show: Callable[[str], None],
        leave: Callable[[int, str], object],
    ) -> None:
        self.group, self._calls, self._show, self._leave = group, calls, show, leave
        self._passed = 0
        self._at: int | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._exiting = threading.Event()
        self.call: StopMessage | None = None
        self.failure: StopMessage | None = None

    def reached(self) -> bool:
        """Pass a stop point; return True at or after the agreed one.

        Raises:
            PeerError: Another process failed.
        """
        with self._changed:
            self.check()
            self._passed += 1
            if self._at is None and _preempted(self._passed):
                self._at = self._passed
                self.call = StopMessage("stop", self.group.index, "SIGTERM")
            return self._at is not None and self._passed >= self._at

    def unless_stopped[T](self, work: Future[T]) -> T | None:
        """Wait for a future; return None if the run stops at the next point.

        Raises:
            PeerError: Another process failed.
        """
        work.add_done_callback(lambda _: self._notify())
        with self._changed:
            self._changed.wait_for(lambda: work.done() or self._is_next() or self.failure)
            self.check()
            if self._is_next():
                return None
        return work.result()

    def request(self, reason: str) -> None:
        """Request a stop of all processes; any thread may call it."""
        self._calls.send(StopMessage("stop", self.group.index, reason))

    def exchange(self, what: str, subject: str = "") -> dict[int, str]:
        """Wait for all processes at a barrier; return the value of each.

        Raises:
            PeerError: Another process failed, or missed the barrier.
        """
        try:
            return RENDEZVOUS.exchange(self._barrier(what, _BARRIER_TIMEOUT), subject)
        except BarrierTimeoutError as error:
            raise PeerError(
                error.missing(f"did not reach {what!r} within {_BARRIER_TIMEOUT:g} s")
            ) from None

    def broadcast(self, what: str, make: Callable[[], object]) -> str:
        """Return a value of the first process in every process, at a barrier.

        Args:
            what: Name of the value.
            make: Returns the value, of which the text is broadcast; called in the first process.

        Raises:
            RunError: `make` raised it in the first process; every process raises it.
            PeerError: Another process failed, or missed the barrier.
        """
        if self.group.index:
            return _read_result(self.exchange(what)[0])
        try:
            value = str(make())
        except RunError as error:
            self.exchange(what, json.dumps([type(error).__name__, str(error)]))
            raise
        self.exchange(what, json.dumps(["", value]))
        return value

    def abandon(self, error: RunError) -> None:
        """End this process and its peers at once, from any thread, without another write."""
        print_error(error)
        self._calls.send(StopMessage("fail", self.group.index, describe_error(error)))
        self._leave(1, describe_error(error))

    def check(self, cause: BaseException | None = None) -> None:
        """Raise PeerError if another process failed."""
        if self.failure is not None:
            raise PeerError(_describe_failure(self.failure)) from cause

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for signals and messages inside the block, which all processes leave together.

        Raises:
            PeerError: The block failed because another process had failed.
        """
        listener = start_background(self._listen_to_calls, self._exiting.set, f"{OWN_THREADS}calls")
        try:
            with on_signal(self.request):
                yield
                self.exchange("the end")
        except PeerError:
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._closed.set()
            # Peers may need this process's listener after its failure.
            if self.group.count == 1:
                self._end(listener)
        if self.group.count > 1:
            self._end(listener)

    def _end(self, listener: threading.Thread) -> None:
        """Wait for the listener to receive the end of the run from the first process."""
        if self.group.index == 0:
            self._calls.send(StopMessage("end", 0))
        listener.join()

    def _fail(self, error: BaseException) -> None:
        """Send the failure to all processes; raise that of a peer if it came first."""
        if self.group.count == 1:
            return
        with self._changed:
            # A collective fails in all processes if one fails or is killed. The cause is reported
            # first; a killed peer ends this process in the meantime.
            if isinstance(error, jax.errors.JaxRuntimeError):
                self._changed.wait_for(lambda: self.failure, _CAUSE_TIMEOUT)
            # Each process reports errors that every process finds itself.
            if not isinstance(error, RunError):
                self.check(error)
        self._calls.send(StopMessage("fail", self.group.index, describe_error(error)))

    def _barrier(self, what: str, timeout: float) -> Barrier:
        processes = tuple(range(self.group.count))
        series = f"train/{self.group.run}/{what}"
        return Barrier(processes, series, timeout, lambda *_: self.check(), what)

    def _is_next(self) -> bool:
        return self._at is not None and self._passed + 1 >= self._at

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _listen_to_calls(self) -> None:
        while not self._exiting.is_set():
            try:
                call = self._calls.receive(_POLL_TIMEOUT)
            except Exception:
                return  # The store is closed; JAX ends this process unless the run is complete.
            if call is None:
                continue
            if call.kind == "end":
                return
            if call.kind == "stop":
                self._agree(call)
            elif call.process != self.group.index:
                self._end_with(call)

    def _agree(self, call: StopMessage) -> None:
        if self._at is not None:
            return
        with self._changed:
            try:
                barrier = self._barrier("stop", _AGREEMENT_TIMEOUT)
                counts = RENDEZVOUS.exchange(barrier, str(self._passed + 1))
            except PeerError:
                return
            except BarrierTimeoutError as error:
                self.failure = StopMessage("fail", error.processes[0], "no answer")
                return
            self._at = max(map(int, counts.values()))
            self.call = call
            self._changed.notify_all()
        self._show(f"{call.reason}: stopping ...")

    def _end_with(self, call: StopMessage) -> None:
        """End this process after a peer failed, since its collectives would hang."""
        with self._changed:
            self.failure = self.failure or call
            self._changed.notify_all()
        if not self._closed.wait(_EXIT_TIMEOUT):
            print_error(_describe_failure(self.failure))
            self._leave(1, _describe_failure(self.failure))


def _read_result(text: str) -> str:
    """Return the value of another process, or raise its error."""
    kind, value = json.loads(text)
    if kind:
        raise getattr(errors, kind)(value)
    return value


def _preempted(point: int) -> bool:
    """Return True if JAX's preemption service stops the run at this point.

    Most clusters send SIGTERM instead, which `on_signal` handles.
    """
    try:
        return multihost_utils.reached_preemption_sync_point(point)
    except RuntimeError:
        return False  # The service is disabled.


def describe_error(error: BaseException) -> str:
    """Return the error that has ended a process, in one line for the other processes."""
    if isinstance(error, KeyboardInterrupt):
        return "a second signal ended it at once"
    return error_line(error, RunError)


def _describe_failure(call: StopMessage) -> str:
    return f"process {call.process} failed: {call.reason}"


def make_stop(group: Group, show: Callable[[str], None]) -> Stop:
    """Return the stop state of a group."""
    calls = OwnCalls() if group.count == 1 else SharedCalls(f"train/{group.run}/calls")
    return Stop(group, calls, show, multihost.leave)


def exit_code(name: str) -> int:
    """Return the exit code for a signal: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signal.Signals[name]


@contextmanager
def on_signal(request: Callable[[str], None]) -> Iterator[None]:
    """Call a function with the name of the first signal inside the block.

    A second signal, 2 s or more after the first, raises KeyboardInterrupt in the main thread; if
    the block is not left within 10 s, the process exits. Outside of the main thread nothing
    changes, since Python delivers signals to the main thread only.

    Args:
        request: Called in another thread.
    """
    handled = read = math.inf  # Times of the first signal in each thread.
    left = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal handled
        now = time.monotonic()
        if now - handled >= _SAME_SIGNAL:
            raise KeyboardInterrupt
        handled = min(handled, now)

    def listen(number: int) -> None:
        nonlocal read
        now = time.monotonic()
        if read == math.inf:
            read = now
            request(signal.Signals(number).name)
        elif now - read >= _SAME_SIGNAL and not left.wait(_SIGNAL_TIMEOUT):
            os._exit(128 + number)

    with listening_to_signals(handle, listen, f"{OWN_THREADS}signals"):
        try:
            yield
        finally:
            left.set()
