"""Watchdog that reports the stuck processes, with their stacks, when steps stop coming."""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from xlashard._jax.runtime import coordination
from xlashard.core.processes import checked_seconds
from xlashard.core.processes.stack_dump import (
    OWN_THREADS,
    DumpRequest,
    ProcessDump,
    StepProgress,
    stack_server,
)
from xlashard.core.processes.wait_graph import read_status
from xlashard.errors import ArgumentError
from xlashard.support.background import start_background
from xlashard.support.formatting import format_processes, group_by_value
from xlashard.support.lazily import dataclass

logger = logging.getLogger("xlashard.watchdog")

STUCK_EXIT_CODE = 70
"""Exit code of a process that its watchdog has ended (`EX_SOFTWARE`)."""

# Groups of equal stacks shown in full.
_SHOWN = 4


# Number of polls per timeout.
_LOOKS = 10
# Seconds for the peers to answer, and for the requesting process to publish the report.
_ANSWER, _OUTCOME = 5.0, 6.0
# Seconds for the peers to read a report before the reporting process ends.
_READ = 1.0


@dataclass(frozen=True)
class HangReport:
    """State of a pod that makes no progress.

    Attributes:
        count: Number of processes.
        answers: Answer of each process that replied.
        notes: Description of the barrier at which a process waits, by process.
        recent: Number of seconds after a step during which a process does not count as stuck.
    """

    count: int
    answers: Mapping[int, ProcessDump]
    notes: Mapping[int, str]
    recent: float = 0.0

    @property
    def silent(self) -> tuple[int, ...]:
        """Processes that did not answer."""
        return tuple(p for p in range(self.count) if p not in self.answers)

    @property
    def paused(self) -> dict[int, str]:
        """Processes that have paused their watchdog, with the reason."""
        return {p: progress.paused for p, progress in self._progress.items() if progress.paused}

    @property
    def moving(self) -> tuple[int, ...]:
        """Processes that have just made a step or ended a pause; peers may only be waiting."""
        return tuple(p for p, progress in self._progress.items() if progress.idle < self.recent)

    @property
    def behind(self) -> tuple[int, ...]:
        """Processes that have done fewer steps than the furthest."""
        return tuple(p for p, progress in self._progress.items() if progress.step < self._furthest)

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Processes that execute their own code while others wait in a JAX call."""
        mains = {p: answer.main for p, answer in self.answers.items()}
        running = [p for p, main in mains.items() if main is None or not main.in_runtime]
        return tuple(running) if len(running) < len(self.answers) else ()

    @property
    def culprits(self) -> tuple[int, ...]:
        """Processes that the others wait for, as far as it can be determined."""
        return tuple(sorted({*self.silent, *self.behind, *self.elsewhere, *self.paused}))

    @property
    def _progress(self) -> dict[int, StepProgress]:
        return {p: answer.progress for p, answer in self.answers.items() if answer.progress}

    @property
    def _furthest(self) -> int:
        return max(progress.step for progress in self._progress.values())

    def __str__(self) -> str:
        return "\n".join([*self._verdict(), "", *self._stacks(), _NATIVE_FRAMES])

    def _verdict(self) -> list[str]:
        lines = [self._about(process) for process in self.culprits]
        others = [p for p in self.answers if p not in self.culprits]
        for text, processes in group_by_value({p: self._waits(p) for p in others}):
            verb = "waits" if len(processes) == 1 else "wait"
            lines.append(f"{format_processes(processes)} {verb} {text}")
        if self.moving:
            lines.append(f"{format_processes(self.moving)} made a step just now")
        if not self.culprits:
            lines.append("no process is behind the others: see the line at which each one waits")
        return lines

    def _about(self, process: int) -> str:
        """Describe the problem of a process that the others wait for."""
        if process in self.silent:
            return (
                f"process {process} does not answer: it is stopped (SIGSTOP), its machine is, or "
                "native code keeps Python's lock"
            )
        if process in self.paused:
            return f"process {process} is busy with {self.paused[process]}: {self._at(process)}"
        behind = ""
        if process in self.behind:
            step = self._progress[process].step
            behind = f" at step {step}, behind the others at step {self._furthest},"
        return f"process {process} is stuck{behind} in {self._at(process)}"

    def _waits(self, process: int) -> str:
        progress = self._progress.get(process)
        at_step = f" at step {progress.step}" if progress else ""
        note = self.notes.get(process)
        return f"in {self._at(process)}{at_step}{f' ({note})' if note else ''}"

    def _at(self, process: int) -> str:
        main = self.answers[process].main
        frame = main.user_frame if main else None
        return "no line of Python" if frame is None else str(frame)

    def _stacks(self) -> list[str]:
        mains = {p: answer.main.text() for p, answer in self.answers.items() if answer.main}
        groups = group_by_value(mains)
        # Culprits first.
        groups.sort(key=lambda group: not set(group[1]) & set(self.culprits))
        lines = []
        for text, processes in groups[:_SHOWN]:
            lines += [f"{format_processes(processes)}, {text}", ""]
        if len(groups) > _SHOWN:
            lines += [f"and {len(groups) - _SHOWN} more stacks, in the processes' own logs", ""]
        return lines


_NATIVE_FRAMES = (
    "Frames below Python are not visible from inside; `py-spy dump --native --pid PID` shows them."
)


class Watchdog:
    """Watchdog for the steps of a program.

    A background thread polls the step number. If it does not change for a while, the thread writes
    the Python stacks of all threads of this process, requests the stacks of all other processes,
    which answer even if their main thread is blocked in a collective, and reports the processes
    that the others wait for, with the line at which they are. It continues to watch, and reports
    again after twice the time.

    Heartbeats show that a process is alive; steps show that it makes progress.

    Args:
        timeout: Longest time without a step, in seconds: several times the duration of the slowest
            step.
        crash: Whether this process ends after a report, with exit code 70, so that the launcher can
            restart the pod. A report in which a process has paused its watchdog, or has just made a
            step, ends nothing.
        folder: Folder for copies of the reports, named `watchdog-PROCESS-NUMBER.txt`.

    Raises:
        ArgumentError: The timeout is not a positive number.

    Example:
        >>> from xlashard import multihost
        >>> with multihost.Watchdog(timeout=60) as watchdog:
        ...     with watchdog.paused("compiling"):
        ...         pass
        ...     for step in range(3):
        ...         watchdog.step(step)
    """

    def __init__(
        self, timeout: float, *, crash: bool = False, folder: str | os.PathLike[str] | None = None
    ) -> None:
        if not checked_seconds(timeout, "Watchdog: timeout"):
            raise ArgumentError(
                f"Watchdog: timeout={timeout!r} is invalid: expected a number of seconds above 0, "
                "several times the duration of a step: Watchdog(timeout=300)"
            )
        self._timeout = timeout
        self._crash = crash
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise ArgumentError(
                f"Watchdog: folder must be a path, not {type(folder).__name__}: write "
                "Watchdog(timeout=300, folder='logs')"
            )
        self._folder = None if folder is None else Path(folder)
        self._count = 0
        self._step = 0
        self._pauses: list[str] = []
        self._seen = (0, time.monotonic())
        self._reports = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def step(self, number: int | None = None) -> None:
        """Record a step; costs as little as a counter.

        Args:
            number: Number of the step; by default the previous one plus 1.
        """
        self._count += 1
        self._step = self._step + 1 if number is None else number

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Suspend the watchdog within a block, with a reason: `paused("compiling")`."""
        self._pauses.append(reason)
        try:
            yield
        finally:
            self._pauses.remove(reason)
            self._count += 1

    def __enter__(self) -> "Watchdog":
        stack_server.set_progress_source(self._progress)
        self._seen = self._count, time.monotonic()
        self._end.clear()
        self._thread = start_background(self._watch, self._end.set, f"{OWN_THREADS}watchdog")
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        stack_server.set_progress_source(None)
        if self._thread is not None:
            # Python must not exit while the thread blocks in a call of the store.
            self._thread.join()

    def _progress(self) -> StepProgress:
        return StepProgress(
            self._step, time.monotonic() - self._seen[1], self._pauses[-1] if self._pauses else ""
        )

    def _watch(self) -> None:
        threshold = self._timeout
        while not self._end.wait(self._timeout / _LOOKS):
            count, since = self._seen
            now = time.monotonic()
            if self._count != count or self._pauses:
                if threshold > self._timeout and self._count != count:
                    logger.warning("steps resumed after %.0f s", now - since)
                self._seen, threshold = (self._count, now), self._timeout
            elif now - since >= threshold:
                threshold *= 2
                self._report(now - since)

    def _report(self, idle: float) -> None:
        me, count = coordination.process_index(), coordination.process_count()
        self._reports += 1
        own = "\n\n".join(thread.text() for thread in stack_server.local_dump().threads)
        self._write(
            f"process {me} of {count}: no step for {idle:.0f} s, since step {self._step}:\n{own}"
        )
        busy = False
        if coordination.client() is not None and count > 1:
            try:
                busy = self._report_all(count)
            except Exception as error:
                # The store itself may hang. The report of this process is already written.
                self._write(
                    f"process {me} of {count} cannot request the stacks of its peers: {error}"
                )
        if self._crash and not busy:
            os.write(2, f"\nxlashard: the watchdog ends process {me} of {count}\n".encode())
            logging.shutdown()
            # The peers read the report from this process, or from its service.
            time.sleep(_READ)
            os._exit(STUCK_EXIT_CODE)

    def _report_all(self, count: int) -> bool:
        """Report on all processes; return whether one is busy and has paused its watchdog."""
        request = stack_server.request_all(_ANSWER, recent=self._timeout / 2)
        if request.answers is None:
            return self._report_of_another(request)
        waits = {process: read_status(process).main_wait for process in range(count)}
        notes = {process: str(wait) for process, wait in waits.items() if wait}
        report = HangReport(count, request.answers, notes, recent=self._timeout / 2)
        text, busy = str(report), bool(report.paused or report.moving)
        request.publish(f"{'busy' if busy else 'stuck'}\n{text}")
        self._write(text)
        return busy

    def _report_of_another(self, request: DumpRequest) -> bool:
        outcome = request.outcome(_ANSWER + _OUTCOME)
        if outcome is None:
            self._write("another process requested all stacks, but published no report")
            return False
        state, _, text = outcome.partition("\n")
        self._write(text)
        return state == "busy"

    def _write(self, text: str) -> None:
        logger.error("%s", text)
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"watchdog-{coordination.process_index()}-{self._reports}.txt"
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")
