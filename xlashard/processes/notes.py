"""Notes that processes leave for those who wait for them: what they wait for, and that they ended.

A process that waits for longer than a moment writes down what for. Whoever waits for it can then
say more than its number, and can tell when waiting is in vain: when it has ended, or waits itself,
through others perhaps, for the one that waits for it.

Threads make that hard to be sure of: a process that waits in one thread may come in another. What
a pod meets for is the same in all processes, and so is the thread that does it. So a main thread
that waits elsewhere is taken for one that doesn't come, and other threads are taken for nothing.
"""

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from xlashard._jax import coordination
from xlashard.lazily import dataclass
from xlashard.processes import store

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
class Note:
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
    def from_bytes(cls, value: bytes) -> "Note":
        """From what stands in the store."""
        said = json.loads(value)
        waits = tuple(Wait(**{**wait, "missing": tuple(wait["missing"])}) for wait in said["waits"])
        return cls(said["number"], waits, said["ended"])

    @property
    def wait_of_main(self) -> Wait | None:
        """What the main thread waits for."""
        return next((wait for wait in self.waits if wait.main), None)

    def __str__(self) -> str:
        if self.ended:
            return f"has ended ({self.ended})"
        shown = self.wait_of_main or next(iter(self.waits), None)
        return f"waits at {shown}" if shown else "waits for no other process"


class OwnNote:
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
        note = Note(self._number, tuple(self._waits.values()), self._ended)
        store.write(_key(coordination.process_index()), note.to_bytes(), overwrite=True)


own_note = OwnNote()
"""The note of this process."""


def read_note(process: int) -> Note:
    """What a process says of itself; an empty note if it has said nothing."""
    value = store.read(_key(process))
    return Note() if value is None else Note.from_bytes(value)


def _key(process: int) -> str:
    return f"doing/{process}"


def caller() -> str:
    """File and line of the call into this package, for example `train.py:40`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_inner(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_inner(filename: str) -> bool:
    """Whether a file is of the part of this package that a user's program calls."""
    return filename.startswith(str(_PACKAGE)) and not filename.startswith(_USERS)


@dataclass(frozen=True)
class InVain:
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


def in_vain(me: int, wait: Wait) -> InVain | None:
    """Whether someone who is waited for can't come any more, as far as notes tell."""
    reader = _Reader()
    for process in wait.missing[:_READ]:
        note = reader.read(process)
        if note.ended and _is_open(wait, process):
            why = f"process {process} {note} and did not come to {wait.what}"
            return InVain(why, ((process, note.number),), ((me, wait),), certain=True)
    if not wait.main:
        return None
    ring = _ring([(me, wait)], reader, set())
    if ring is None:
        return None
    ring = sorted(ring)
    each = (f"process {process} waits at {wait}" for process, wait in ring)
    why = f"{', '.join(each)}: each of them for another"
    numbers = tuple((process, reader.read(process).number) for process, _ in ring if process != me)
    return InVain(why, numbers, tuple(ring), certain=False)


class _Reader:
    """Notes, each read once, and not too many."""

    def __init__(self) -> None:
        self._notes: dict[int, Note] = {}

    def read(self, process: int) -> Note:
        if process not in self._notes and len(self._notes) < _READ:
            self._notes[process] = read_note(process)
        return self._notes.get(process, Note())


def _ring(
    way: list[tuple[int, Wait]], reader: _Reader, seen: set[int]
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
        theirs = reader.read(process).wait_of_main
        if theirs is None or theirs.folder == wait.folder or not _is_open(wait, process):
            continue
        found = _ring([*way, (process, theirs)], reader, seen)
        if found is not None:
            return found
    return None


def _is_open(wait: Wait, process: int) -> bool:
    """Whether a meeting still waits for a process; a note may be a moment behind."""
    here = store.read(f"{wait.folder}/here/{process}") is not None
    return not here and store.read(f"{wait.folder}/decided") is None
