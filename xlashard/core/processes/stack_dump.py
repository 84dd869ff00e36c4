"""Python stacks of the threads of all processes, including one whose main thread hangs.

A background thread of each process waits in the key-value store for a request, and answers it with
the stacks of all threads and the step progress. Requests are numbered; the first process that
writes a number collects the answers, and the other processes wait for its report.

Frames below Python, such as those of a running collective, cannot be inspected from inside the
process.
"""

import linecache
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType

import jax

from xlashard._jax.runtime import coordination
from xlashard.core.processes import store
from xlashard.core.processes.awaited_calls import awaited_program, waits_for_device
from xlashard.core.processes.process_facts import ProcessFacts, classify_file, read_facts
from xlashard.core.processes.wait_graph import HostCollective, own_status
from xlashard.support.background import at_exit
from xlashard.support.documents import JsonRecord
from xlashard.support.lazily import dataclass

# Timeout of one blocking read for a request, in seconds.
_WAIT = 20.0
# Request that a process sends to its own server to stop it.
_CLOSE = b"close"
# Request of a command.
_COMMAND = b"command"


OWN_THREADS = "xlashard-"
"""Name prefix of this package's own threads, which are left out of stack dumps."""


# Innermost frames that are kept per thread.
_DEEPEST = 60


@dataclass(frozen=True)
class StackFrame:
    """One call on a stack.

    Attributes:
        file: Path of the source file.
        line: Line that is executing.
        function: Name of the function.
        source: Text of that line.
        kind: `"user"`, `"runtime"` (JAX and this package), or `"library"` (everything else).
    """

    file: str
    line: int
    function: str
    source: str
    kind: str

    @property
    def place(self) -> str:
        """Short form of the location: `data.py:31 in next_batch`."""
        return f"{Path(self.file).name}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.place}: {self.source}" if self.source else self.place


@dataclass(frozen=True)
class ThreadStack:
    """Stack of one thread.

    Attributes:
        name: Name of the thread.
        main: Whether it is the main thread.
        on_device: Whether the innermost call has no Python frame and runs on, or waits for, a
            device.
        frames: Calls of the thread, innermost first.
        awaits: Compiled function whose result its user's line awaits, with the line of its call;
            empty if unknown.
    """

    name: str
    main: bool
    on_device: bool
    frames: tuple[StackFrame, ...]
    awaits: str = ""

    @property
    def in_runtime(self) -> bool:
        """Return whether the innermost user call is a call into JAX or this package."""
        kinds = [frame.kind for frame in self.frames if frame.kind != "library"]
        return self.on_device or kinds[:1] == ["runtime"]

    @property
    def user_frame(self) -> StackFrame | None:
        """Innermost frame of the user's program, or the innermost frame without one."""
        users = (frame for frame in self.frames if frame.kind == "user")
        return next(users, self.frames[0] if self.frames else None)

    def text(self) -> str:
        """Format the stack like a traceback, innermost call last.

        Consecutive frames inside JAX and this package are abbreviated to the first and the last.
        """
        lines = [f"thread {self.name!r}:"]
        inner = next((i for i, one in enumerate(self.frames) if one.kind != "runtime"), 0)
        for number, frame in reversed(tuple(enumerate(self.frames))):
            if 0 < number < inner - 1:
                if number == 1:
                    lines.append(f"    [{inner - 2} more inside]")
                continue
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            if frame.source:
                lines.append(f"    {frame.source}")
        return "\n".join(lines)


