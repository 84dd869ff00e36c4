"""Supervision of the processes of a pod until all have exited: timeouts, verdict, their output."""

import contextlib
import math
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from xlashard.errors import counted
from xlashard.pods.testing.launcher import (
    Event,
    Launch,
    OutputChunk,
    ProcessExit,
    StopRequest,
)
from xlashard.support.background import SIGNALS, handling_signals, read_process_stat
from xlashard.support.formatting import exit_text, format_processes, signal_name

if sys.platform == "linux":
    import resource

# Seconds to exit after a stop signal of the launcher was passed on, to exit after SIGTERM, and to
# print the stacks after SIGABRT.
_AFTER_STOP = 30.0
_AFTER_TERM = 3.0
AFTER_ABORT = 5.0


# Gloo logs its connections unconditionally; Python's fault handler ends its stacks with a list of
# modules.
_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.|Extension modules: ")


# Frames below a test or a function in the stacks of a worker.
_MACHINERY = re.compile(
    r'  File "[^"]*/(?:_pytest/|pluggy/|xlashard/pods/testing/(?:'
    r"pytest_plugin/in_worker|pod_worker|bootstrap)\.py)"
    r'.*", line \d+ in .*\n'
)


@dataclass(frozen=True)
class EndingRules:
    """Limits after which processes are terminated.

    Attributes:
        timeout: Seconds after which all processes print their stacks and are terminated.
        grace: Seconds left for the other processes after the first failure.
    """

    timeout: float = math.inf
    grace: float = 5.0


@dataclass(frozen=True)
class Verdict:
    """Result of the processes of a pod.

    Attributes:
        codes: Exit code of each process, or the negative number of the signal that killed it.
        failed: Processes that failed by themselves, in order of exit. The cause may be a process
            that exited right after another that only noticed it.
        timed_out: Processes that were running when the timeout expired.
        paused: Timed-out processes that were suspended by a signal (SIGSTOP).
        ended: Processes that the launcher terminated after another had failed.
        stopped_by: Signal by which the launcher itself was stopped.
        rules: Limits that applied.
    """

    codes: tuple[int, ...] = ()
    failed: tuple[ProcessExit, ...] = ()
    timed_out: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    stopped_by: int | None = None
    rules: EndingRules = EndingRules()

    @property
    def first(self) -> ProcessExit | None:
        """The process that failed first by itself."""
        return self.failed[0] if self.failed else None

    @property
    def well(self) -> bool:
        """True if all processes succeeded."""
        return not any(self.codes)

    def summary(self) -> str:
        """Summarize the failure in one or two sentences; "" on success."""
        if self.timed_out:
            return _timeout_text(self)
        if self.stopped_by is not None:
            return f"stopped by {signal_name(self.stopped_by)}"
        if self.first is None:
            return ""
        text = f"process {self.first.process} failed first: {exit_text(self.first.code)}"
        for end in self.failed[1:]:
            text += f", then process {end.process}: {exit_text(end.code)}"
        others = [number for number in self.ended if number != self.first.process]
        if others:
            text += (
                f"; {format_processes(others)} still ran {self.rules.grace:g} s later and "
                f"{'was' if len(others) == 1 else 'were'} ended"
            )
        return text

    def exit_code(self) -> int:
        """Return the exit code of the launcher, by the conventions of a shell."""
        if self.timed_out:
            return 124
        failed = [self.first.code] if self.first else [code for code in self.codes if code]
        return next((code if code > 0 else 128 - code for code in failed), 0)


def _timeout_text(verdict: Verdict) -> str:
    text = f"{format_processes(verdict.timed_out)} did not end within {verdict.rules.timeout:g} s"
    if verdict.paused:
        was = "was" if len(verdict.paused) == 1 else "were"
        text += f"; {format_processes(verdict.paused)} {was} stopped by a signal (SIGSTOP)"
    if verdict.first is not None:
        text += f"; process {verdict.first.process}: {exit_text(verdict.first.code)}"
    return text


