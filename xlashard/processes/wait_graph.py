"""Notes that processes leave for those who wait for them: what they wait for, and that they ended.

A process that waits for longer than a moment writes down what for. Whoever waits for it can then
say more than its number, and can tell when waiting is in vain: when it has ended, or waits itself,
through others perhaps, for the one that waits for it.

Threads make that hard to be sure of: a process that waits in one thread may come in another. What
a pod meets for is the same in all processes, and so is the thread that does it. So a main thread
that waits elsewhere is taken for one that doesn't come, and other threads are taken for nothing.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from xlashard._jax import coordination
from xlashard.lazily import dataclass
from xlashard.processes import store
from xlashard.processes.process_groups import format_processes

_PACKAGE = Path(__file__).resolve().parents[1]
# Rooms of this package that call the others as a user does.
_USERS = (str(_PACKAGE / "train"),)
# How many notes one look reads at most, so that a look costs the same in a large pod.
_READ = 64


@dataclass(frozen=True)
class Wait:
    """What a thread waits for.

    Attributes:
        what: In words: `barrier 'epoch'`.
        where: The caller's file and line.
        main: Whether it is the main thread of its process.
        folder: The folder of the meeting in the store.
        missing: The processes that have not come.
    """

    what: str
    where: str
    main: bool
    folder: str
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.what} ({self.where})"


@dataclass(frozen=True)
class ProcessStatus:
    """What a process says of itself.

    Attributes:
        number: Counts its notes.
        waits: What its threads wait for, if for anything.
        ended: How its program ended, in words; empty while it runs.
    """

    number: int = 0
    waits: tuple[Wait, ...] = ()
    ended: str = ""

    def to_bytes(self) -> bytes:
        """As it stands in the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> "ProcessStatus":
        """From what stands in the store."""
        said = json.loads(value)
        waits = tuple(Wait(**{**wait, "missing": tuple(wait["missing"])}) for wait in said["waits"])
        return cls(said["number"], waits, said["ended"])

    @property
    def main_wait(self) -> Wait | None:
        """What the main thread waits for."""
        return next((wait for wait in self.waits if wait.main), None)

    def __str__(self) -> str:
        if self.ended:
            return f"has ended ({self.ended})"
        shown = self.main_wait or next(iter(self.waits), None)
        return f"waits at {shown}" if shown else "waits for no other process"


class StatusPublisher:
    """The note of this process."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._ended = ""
        self._number = 0
        self._lock = threading.Lock()

    @property
    def main_waits(self) -> bool:
        """Whether the main thread waits."""
        return threading.main_thread().ident in self._waits

    def begin(self, wait: Wait) -> None:
        """This thread waits; nothing is written if the note says so already."""
        with self._lock:
            if self._waits.get(threading.get_ident()) == wait:
                return
            self._waits[threading.get_ident()] = wait
            self._write()

    def finish(self) -> None:
        """This thread waits no longer."""
        with self._lock:
            if self._waits.pop(threading.get_ident(), None) is not None:
                self._write()

    def end(self, how: str) -> None:
        """The program has ended."""
        with self._lock:
            self._ended = how
            self._write()

    def _write(self) -> None:
        self._number += 1
        note = ProcessStatus(self._number, tuple(self._waits.values()), self._ended)
        store.write(_key(coordination.process_index()), note.to_bytes(), overwrite=True)


own_status = StatusPublisher()
"""The note of this process."""


def read_status(process: int) -> ProcessStatus:
    """What a process says of itself; an empty note if it has said nothing."""
    value = store.read(_key(process))
    return ProcessStatus() if value is None else ProcessStatus.from_bytes(value)


def _key(process: int) -> str:
    return f"doing/{process}"


def call_site() -> str:
    """File and line of the call into this package, for example `train.py:40`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_package_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_package_file(filename: str) -> bool:
    """Whether a file is of the part of this package that a user's program calls."""
    return filename.startswith(str(_PACKAGE)) and not filename.startswith(_USERS)


