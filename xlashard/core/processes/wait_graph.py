"""Published wait statuses of processes, and detection of deadlocks between them.

A process that waits longer than a moment publishes the barrier at which it waits. A peer that waits
for this process can then report more than its index, and can detect a wait that never ends: the
process has exited, or it waits itself, possibly through other processes, for the peer.

Threads limit the certainty: a process that waits in one thread may arrive in another. All processes
of a pod reach a barrier in the same thread, so a main thread that waits elsewhere counts as not
arriving, and other threads are ignored.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from xlashard._jax.runtime import coordination
from xlashard.core.processes import store
from xlashard.support.background import at_exit
from xlashard.support.documents import JsonRecord
from xlashard.support.formatting import error_line, format_processes
from xlashard.support.lazily import dataclass

_PACKAGE = Path(__file__).resolve().parents[2]
# Sub-packages that use this package like a user's program.
_USERS = (str(_PACKAGE / "train"),)
# Maximum number of statuses per search, which bounds its cost in a large pod.
_READ = 64
# Maximum length of the error that has ended a program.
_LONGEST = 240


@dataclass(frozen=True)
class Wait:
    """Wait of one thread.

    Attributes:
        what: Description: `barrier 'epoch'`.
        where: File and line of the caller.
        main: Whether it is the main thread of its process.
        folder: Folder of the barrier in the store.
        missing: Processes that have not arrived.
    """

    what: str
    where: str
    main: bool
    folder: str
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.what} ({self.where})"


@dataclass(frozen=True)
class HostCollective:
    """Barrier, or another call that all processes make together on their hosts.

    Attributes:
        what: Description: `barrier 'epoch'`.
        where: File and line of the caller.
        seconds: Seconds since it began, or since it ended.
        waiting: True while the process waits in it.
    """

    what: str
    where: str
    seconds: float
    waiting: bool

    def __str__(self) -> str:
        return f"{self.what} ({self.where})"


@dataclass(frozen=True)
class ProcessStatus(JsonRecord):
    """Status that a process publishes.

    Attributes:
        number: Version of the status.
        waits: Waits of its threads.
        ended: Description of how its program ended; empty while it runs.
    """

    number: int = 0
    waits: tuple[Wait, ...] = ()
    ended: str = ""

    @property
    def main_wait(self) -> Wait | None:
        """Wait of the main thread."""
        return next((wait for wait in self.waits if wait.main), None)

    def __str__(self) -> str:
        if self.ended:
            return f"has ended ({self.ended})"
        shown = self.main_wait or next(iter(self.waits), None)
        return f"waits at {shown}" if shown else "waits for no other process"


class StatusPublisher:
    """Publisher of this process's status.

    Attributes:
        ends_at_exit: True once something publishes the end of the program when the process exits.
    """

    def __init__(self) -> None:
        self.ends_at_exit = False
        self._waits: dict[int, Wait] = {}
        self._ended = ""
        self._number = 0
        self._lock = threading.Lock()
        # Of the main thread (True) and the others: what, where, since when, whether it waits.
        self._collectives: dict[bool, tuple[str, str, float, bool]] = {}

    @property
    def main_waits(self) -> bool:
        """True while the main thread waits."""
        return threading.main_thread().ident in self._waits

    @contextmanager
    def in_collective(self, what: str, where: str) -> Iterator[None]:
        """Keep the collective of this block, for reports; the last one of each kind of thread."""
        is_main = threading.current_thread() is threading.main_thread()
        self._collectives[is_main] = what, where, time.monotonic(), True
        try:
            yield
        finally:
            self._collectives[is_main] = what, where, time.monotonic(), False

    @property
    def last_collective(self) -> HostCollective | None:
        """Collective in which the main thread waits, or the last one of any thread."""
        kept = max(
            list(self._collectives.items()),
            key=lambda item: (item[0] and item[1][3], item[1][2]),
            default=None,
        )
        if kept is None:
            return None
        what, where, since, waiting = kept[1]
        return HostCollective(what, where, time.monotonic() - since, waiting)

    def begin(self, wait: Wait) -> None:
        """Publish the wait of this thread, if it is not published already."""
        with self._lock:
            if self._waits.get(threading.get_ident()) == wait:
                return
            self._waits[threading.get_ident()] = wait
            self._write()

    def finish(self) -> None:
        """Remove the wait of this thread."""
        with self._lock:
            if self._waits.pop(threading.get_ident(), None) is not None:
                self._write()

    def end(self, how: str) -> None:
        """Publish that the program has ended."""
        with self._lock:
            self._ended = how
            self._write()

    def end_at_exit(self) -> None:
        """Publish the end of the program when the process exits, if nothing else does.

        JAX's handler stops the store. It is registered when JAX is imported, so it runs later.
        """
        if not self.ends_at_exit:
            self.ends_at_exit = True
            at_exit(self._exit)

    def _exit(self) -> None:
        # The program may have stopped the store itself.
        with contextlib.suppress(Exception):
            self.end(how_ended(getattr(sys, "last_exc", None)))

    def _write(self) -> None:
        self._number += 1
        status = ProcessStatus(self._number, tuple(self._waits.values()), self._ended)
        store.write(_key(coordination.process_index()), status.to_json().encode(), overwrite=True)


def how_ended(error: BaseException | None) -> str:
    """Describe how a program ended: by an exception, or None."""
    return "its program has completed" if error is None else error_line(error)[:_LONGEST]


own_status = StatusPublisher()
"""Publisher of the status of this process."""


def read_status(process: int) -> ProcessStatus:
    """Return the status of a process; an empty one if it has published nothing."""
    value = store.read(_key(process))
    return ProcessStatus() if value is None else ProcessStatus.from_json(value)


def _key(process: int) -> str:
    return f"doing/{process}"


def call_site() -> str:
    """Return file and line of the call into this package, for example `train.py:40`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_package_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_package_file(filename: str) -> bool:
    """Return whether a file belongs to the part of this package that user programs call."""
    return filename.startswith(str(_PACKAGE)) and not filename.startswith(_USERS)


