"""Watchdog that reports the stuck processes, with their stacks, when steps stop coming."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from xlashard._jax.runtime import coordination
from xlashard.core.processes import checked_seconds
from xlashard.core.processes.stack_dump import (
    OWN_THREADS,
    StepProgress,
    stack_server,
)
from xlashard.errors import ArgumentError
from xlashard.pods.multihost.hang_report import COMMAND_OUTCOME, make_hang_report
from xlashard.pods.multihost.job_socket import job_socket
from xlashard.support.background import SIGNALS, listening_to_signals, start_background

logger = logging.getLogger("xlashard.watchdog")

STUCK_EXIT_CODE = 70
"""Exit code of a process that its watchdog has ended (`EX_SOFTWARE`)."""

# Number of polls per timeout.
_LOOKS = 10
# Seconds for the peers to answer, and for the requesting process to publish the report.
_ANSWER, _OUTCOME = 5.0, 6.0
# Seconds in which a signal that all processes of a job get makes one report.
_SIGNAL_AGAIN = 2.0
# Seconds for the peers to read a report before the reporting process ends.
_READ = 1.0


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
        report_signal: Signal on which this process reports as after a timeout, and goes on, such
            as `signal.SIGQUIT`; also while its main thread hangs. The main thread has to enter the
            block. By default no signal is handled.

    Raises:
        ArgumentError: The timeout is not a positive number, or no handler can be set for the
            signal.

    Example:
        >>> from xlashard import multihost
        >>> with multihost.Watchdog(timeout=60) as watchdog:
        ...     with watchdog.paused("compiling"):
        ...         pass
        ...     for step in range(3):
        ...         watchdog.step(step)
    """

    def __init__(
        self,
        timeout: float,
        *,
        crash: bool = False,
        folder: str | os.PathLike[str] | None = None,
        report_signal: int | None = None,
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
        if report_signal is not None and not _can_handle(report_signal):
            raise ArgumentError(
                f"Watchdog: report_signal={report_signal!r} is invalid: expected a signal that "
                "neither stops nor ends a program by itself, such as "
                "Watchdog(timeout=300, report_signal=signal.SIGQUIT)"
            )
        self._folder = None if folder is None else Path(folder)
        self._signal = report_signal
        self._block = ExitStack()
        self._count = 0
        self._step = 0
        self._pauses: list[str] = []
        self._moved = time.monotonic()
        self._seen = 0, self._moved
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
        self._moved = time.monotonic()

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Suspend the watchdog within a block, with a reason: `paused("compiling")`."""
        self._pauses.append(reason)
        try:
            yield
        finally:
            self._pauses.remove(reason)
            self._count += 1
            self._moved = time.monotonic()

    def __enter__(self) -> "Watchdog":
        stack_server.set_progress_source(self._progress)
        self._moved = time.monotonic()
        self._seen = self._count, self._moved
        self._end.clear()
        stack_server.open(close_at_exit=True)
        job_socket.open()
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            self._block.enter_context(
                listening_to_signals(
                    lambda *_: None,
                    lambda _: self._report(f"{name} at step {self._step}", _SIGNAL_AGAIN),
                    f"{OWN_THREADS}signals",
                    (self._signal,),
                )
            )
        self._thread = start_background(self._watch, self._end.set, f"{OWN_THREADS}watchdog")
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()
        self._end.set()
        stack_server.set_progress_source(None)
        if self._thread is not None:
            # Python must not exit while the thread blocks in a call of the store.
            self._thread.join()

    def _progress(self) -> StepProgress:
        paused = self._pauses[-1] if self._pauses else ""
        return StepProgress(self._step, time.monotonic() - self._moved, paused)

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
                why = f"no step for {now - since:.0f} s, since step {self._step}"
                busy = self._report(why, self._timeout / 2)
                if self._crash and not busy:
                    self._end_process()

    def _report(self, why: str, recent: float) -> bool:
        """Report on all processes; return whether one is busy and has paused its watchdog.

        Args:
            why: Reason of the report.
            recent: Number of seconds after a report of another process during which this one shows
                it again, and after a step during which a process does not count as stuck.
        """
        me, count = coordination.process_index(), coordination.process_count()
        self._reports += 1
        own = "\n\n".join(thread.text() for thread in stack_server.local_dump().threads)
        self._write(f"process {me} of {count}: {why}:\n{own}")
        if coordination.client() is not None and count > 1:
            try:
                return self._report_all(recent)
            except Exception as error:
                # The store itself may hang. The report of this process is already written.
                self._write(
                    f"process {me} of {count} cannot request the stacks of its peers: {error}"
                )
        return False

    def _end_process(self) -> NoReturn:
        me, count = coordination.process_index(), coordination.process_count()
        os.write(2, f"\nxlashard: the watchdog ends process {me} of {count}\n".encode())
        logging.shutdown()
        # The peers read the report from this process, or from its service.
        time.sleep(_READ)
        os._exit(STUCK_EXIT_CODE)

    def _report_all(self, recent: float) -> bool:
        while True:
            request = stack_server.request_all(_ANSWER, recent)
            if request.answers is not None:
                break
            outcome = request.outcome(_ANSWER + _OUTCOME)
            if outcome is None:
                self._write("another process requested all stacks, but published no report")
                return False
            if outcome != COMMAND_OUTCOME:
                state, _, text = outcome.partition("\n")
                self._write(text)
                return state == "busy"
        report = make_hang_report(request.answers, recent)
        text, busy = str(report), bool(report.paused or report.moving)
        request.publish(f"{'busy' if busy else 'stuck'}\n{text}")
        self._write(text)
        return busy

    def _write(self, text: str) -> None:
        logger.error("%s", text)
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"watchdog-{coordination.process_index()}-{self._reports}.txt"
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")


def _can_handle(number: object) -> bool:
    return (
        isinstance(number, int)
        and number in signal.valid_signals()
        and number not in (*SIGNALS, signal.SIGKILL, signal.SIGSTOP)
    )