@dataclass(frozen=True)
class Deadlock:
    """Why waiting is in vain.

    Attributes:
        why: In words, the same ones whoever finds it.
        notes: The numbers of the notes that say so, by process. If they are the same at a later
            look, nothing has moved since.
        waits: All waits that are in vain, with the process that waits.
        certain: Whether one look is enough.
    """

    why: str
    notes: tuple[tuple[int, int], ...]
    waits: tuple[tuple[int, Wait], ...]
    certain: bool


def find_deadlock(me: int, wait: Wait) -> Deadlock | None:
    """Whether someone who is waited for can't come any more, as far as notes tell."""
    reader = _StatusReader()
    for process in wait.missing[:_READ]:
        note = reader.read(process)
        if note.ended and _is_open(wait, process):
            why = f"process {process} {note} and did not come to {wait.what}"
            return Deadlock(why, ((process, note.number),), ((me, wait),), certain=True)
    if not wait.main:
        return None
    ring = _find_cycle([(me, wait)], reader, set())
    if ring is None:
        return None
    ring = sorted(ring)
    each = (f"process {process} waits at {wait}" for process, wait in ring)
    why = f"{', '.join(each)}: each of them for another"
    numbers = tuple((process, reader.read(process).number) for process, _ in ring if process != me)
    return Deadlock(why, numbers, tuple(ring), certain=False)


class _StatusReader:
    """Notes, each read once, and not too many."""

    def __init__(self) -> None:
        self._notes: dict[int, ProcessStatus] = {}

    def read(self, process: int) -> ProcessStatus:
        if process not in self._notes and len(self._notes) < _READ:
            self._notes[process] = read_status(process)
        return self._notes.get(process, ProcessStatus())


def _find_cycle(
    way: list[tuple[int, Wait]], reader: _StatusReader, seen: set[int]
) -> list[tuple[int, Wait]] | None:
    """Processes of which each waits for the next, and the last for the first."""
    wait = way[-1][1]
    passed = [process for process, _ in way]
    for process in wait.missing[:_READ]:
        if process in passed:
            if _is_open(wait, process):
                return way[passed.index(process) :]
            continue
        if process in seen:
            continue
        seen.add(process)
        theirs = reader.read(process).main_wait
        if theirs is None or theirs.folder == wait.folder or not _is_open(wait, process):
            continue
        found = _find_cycle([*way, (process, theirs)], reader, seen)
        if found is not None:
            return found
    return None


def _is_open(wait: Wait, process: int) -> bool:
    """Whether a meeting still waits for a process; a note may be a moment behind."""
    here = store.read(f"{wait.folder}/here/{process}") is not None
    return not here and store.read(f"{wait.folder}/decided") is None


logger = logging.getLogger("xlashard.processes")
"""Says whom this process waits for."""

# Seconds after which it is said: twice as long each time.
_FIRST = 10.0
# Whose doing a message tells.
_SHOWN = 4


class WaitReporter:
    """One wait of this thread, from when it takes longer than a moment.

    Args:
        what: What is waited for, in words.
        folder: The folder of the meeting.
        told: Is told, too, who is missing and for how many seconds.
    """

    def __init__(
        self, what: str, folder: str, told: Callable[[tuple[int, ...], float], None] | None
    ) -> None:
        self._what = what
        self._folder = folder
        self._told = told
        self._where = ""
        self._next = _FIRST
        self._suspected: Deadlock | None = None

    def look(self, missing: tuple[int, ...], seconds: float) -> Deadlock | None:
        """To be called about once a second. Whether waiting on is in vain."""
        if self._told is not None:
            self._told(missing, seconds)
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
        before, self._suspected = self._suspected, find_deadlock(coordination.process_index(), wait)
        found = self._suspected
        if found is not None and (found.certain or (before and before.notes == found.notes)):
            return found
        return None

    def done(self) -> None:
        """The waiting is over."""
        if self._where:
            own_status.finish()


def describe_statuses(processes: tuple[int, ...]) -> str:
    """What some processes do instead of coming, as far as they say."""
    told = [(process, read_status(process)) for process in processes[:_SHOWN]]
    return ", ".join(f"process {process} {note}" for process, note in told if note.number)
