"""Stopping at one place of the run that all processes agree on.

A run comes by places where it may stop: before each step, each batch of an evaluation, and so on.
Each process counts them; all processes come by the same ones. When somebody asks to stop, a thread
of every process tells how many places its main thread has passed, which waits meanwhile where it
should come to another one. They stop at the first place that nobody has passed. The main threads
need not answer anything, so it is agreed in milliseconds, also while they compile.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType

import jax
from jax.experimental import multihost_utils

from xlashard import multihost
from xlashard.background import start_background
from xlashard.processes import RENDEZVOUS, Barrier, BarrierTimeoutError, format_processes, store
from xlashard.processes.thread_stacks import OWN_THREADS
from xlashard.train.errors import DataError, PeerError, RunError
from xlashard.train.loop.group import Call, Calls, Group, OwnCalls, SharedCalls
from xlashard.wording import print_error

_LOOK = 30.0
"""Seconds of one look for calls; a call ends it at once."""


_AGREEING = 120.0
"""Seconds in which every process must tell where it is; its thread needs milliseconds."""


_COMING = 600.0
"""Seconds in which every process must come to a place where all wait for each other."""


_AT_FAULT = 2.0
"""Seconds for which a process whose collective failed waits for the one that is at fault."""


_PATIENCE = 10.0
"""Seconds in which the main thread may end by itself after another process failed."""


class Stop:
    """Whether and where a run stops.

    Args:
        group: The processes of the run.
        calls: How they call each other.
        say: Shows a line to a person.
        leave: Ends this process with an exit code, while its main thread hangs.

    Attributes:
        call: Who asked for the stop that is agreed on.
        failure: Which process failed, and how.
    """

    def __init__(
        self,
        group: Group,
        calls: Calls,
        say: Callable[[str], None],
        leave: Callable[[int, str], object],
    ) -> None:
        self._group, self._calls, self._say, self._leave = group, calls, say, leave
        self._passed = 0
        self._at: int | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._exiting = threading.Event()
        self.call: Call | None = None
        self.failure: Call | None = None

    def reached(self) -> bool:
        """Passes a place; returns whether it is the one to stop at, or lies behind it.

        Raises:
            PeerError: Another process failed.
        """
        with self._changed:
            self.check()
            self._passed += 1
            if self._at is None and _preempted(self._passed):
                self._at = self._passed
                self.call = Call("stop", self._group.index, "SIGTERM")
            return self._at is not None and self._passed >= self._at

    def unless_stopped[T](self, work: Future[T]) -> T | None:
        """Waits for what another thread does; None if the run is to stop at the next place.

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

    def ask(self, reason: str) -> None:
        """Asks all processes to stop; for any thread of any of them."""
        self._calls.say(Call("stop", self._group.index, reason))

    def meet(self, what: str, subject: str = "") -> dict[int, str]:
        """Waits until all processes have come here; returns what each came with.

        Raises:
            PeerError: Another process failed, or did not come.
        """
        try:
            return RENDEZVOUS.exchange(self._invitation(what, _COMING), subject)
        except BarrierTimeoutError as error:
            raise PeerError(
                f"{format_processes(error.processes)} did not come to {what!r} in {_COMING:g} s"
            ) from None

    def check(self, cause: BaseException | None = None) -> None:
        """Raises PeerError if another process failed."""
        if self.failure is not None:
            raise PeerError(_told(self.failure)) from cause

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Hears signals and calls inside the block, which all processes leave together.

        Raises:
            PeerError: The block failed because another process had failed.
        """
        watcher = start_background(self._watch, self._exiting.set, f"{OWN_THREADS}calls")
        try:
            with on_signal(self.ask):
                yield
                self.meet("the end")
        except PeerError:
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._closed.set()
            # The others of a group may need this one's watcher after it has failed.
            if self._group.count == 1:
                self._end(watcher)
        if self._group.count > 1:
            self._end(watcher)

    def _end(self, watcher: threading.Thread) -> None:
        """Waits until the watcher has heard that all is done, as the first process says."""
        if self._group.index == 0:
            self._calls.say(Call("end", 0))
        watcher.join()

    def _fail(self, error: BaseException) -> None:
        """Tells the others; raises the failure of another one if that was first."""
        if self._group.count == 1:
            return
        with self._changed:
            # A collective fails in all processes if one fails or is killed. So the one at fault
            # goes first, and a killed one has ended this process in the meantime.
            if isinstance(error, jax.errors.JaxRuntimeError):
                self._changed.wait_for(lambda: self.failure, _AT_FAULT)
            # What all find out themselves, each says in its own words.
            if not isinstance(error, RunError):
                self.check(error)
        self._calls.say(Call("fail", self._group.index, first_line(error)))

    def _invitation(self, what: str, timeout: float) -> Barrier:
        everybody = tuple(range(self._group.count))
        series = f"train/{self._group.run}/{what}"
        return Barrier(everybody, series, timeout, lambda *_: self.check(), what)

    def _is_next(self) -> bool:
        return self._at is not None and self._passed + 1 >= self._at

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _watch(self) -> None:
        while not self._exiting.is_set():
            try:
                call = self._calls.hear(_LOOK)
            except Exception:
                return  # The store is gone, and JAX ends this process if that is not the end.
            if call is None:
                continue
            if call.kind == "end":
                return
            if call.kind == "stop":
                self._agree(call)
            elif call.process != self._group.index:
                self._end_with(call)

    def _agree(self, call: Call) -> None:
        if self._at is not None:
            return
        with self._changed:
            try:
                invitation = self._invitation("stop", _AGREEING)
                places = RENDEZVOUS.exchange(invitation, str(self._passed + 1))
            except PeerError:
                return
            except BarrierTimeoutError as error:
                self.failure = Call("fail", error.processes[0], "it does not answer")
                return
            self._at = max(map(int, places.values()))
            self.call = call
            self._changed.notify_all()
        self._say(f"{call.said}: stopping ...")

    def _end_with(self, call: Call) -> None:
        """Another process can't go on, so this one can't either: it would wait for ever."""
        with self._changed:
            self.failure = self.failure or call
            self._changed.notify_all()
        if not self._closed.wait(_PATIENCE):
            print_error(_told(self.failure))
            self._leave(1, _told(self.failure))


def _preempted(place: int) -> bool:
    """Whether JAX says that all processes are to stop at this place, as a cluster told one of them.

    Where clusters send SIGTERM, which most do, it comes to us.
    """
    try:
        return multihost_utils.reached_preemption_sync_point(place)
    except RuntimeError:
        return False  # Its service is switched off.


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with its kind where it is not one of ours."""
    if isinstance(error, KeyboardInterrupt):
        return "a second signal ended it at once"
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, RunError) else f"{type(error).__name__}: {text}"