def own_stacks() -> tuple[ThreadStack, ...]:
    """Return the stacks of all threads except this package's own, main thread first."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        name = thread.name if thread else f"thread {ident}"
        if not name.startswith(OWN_THREADS):
            frames, on_device = _frames(frame), waits_for_device(frame)
            stack = ThreadStack(name, ident == main, on_device, frames)
            if stack.main and stack.in_runtime:
                stack = replace(stack, awaits=awaited_program(_find_user_frame(frame)))
            stacks.append(stack)
    return tuple(sorted(stacks, key=lambda stack: (not stack.main, stack.name)))


def _find_user_frame(frame: FrameType) -> FrameType | None:
    users = (
        f for f, _ in traceback.walk_stack(frame) if classify_file(f.f_code.co_filename) == "user"
    )
    return next(users, None)


def _frames(frame: FrameType) -> tuple[StackFrame, ...]:
    frames = []
    for inner, line in islice(traceback.walk_stack(frame), _DEEPEST):
        file = inner.f_code.co_filename
        source = linecache.getline(file, line).strip()
        frames.append(StackFrame(file, line, inner.f_code.co_name, source, classify_file(file)))
    return tuple(frames)


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
class ProcessDump(JsonRecord):
    """Answer of one process to a request.

    Attributes:
        progress: Step progress, if the program counts steps.
        threads: Stacks of its threads.
        facts: Its host, versions, code and memory; None if unknown.
        collective: The collective of hosts in which it waits, or the last one; None without one.
        lost: Peers that are gone, each with how that was noticed.
    """

    progress: StepProgress | None
    threads: tuple[ThreadStack, ...]
    facts: ProcessFacts | None = None
    collective: HostCollective | None = None
    lost: tuple[tuple[int, str], ...] = ()

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
        self._lost: dict[int, str] = {}
        self._lock = threading.Lock()

    def open(self, *, close_at_exit: bool = False) -> None:
        """Start to serve requests in a background thread, unless it does so already.

        Args:
            close_at_exit: Whether nothing else will close it.
        """
        with self._lock:
            if self._thread is not None or coordination.client() is None:
                return
            name = f"{OWN_THREADS}answers"
            self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._thread.start()
        if close_at_exit:
            at_exit(self._close_at_exit)

    def close(self) -> None:
        """Stop the server. Python must not exit while a thread blocks in a call of the store."""
        if self._thread is not None and self._thread.is_alive():
            store.write(_call(coordination.process_index()), _CLOSE, overwrite=True)
            self._thread.join(_WAIT)

    def _close_at_exit(self) -> None:
        # The service may have ended before.
        with suppress(Exception):
            self.close()

    def set_progress_source(self, progress: Callable[[], StepProgress] | None) -> None:
        """Set the function that returns this process's progress, or None."""
        self._progress = progress

    def lose(self, processes: Iterable[int], how: str) -> None:
        """Keep that peers are gone, for reports."""
        self._lost.update(dict.fromkeys(processes, how))

    def local_dump(self) -> ProcessDump:
        """Return the answer of this process."""
        progress = self._progress
        return ProcessDump(
            None if progress is None else progress(),
            own_stacks(),
            read_facts(),
            own_status.last_collective,
            tuple(self._lost.items()),
        )

    def request_all(
        self, seconds: float, recent: float = 0, *, by_command: bool = False
    ) -> DumpRequest:
        """Request the stacks of all processes, unless another process has just done so.

        Args:
            seconds: How long to wait for the answers.
            recent: Number of seconds after a request during which no new one is made.
            by_command: Whether a command makes it, which keeps no watchdog from its own report.
        """
        with self._lock:
            last, since = self._last, time.monotonic() - self._asked
        if since < recent:
            return DumpRequest(last, None)
        latest = int(store.read("stacks/last") or b"0")
        if latest > last:
            return DumpRequest(latest, None)  # Another request is in flight, not yet answered here.
        number = latest + 1
        if not store.write(f"stacks/{number}/asked", _COMMAND if by_command else b""):
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
                answers[process] = ProcessDump.from_json(value)
        return DumpRequest(number, answers)

    def _serve(self) -> None:
        me = coordination.process_index()
        # The coordination service may end before the program.
        with suppress(jax.errors.JaxRuntimeError):
            facts = replace(read_facts(), resident_bytes=None, device_bytes=None)
            store.write(_facts(me), facts.to_json().encode(), overwrite=True)
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
                value = self.local_dump().to_json().encode()
                for number in range(max(self._last, latest - 2) + 1, latest + 1):
                    store.write(f"stacks/{number}/answers/{me}", value)
                by_command = store.read(f"stacks/{latest}/asked") == _COMMAND
                with self._lock:
                    self._last = latest
                    if not by_command:
                        self._asked = time.monotonic()


def read_peer_facts(process: int) -> ProcessFacts | None:
    """Return the facts that a process published at its start, for one that does not answer."""
    value = store.read(_facts(process))
    return None if value is None else ProcessFacts.from_json(value)


def _facts(process: int) -> str:
    """Return the key of the facts that a process publishes."""
    return f"stacks/facts/{process}"


def _call(process: int) -> str:
    """Return the key at which a process is called to answer."""
    return f"stacks/calls/{process}"


stack_server = StackServer()
"""Stack server of this process."""