@dataclass
class Supervisor:
    """Supervisor of one launch.

    Args:
        launch: The processes.
        rules: Limits after which processes are terminated.
        on_output: Called with output as it arrives.
        stop_signal: Returns each stop signal of this process once.
        on_stop: Called with a stop signal of this process, or of the guard, when it is passed on.
    """

    launch: Launch
    rules: EndingRules
    on_output: Callable[[OutputChunk], None]
    stop_signal: Callable[[], int | None] = lambda: None
    on_stop: Callable[[int], None] = lambda number: None
    _codes: dict[int, int] = field(default_factory=dict)
    _verdict: Verdict = field(default_factory=Verdict)
    # Times at which the grace period ends, and at which processes are killed.
    _grace_end: float | None = None
    _kill_at: float | None = None
    # Processes that were asked to stop. A batch system asks each once, and means no repetition.
    _stop_sources: set[Literal["launcher", "guard"]] = field(default_factory=set)

    def run(self) -> Verdict:
        """Wait until all processes, and all that they started, have exited."""
        deadline = time.monotonic() + self.rules.timeout
        while self.launch.running:
            now = time.monotonic()
            if (number := self.stop_signal()) is not None:
                self._stop(number, "launcher")
            if self._kill_at is not None:
                if now >= self._kill_at:
                    break
            elif now >= deadline:
                self._time_out(now)
            elif self._grace_end is not None and now >= self._grace_end:
                self._end_others(now)
            due = [at for at in (self._kill_at, deadline, self._grace_end) if at and at > now]
            # Poll regularly for stop signals of this process.
            for event in self.launch.events(min([0.2, *(at - now for at in due)])):
                self._note(event)
        for event in self.launch.rest():
            self._note(event)
        total = len(self.launch.pids)
        codes = tuple(self._codes.get(number, -signal.SIGKILL) for number in range(total))
        return replace(self._verdict, codes=codes, rules=self.rules)

    def _find(self, **facts: Any) -> None:
        self._verdict = replace(self._verdict, **facts)

    def _note(self, event: Event) -> None:
        if isinstance(event, OutputChunk):
            self.on_output(event)
        if isinstance(event, StopRequest):
            self._stop(event.signal, "guard")
        if isinstance(event, ProcessExit):
            self._codes[event.process] = event.code
            if event.code and self._kill_at is None:
                self._find(failed=(*self._verdict.failed, event))
                if self._grace_end is None:
                    self._grace_end = time.monotonic() + self.rules.grace

    def _stop(self, number: int, source: Literal["launcher", "guard"]) -> None:
        if source in self._stop_sources:
            self._kill_at = time.monotonic()
        elif not self._stop_sources:
            self._find(stopped_by=number)
            self._kill_at = time.monotonic() + _AFTER_STOP
            self.on_stop(number)
            self.launch.signal(number)
        self._stop_sources.add(source)

    def _time_out(self, now: float) -> None:
        late = tuple(sorted(self.launch.running))
        paused = tuple(n for n in late if is_paused(self.launch.pids[n]))
        self._find(timed_out=late, paused=paused)
        self._kill_at = now + AFTER_ABORT
        show_stacks(self.launch, late)

    def _end_others(self, now: float) -> None:
        self._find(ended=tuple(sorted(self.launch.running)))
        self._kill_at = now + _AFTER_TERM
        self.launch.signal(signal.SIGTERM)


def show_stacks(launch: Launch, processes: Iterable[int]) -> None:
    """Make Python processes print the stacks of their threads and exit."""
    signalled = launch.running.intersection(processes)
    for number in signalled:
        _forbid_core(launch.pids[number])
    # Python's fault handler reacts to SIGABRT in any call; a suspended process must be resumed
    # first.
    launch.signal(signal.SIGABRT, signalled)
    launch.signal(signal.SIGCONT, signalled)


def _forbid_core(pid: int) -> None:
    """Prevent a process from writing a core file."""
    if sys.platform == "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
            _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, most))


def is_paused(pid: int) -> bool:
    """Return whether a process is suspended by a signal."""
    try:
        return read_process_stat(pid)[0] in ("T", "t")
    except OSError:
        return False


@dataclass(frozen=True)
class PodRun:
    """Run of a program in all processes of a pod.

    Attributes:
        outputs: Merged standard output and standard error of each process.
        verdict: Result of the processes.
    """

    outputs: tuple[str, ...]
    verdict: Verdict

    def report(self, lines: int = 40) -> str:
        """Return the summary with the last lines of each process, failed processes first."""
        failed = [end.process for end in self.verdict.failed]
        order = dict.fromkeys([*failed, *range(len(self.outputs))])
        return "\n".join([self.verdict.summary(), *(self._section(n, lines) for n in order)])

    def _section(self, number: int, lines: int) -> str:
        title = f"process {number} ({exit_text(self.verdict.codes[number])})"
        text = last_lines(self.outputs[number], lines)
        return f"--- {title} ---\n{text or '[it wrote nothing]'}"


def run_to_end(launch: Launch, rules: EndingRules) -> PodRun:
    """Wait for the processes of a launch and collect their output."""
    written = [bytearray() for _ in launch.pids]

    def keep(printed: OutputChunk) -> None:
        written[printed.process].extend(printed.text)

    with launch:
        verdict = Supervisor(launch, rules, keep).run()
    return PodRun(tuple(without_noise(bytes(text)) for text in written), verdict)


@contextlib.contextmanager
def collect_signals() -> Iterator[deque[int]]:
    """Collect signals that ask this process to stop, instead of handling them."""
    received: deque[int] = deque()
    with handling_signals(lambda number, _: received.append(number), (*SIGNALS, signal.SIGHUP)):
        yield received


def without_machinery(text: str) -> str:
    """Remove the frames that call tests and functions from the stacks in an output."""
    return _MACHINERY.sub("", text)


def is_noise(line: bytes) -> bool:
    """Return whether a line carries no information for the user."""
    return _NOISE.match(line) is not None


def without_noise(text: bytes) -> str:
    """Decode an output without its noise lines."""
    lines = text.splitlines(keepends=True)
    kept = b"".join(line for line in lines if not is_noise(line))
    return kept.decode("utf-8", errors="replace")


def last_lines(text: str, most: int) -> str:
    """Return the last lines of a text, preceded by the number of omitted lines."""
    lines = text.rstrip().splitlines()
    left_out = max(0, len(lines) - most)
    head = [f"[{counted(left_out, 'line')} before]"] if left_out else []
    return "\n".join([*head, *lines[left_out:]])