def _told(call: Call) -> str:
    return f"process {call.process} failed: {call.said}"


def make_stop(group: Group, say: Callable[[str], None]) -> Stop:
    """How the processes of a group stop."""
    calls = OwnCalls() if group.count == 1 else SharedCalls(f"train/{group.run}/calls")
    return Stop(group, calls, say, multihost.leave)


def from_the_first(group: Group, stop: Stop, name: str, make: Callable[[], str]) -> str:
    """What the first process makes, in every process.

    Args:
        group: The processes.
        stop: How they hear of failures.
        name: Of what is made.
        make: Is called in the first process.

    Raises:
        PeerError: Another process failed.
    """
    if group.count == 1:
        return make()
    key = f"train/{group.run}/{name}"
    if group.index == 0:
        made = make()
        store.write(key, made.encode())
        return made
    while (value := store.read(key, 1.0)) is None:
        stop.check()
    return value.decode()


def check_same_text(group: Group, stop: Stop, mark: str) -> None:
    """Checks that all processes learn from the same text.

    Args:
        group: The processes.
        stop: How they hear of failures.
        mark: Of this process's text.

    Raises:
        DataError: Some have another one.
        PeerError: Another process failed.
    """
    marks = stop.meet("the text", mark)
    other = next((number for number in marks if marks[number] != marks[0]), None)
    if other is not None:
        raise DataError(
            f"process {other} reads another text ({marks[other]}) than process 0 ({marks[0]}). "
            f"Put the same files on all hosts."
        )


SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what clusters send before they take a machine away."""


_SECOND_SIGNAL = 10.0
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
            elif not left.wait(_SECOND_SIGNAL):
                os._exit(128 + number)
