"""Asking all processes what they are doing, also those whose main thread hangs.

A thread of each process waits in the store for somebody to ask, and answers with the stacks of all
threads and with the progress that the program has told. Questions are numbered, and the first who
writes one down asks for all: the others wait for what comes of it.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable

import jax

from xlashard._jax import coordination
from xlashard.lazily import dataclass
from xlashard.processes import store
from xlashard.processes.thread_stacks import OWN_THREADS, ThreadStack, own_stacks

# Seconds that one call of the store waits for a question.
_WAIT = 20.0
# What a process calls itself to, to answer no more.
_CLOSE = b"close"


@dataclass(frozen=True)
class StepProgress:
    """How far a process is.

    Attributes:
        step: The number of its step.
        idle: Seconds since the last step.
        paused: What it does instead of steps, if it has said so; empty otherwise.
    """

    step: int
    idle: float
    paused: str = ""


@dataclass(frozen=True)
class ProcessDump:
    """What a process says.

    Attributes:
        progress: How far it is, if it counts steps.
        threads: What its threads do.
    """

    progress: StepProgress | None
    threads: tuple[ThreadStack, ...]

    def to_bytes(self) -> bytes:
        """As it goes through the store."""
        progress = self.progress and [
            self.progress.step,
            self.progress.idle,
            self.progress.paused,
        ]
        threads = [thread.to_json() for thread in self.threads]
        return json.dumps({"progress": progress, "threads": threads}).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> "ProcessDump":
        """From the store."""
        said = json.loads(value)
        progress = StepProgress(*said["progress"]) if said["progress"] else None
        return cls(progress, tuple(ThreadStack.from_json(one) for one in said["threads"]))

    @property
    def main(self) -> ThreadStack | None:
        """The main thread."""
        return next((thread for thread in self.threads if thread.main), None)


@dataclass(frozen=True)
class DumpRequest:
    """A question to all.

    Attributes:
        number: Its number.
        answers: What each answered that did; None if another process asks, and says what came of
            it.
    """

    number: int
    answers: dict[int, ProcessDump] | None

    def publish(self, text: str) -> None:
        """Says what came of it."""
        store.write(f"stacks/{self.number}/outcome", text.encode())

    def outcome(self, seconds: float) -> str | None:
        """What came of it, waited for up to some seconds."""
        value = store.read(f"stacks/{self.number}/outcome", seconds)
        return None if value is None else value.decode()


class StackServer:
    """Where this process answers and asks."""

    def __init__(self) -> None:
        self._progress: Callable[[], StepProgress] | None = None
        self._last = 0
        self._asked = -math.inf
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Answers from now on, in a thread of its own."""
        with self._lock:
            if self._thread is not None or coordination.client() is None:
                return
            name = f"{OWN_THREADS}answers"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Answers no more. Python must not end while a thread is in a call of the store."""
        if self._thread is not None:
            store.write(_call(coordination.process_index()), _CLOSE, overwrite=True)
            self._thread.join(_WAIT)

    def set_progress_source(self, progress: Callable[[], StepProgress] | None) -> None:
        """Says from where the progress of this process is known."""
        self._progress = progress

    def local_dump(self) -> ProcessDump:
        """What this process would answer."""
        progress = self._progress
        return ProcessDump(None if progress is None else progress(), own_stacks())

    def request_all(self, seconds: float, recent: float) -> DumpRequest:
        """Asks all, unless another process has, and waits for answers for some seconds.

        Args:
            seconds: How long.
            recent: For how many seconds after a question no other is asked.
        """
        with self._lock:
            last, since = self._last, time.monotonic() - self._asked
        if since < recent:
            return DumpRequest(last, None)
        latest = int(store.read("stacks/last") or b"0")
        if latest > last:
            return DumpRequest(latest, None)  # asked a moment ago, and not answered here yet
        number = latest + 1
        if not store.write(f"stacks/{number}/asked", b""):
            return DumpRequest(number, None)
        store.write("stacks/last", str(number).encode(), overwrite=True)
        store.drop(f"stacks/{number - 2}")
        processes = range(coordination.process_count())
        for process in processes:
            store.write(_call(process), str(number).encode(), overwrite=True)
        end = time.monotonic() + seconds
        answers = {}
        for process in processes:
            left = max(0.0, end - time.monotonic())
            value = store.read(f"stacks/{number}/answers/{process}", left)
            if value is not None:
                answers[process] = ProcessDump.from_bytes(value)
        return DumpRequest(number, answers)

    def _serve(self) -> None:
        me = coordination.process_index()
        # The service may end before the program.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while True:
                called = store.read(_call(me), _WAIT)
                if called == _CLOSE:
                    return
                if called is None:
                    continue
                store.drop(_call(me))
                # Another call may have come before that was dropped. After a long stop only the
                # last questions still count.
                latest = int(store.read("stacks/last") or called)
                value = self.local_dump().to_bytes()
                for number in range(max(self._last, latest - 2) + 1, latest + 1):
                    store.write(f"stacks/{number}/answers/{me}", value)
                with self._lock:
                    self._last, self._asked = latest, time.monotonic()


def _call(process: int) -> str:
    """The key where a process is called to answer."""
    return f"stacks/calls/{process}"


stack_server = StackServer()
"""Where this process answers and asks."""
