"""Stack dumps of all processes, including a process whose main thread hangs.

A background thread of each process waits in the key-value store for a request, and answers it with
the stacks of all threads and the step progress. Requests are numbered; the first process that
writes a number collects the answers, and the other processes wait for its report.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable

import jax

from xlashard._jax.runtime import coordination
from xlashard.lazily import dataclass
from xlashard.processes import store
from xlashard.processes.thread_stacks import OWN_THREADS, ThreadStack, own_stacks

# Timeout of one blocking read for a request, in seconds.
_WAIT = 20.0
# Request that a process sends to its own server to stop it.
_CLOSE = b"close"


@dataclass(frozen=True)
class StepProgress:
    """Step progress of a process.

    Attributes:
        step: Number of the current step.
        idle: Seconds since the last step.
        paused: Reason why no steps are expected at the moment; empty otherwise.
    """

    step: int
    idle: float
    paused: str = ""


@dataclass(frozen=True)
class ProcessDump:
    """Answer of one process to a request.

    Attributes:
        progress: Step progress, if the program counts steps.
        threads: Stacks of its threads.
    """

    progress: StepProgress | None
    threads: tuple[ThreadStack, ...]

    def to_bytes(self) -> bytes:
        """Serialize for the key-value store."""
        progress = self.progress and [
            self.progress.step,
            self.progress.idle,
            self.progress.paused,
        ]
        threads = [thread.to_json() for thread in self.threads]
        return json.dumps({"progress": progress, "threads": threads}).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> "ProcessDump":
        """Parse bytes written by `to_bytes`."""
        fields = json.loads(value)
        progress = StepProgress(*fields["progress"]) if fields["progress"] else None
        return cls(progress, tuple(ThreadStack.from_json(one) for one in fields["threads"]))

    @property
    def main(self) -> ThreadStack | None:
        """Stack of the main thread."""
        return next((thread for thread in self.threads if thread.main), None)


@dataclass(frozen=True)
class DumpRequest:
    """A request to all processes.

    Attributes:
        number: Number of the request.
        answers: Answer of each process that replied; None if another process made the request and
            publishes the outcome.
    """

    number: int
    answers: dict[int, ProcessDump] | None

    def publish(self, text: str) -> None:
        """Publish the outcome for the other processes."""
        store.write(f"stacks/{self.number}/outcome", text.encode())

    def outcome(self, seconds: float) -> str | None:
        """Return the published outcome, or None if it is not there after `seconds`."""
        value = store.read(f"stacks/{self.number}/outcome", seconds)
        return None if value is None else value.decode()


class StackServer:
    """Server that answers stack requests of other processes, and client that makes them."""

    def __init__(self) -> None:
        self._progress: Callable[[], StepProgress] | None = None
        self._last = 0
        self._asked = -math.inf
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Start to serve requests in a background thread."""
        with self._lock:
            if self._thread is not None or coordination.client() is None:
                return
            name = f"{OWN_THREADS}answers"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the server. Python must not exit while a thread blocks in a call of the store."""
        if self._thread is not None:
            store.write(_call(coordination.process_index()), _CLOSE, overwrite=True)
            self._thread.join(_WAIT)

    def set_progress_source(self, progress: Callable[[], StepProgress] | None) -> None:
        """Set the function that returns this process's progress, or None."""
        self._progress = progress

    def local_dump(self) -> ProcessDump:
        """Return the answer of this process."""
        progress = self._progress
        return ProcessDump(None if progress is None else progress(), own_stacks())

    def request_all(self, seconds: float, recent: float) -> DumpRequest:
        """Request the stacks of all processes, unless another process has just done so.

        Args:
            seconds: How long to wait for the answers.
            recent: Number of seconds after a request during which no new one is made.
        """
        with self._lock:
            last, since = self._last, time.monotonic() - self._asked
        if since < recent:
            return DumpRequest(last, None)
        latest = int(store.read("stacks/last") or b"0")
        if latest > last:
            return DumpRequest(latest, None)  # Another request is in flight, not yet answered here.
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
        # The coordination service may end before the program.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while True:
                called = store.read(_call(me), _WAIT)
                if called == _CLOSE:
                    return
                if called is None:
                    continue
                store.drop(_call(me))
                # Another request may have arrived before the key was dropped. After a long
                # suspension only the last requests still matter.
                latest = int(store.read("stacks/last") or called)
                value = self.local_dump().to_bytes()
                for number in range(max(self._last, latest - 2) + 1, latest + 1):
                    store.write(f"stacks/{number}/answers/{me}", value)
                with self._lock:
                    self._last, self._asked = latest, time.monotonic()


def _call(process: int) -> str:
    """Return the key at which a process is called to answer."""
    return f"stacks/calls/{process}"


stack_server = StackServer()
"""Stack server of this process."""
