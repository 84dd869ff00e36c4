"""A watchdog for steps: says who is stuck, and where, when there are none."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from xlashard._jax import coordination
from xlashard.errors import ArgumentError
from xlashard.multihost.lifecycle.hang_report import HangReport, stacks_text
from xlashard.processes import checked_seconds
from xlashard.processes.stack_dump import DumpRequest, StepProgress, stack_server
from xlashard.processes.thread_stacks import OWN_THREADS
from xlashard.processes.wait_graph import read_status

logger = logging.getLogger("xlashard.watchdog")

STUCK_EXIT_CODE = 70
"""The exit code of a process that its watchdog has ended (`EX_SOFTWARE`)."""

# The watchdog looks this often in the time after which it reports.
_LOOKS = 10
# Seconds that the others have to answer, and the process that asks to say what they did.
_ANSWER, _OUTCOME = 5.0, 6.0
# Seconds that the others have to read a report before the process that made it ends.
_READ = 1.0


class Watchdog:
    """Reports when the steps of a program stop coming.

    A thread looks at the number of steps. When there was none for a while it writes the Python
    stacks of all threads of this process, asks all other processes for theirs, which answer even
    where their main thread hangs in a collective, and reports which of them the others wait for,
    and at which line. It goes on watching, and reports again after twice the time.

    Heartbeats tell whether a process is alive; steps tell whether it gets anywhere.

    Args:
        timeout: How long there may be no step, in seconds: several times what the slowest takes.
        crash: Whether this process ends after a report, with exit code 70, so that whoever started
            the pod can start it again. A report that finds a process that has paused its watchdog,
            or has just made a step, ends nothing.
        folder: Where reports are written too, as `watchdog-PROCESS-NUMBER.txt`.

    Raises:
        ArgumentError: The timeout is no time.

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
                f"timeout={timeout!r}: a watchdog needs a time of more than 0 s, several times "
                "what a step takes: Watchdog(timeout=300)"
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
        """Says that the program gets on; costs as little as a counter.

        Args:
            number: The number of the step; by default one more than the last.
        """
        self._count += 1
        self._step = self._step + 1 if number is None else number

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """A stretch in which no steps are expected of this process: `paused("compiling")`."""
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
        self._thread = threading.Thread(
            target=self._watch, name=f"{OWN_THREADS}watchdog", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        stack_server.set_progress_source(None)
        if self._thread is not None:
            # Python must not end while it is in a call of the store.
            self._thread.join()

    def _progress(self) -> StepProgress:
        return StepProgress(
            self._step, time.monotonic() - self._seen[1], self._pauses[-1] if self._pauses else ""
        )

    def _watch(self) -> None:
        patience = self._timeout
        while not self._end.wait(self._timeout / _LOOKS):
            count, since = self._seen
            now = time.monotonic()
            if self._count != count or self._pauses:
                if patience > self._timeout and self._count != count:
                    logger.warning("steps come again, after %.0f s", now - since)
                self._seen, patience = (self._count, now), self._timeout
            elif now - since >= patience:
                patience *= 2
                self._report(now - since)

    def _report(self, idle: float) -> None:
        me, count = coordination.process_index(), coordination.process_count()
        self._reports += 1
        own = stacks_text(stack_server.local_dump().threads)
        self._write(
            f"process {me} of {count}: no step for {idle:.0f} s, since step {self._step}:\n{own}"
        )
        busy = False
        if coordination.client() is not None and count > 1:
            try:
                busy = self._report_all(count)
            except Exception as error:
                # The store may be what is stuck. Whatever it is, this process's own word is out.
                self._write(f"process {me} of {count} can't ask the others: {error}")
        if self._crash and not busy:
            os.write(2, f"\nxlashard: the watchdog ends process {me} of {count}\n".encode())
            logging.shutdown()
            # The others read the report where this process, or its service, has it.
            time.sleep(_READ)
            os._exit(STUCK_EXIT_CODE)

    def _report_all(self, count: int) -> bool:
        """Reports on all processes. Whether one is busy, and has paused its watchdog for it."""
        question = stack_server.request_all(_ANSWER, recent=self._timeout / 2)
        if question.answers is None:
            return self._report_of_another(question)
        notes = {process: read_status(process) for process in range(count)}
        waits = {p: str(note.main_wait) for p, note in notes.items() if note.main_wait}
        report = HangReport(count, question.answers, waits, recent=self._timeout / 2)
        text, busy = str(report), bool(report.paused or report.moving)
        question.publish(f"{'busy' if busy else 'stuck'}\n{text}")
        self._write(text)
        return busy

    def _report_of_another(self, question: DumpRequest) -> bool:
        outcome = question.outcome(_ANSWER + _OUTCOME)
        if outcome is None:
            self._write("another process asked all others for their stacks, and reported nothing")
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