@dataclass(frozen=True)
class Deadlock:
    """A wait that cannot end.

    Attributes:
        why: Explanation, identical in every process that finds the deadlock.
        notes: Status numbers that the finding is based on, by process. Equal numbers in a later
            search mean that no process has moved.
        waits: All waits that cannot end, each with its process.
        certain: Whether one search is conclusive.
    """

    why: str
    notes: tuple[tuple[int, int], ...]
    waits: tuple[tuple[int, Wait], ...]
    certain: bool


def find_deadlock(me: int, wait: Wait) -> Deadlock | None:
    """Return a deadlock that involves this wait, as far as published statuses show."""
    reader = _StatusReader()
    for process in wait.missing[:_READ]:
        status = reader.read(process)
        if status.ended and _is_open(wait, process):
            why = f"process {process} {status} and did not reach {wait.what}"
            return Deadlock(why, ((process, status.number),), ((me, wait),), certain=True)
    if not wait.main:
        return None
    ring = _find_cycle([(me, wait)], reader, set())
    if ring is None:
        return None
    ring = sorted(ring)
    each = (f"process {process} waits at {wait}" for process, wait in ring)
    why = f"{', '.join(each)}: a cycle of waiting processes"
    numbers = tuple((process, reader.read(process).number) for process, _ in ring if process != me)
    return Deadlock(why, numbers, tuple(ring), certain=False)


class _StatusReader:
    """Cache of the statuses read during one search, limited to `_READ` processes."""

    def __init__(self) -> None:
        self._statuses: dict[int, ProcessStatus] = {}

    def read(self, process: int) -> ProcessStatus:
        if process not in self._statuses and len(self._statuses) < _READ:
            self._statuses[process] = read_status(process)
        return self._statuses.get(process, ProcessStatus())


def _find_cycle(
    way: list[tuple[int, Wait]], reader: _StatusReader, seen: set[int]
) -> list[tuple[int, Wait]] | None:
    """Return processes each of which waits for the next one, and the last for the first."""
    wait = way[-1][1]
    passed = [process for process, _ in way]
    for process in wait.missing[:_READ]:
        if process in passed:
            if _is_open(wait, process):
                return way[passed.index(process) :]
        elif process not in seen:
            seen.add(process)
            peer = reader.read(process).main_wait
            if peer and peer.folder != wait.folder and _is_open(wait, process):
                cycle = _find_cycle([*way, (process, peer)], reader, seen)
                if cycle is not None:
                    return cycle
    return None


def _is_open(wait: Wait, process: int) -> bool:
    """Return whether a barrier still waits for a process; a status may be slightly outdated."""
    has_arrived = store.read(f"{wait.folder}/here/{process}") is not None
    return not has_arrived and store.read(f"{wait.folder}/decided") is None


logger = logging.getLogger("xlashard.core.processes")
"""Logs the processes that this process waits for."""

# Seconds before the first log message; doubled after each message.
_FIRST = 10.0
# Number of processes whose status a message includes.
_SHOWN = 4


class WaitReporter:
    """Reports one wait of this thread that lasts longer than a moment.

    Args:
        what: Description of the barrier.
        folder: Folder of the barrier in the store.
        on_wait: Called with the missing processes and the seconds waited so far.
    """

    def __init__(
        self, what: str, folder: str, on_wait: Callable[[tuple[int, ...], float], None] | None
    ) -> None:
        self._what = what
        self._folder = folder
        self._on_wait = on_wait
        self._where = ""
        self._next = _FIRST
        self._suspected: Deadlock | None = None

    def poll(self, missing: tuple[int, ...], seconds: float) -> Deadlock | None:
        """Return a confirmed deadlock, or None. Call this about once a second."""
        if self._on_wait is not None:
            self._on_wait(missing, seconds)
        self._where = self._where or call_site()
        main = threading.current_thread() is threading.main_thread()
        wait = Wait(self._what, self._where, main, self._folder, missing)
        own_status.begin(wait)
        if seconds >= self._next:
            self._next = max(2 * self._next, seconds)
            doing = describe_statuses(missing)
            logger.warning(
                "%s: still waiting for %s (%.0f s)%s",
                self._what,
                format_processes(missing),
                seconds,
                f": {doing}" if doing else "",
            )
        before, deadlock = self._suspected, find_deadlock(coordination.process_index(), wait)
        self._suspected = deadlock
        if deadlock and (deadlock.certain or (before and before.notes == deadlock.notes)):
            return deadlock
        return None

    def done(self) -> None:
        """End the wait."""
        if self._where:
            own_status.finish()


def describe_statuses(processes: tuple[int, ...]) -> str:
    """Describe the published statuses of processes that have not arrived."""
    statuses = [(process, read_status(process)) for process in processes[:_SHOWN]]
    return ", ".join(f"process {process} {status}" for process, status in statuses if status.number)
