"""Python stacks of the threads of all processes, including one whose main thread hangs.

A background thread of each process waits in the key-value store for a request, and answers it with
the stacks of all threads and the step progress. Requests are numbered; the first process that
writes a number collects the answers, and the other processes wait for its report.

Frames below Python, such as those of a running collective, cannot be inspected from inside the
process.
"""

import ast
import builtins
import contextlib
import inspect
import linecache
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import jax

from xlashard._jax.runtime import coordination
from xlashard.core.processes import store
from xlashard.core.processes.wait_graph import is_package_file
from xlashard.support.documents import JsonRecord
from xlashard.support.lazily import dataclass

# Timeout of one blocking read for a request, in seconds.
_WAIT = 20.0
# Request that a process sends to its own server to stop it.
_CLOSE = b"close"


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
    """

    name: str
    main: bool
    on_device: bool
    frames: tuple[StackFrame, ...]

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
            on_device = waits_for_device(frame)
            stacks.append(ThreadStack(name, ident == main, on_device, _frames(frame)))
    return tuple(sorted(stacks, key=lambda stack: (not stack.main, stack.name)))


def _frames(frame: FrameType) -> tuple[StackFrame, ...]:
    frames = []
    for inner, line in islice(traceback.walk_stack(frame), _DEEPEST):
        file = inner.f_code.co_filename
        source = linecache.getline(file, line).strip()
        frames.append(StackFrame(file, line, inner.f_code.co_name, source, _kind(file)))
    return tuple(frames)


def _kind(file: str) -> str:
    if is_package_file(file):
        return "runtime"
    folders = Path(file).parts
    if "site-packages" in folders:
        package = folders[folders.index("site-packages") + 1]
        return "runtime" if package in _RUNTIME else "library"
    if file.startswith(("<", sys.base_prefix)):
        return "library"
    return "user"


_RUNTIME = ("jax", "jaxlib", "xlashard")


def current_call(frame: FrameType) -> ast.Call | None:
    """Return the call expression that a frame is executing, parsed from its source."""
    code = frame.f_code
    positions = next(islice(code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None or None in positions:
        return None
    first, last, start, end = (number or 0 for number in positions)
    lines = [linecache.getline(code.co_filename, line) for line in range(first, last + 1)]
    if not all(lines):
        return None
    # Columns are byte offsets.
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    try:
        parsed = ast.parse(b"".join(encoded).decode().strip(), mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return None
    return parsed if isinstance(parsed, ast.Call) else None


def waits_for_device(frame: FrameType) -> bool:
    """Return whether a frame is executing a call into JAX or a call that reads a JAX array.

    Compiled functions, `x.block_until_ready()` and `float(x)` have no Python frame of their own.
    """
    call = current_call(frame)
    if call is None:
        return False
    function = _value(call.func, frame)
    if _of_runtime(function):
        return True
    owner = _value(call.func.value, frame) if isinstance(call.func, ast.Attribute) else None
    values = [owner, *(_value(argument, frame) for argument in call.args)]
    return any(isinstance(value, jax.Array) for value in values)


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """Resolve an expression to its value without calling anything."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if expression.id in names:
                return names[expression.id]
    if isinstance(expression, ast.Attribute):
        owner = _value(expression.value, frame)
        if isinstance(owner, ModuleType):
            return vars(owner).get(expression.attr)
        return inspect.getattr_static(owner, expression.attr, None)
    return None


def _of_runtime(function: Any) -> bool:
    # A compiled function reports the module of the function that it was made from.
    modules = {getattr(type(function), "__module__", "")}
    if not hasattr(type(function), "__wrapped__") and not isinstance(function, type):
        modules.add(getattr(function, "__module__", "") or "")
    return any(str(module).partition(".")[0] in _RUNTIME for module in modules)


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
    """

    progress: StepProgress | None
    threads: tuple[ThreadStack, ...]

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
                answers[process] = ProcessDump.from_json(value)
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
                value = self.local_dump().to_json().encode()
                for number in range(max(self._last, latest - 2) + 1, latest + 1):
                    store.write(f"stacks/{number}/answers/{me}", value)
                with self._lock:
                    self._last, self._asked = latest, time.monotonic()


def _call(process: int) -> str:
    """Return the key at which a process is called to answer."""
    return f"stacks/calls/{process}"


stack_server = StackServer()
"""Stack server of this process."""
