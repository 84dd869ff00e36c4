"""Coming together with other processes before something that they must all do.

A collective that one process doesn't join waits for ever. So those who want one meet first, in the
key-value store. Whatever comes of a meeting is one value, written once: the first writer has the
key, so that all see the same outcome, whoever comes late or gives up early.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

import numpy as np

from xlashard._jax import coordination
from xlashard.errors import ArgumentError, DeadlockError
from xlashard.lazily import dataclass
from xlashard.processes import store
from xlashard.processes.process_groups import format_processes
from xlashard.processes.wait_graph import Deadlock, WaitReporter, describe_statuses

# Processes that wait for the first one's word wait longer than it does: it knows who is missing.
_LONGER = 2.0
# Seconds between two looks at who is still missing.
_LOOK = 1.0


class BarrierTimeoutError(Exception):
    """Processes that did not come to a meeting.

    Attributes:
        processes: Their indices.
        doing: What they do instead, as far as they say; may be empty.
    """

    def __init__(self, processes: Sequence[int], doing: str = "") -> None:
        super().__init__(f"{format_processes(processes)} did not come")
        self.processes = tuple(processes)
        self.doing = doing

    def after(self, seconds: float, count: int) -> str:
        """For those who call something together, whom one that called it has waited for.

        Args:
            seconds: How long it has waited.
            count: How many were to call it.

        Example:
            >>> BarrierTimeoutError([3, 7]).after(5, 8)
            'waited 5 s, and processes 3, 7 of 8 did not call it'
        """
        doing = f" ({self.doing})" if self.doing else ""
        who = f"{format_processes(self.processes)} of {count}"
        return f"waited {seconds:g} s, and {who} did not call it{doing}"


# Seconds at most; more than that the system's clocks don't take.
_FOR_EVER = 1e9


@dataclass(frozen=True)
class Barrier:
    """Who is to meet, and for how long they wait for each other.

    Attributes:
        processes: The indices of those that must come, this one among them.
        series: Meetings are numbered for each series and group of processes. All of a group must
            come to the meetings of one series in the same order.
        timeout: How long to wait, in seconds.
        waiting: Is told about once a second who is still missing, and for how many seconds they
            have been waited for. It may raise, which ends the meeting for all.
        what: What they meet for, as messages call it; the series if empty.

    Raises:
        ArgumentError: The timeout is no time.
    """

    processes: tuple[int, ...]
    series: str
    timeout: float
    waiting: Callable[[tuple[int, ...], float], None] | None = None
    what: str = ""

    def __post_init__(self) -> None:
        checked_seconds(self.timeout, f"{self.what or self.series}: timeout")


def checked_seconds(value: object, name: str) -> float:
    """Return a time that a user wrote, in seconds.

    Args:
        value: What the user wrote.
        name: The function and the argument, for the error.

    Raises:
        ArgumentError: The value is no finite number from 0 on.
    """
    number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not number or not 0 <= value < _FOR_EVER:
        shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
        raise ArgumentError(
            f"{name} must be a number of seconds from 0 to {_FOR_EVER:.0e}, not {shown:.60}: write "
            "timeout=600"
        )
    return float(value)


class Rendezvous:
    """The meetings of this process."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, tuple[int, ...]], int] = {}
        self._locks: dict[tuple[str, tuple[int, ...]], threading.Lock] = {}
        self._lock = threading.Lock()

    def exchange(self, barrier: Barrier, subject: str) -> dict[int, str]:
        """Returns when all are here: by process what it came for.

        Where fewer than two processes are to come, or there is only one, nothing is waited for.

        Args:
            barrier: The barrier to wait at.
            subject: What this process comes for.

        Raises:
            BarrierTimeoutError: Some processes did not arrive in time. A process that arrives later
                raises the same error.
            DeadlockError: Some can't come any more: they have ended, or wait elsewhere for those
                who wait here. All who wait raise it, within seconds.
        """
        group = tuple(sorted(set(barrier.processes)))
        me = coordination.process_index()
        if coordination.client() is None or len(group) < 2:
            return {me: subject}
        end = time.monotonic() + barrier.timeout
        key = barrier.series, group
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            while True:
                number = self._held[key] = self._held.get(key, 0) + 1
                outcome = _BarrierRound(barrier, group, number, subject).outcome(end)
                # The others gave this meeting up without this process, and are further by now.
                if not isinstance(outcome, _Incomplete) or me not in outcome.processes:
                    break
        if not isinstance(outcome, _Incomplete):
            return outcome
        if outcome.why:
            what = barrier.what or barrier.series
            raise DeadlockError(  # no-catalogue: needs several processes
                f"{what} can't come about: {outcome.why}", processes=outcome.processes
            )
        # no-catalogue: needs several processes
        raise BarrierTimeoutError(outcome.processes, describe_statuses(outcome.processes))


@dataclass(frozen=True)
class _Incomplete:
    """A meeting that did not come about.

    Attributes:
        processes: Who was missing.
        why: Why they can't come any more; empty if there was only no more time.
    """

    processes: tuple[int, ...]
    why: str = ""


type _Outcome = dict[int, str] | _Incomplete
"""What each came for, or who was missing."""


class _BarrierRound:
    """One meeting as one of its processes sees it."""

    def __init__(self, barrier: Barrier, group: tuple[int, ...], number: int, subject: str) -> None:
        self._group = group
        self._series = f"meetings/{barrier.series}/{_group_name(group)}"
        self._number = number
        self._folder = f"{self._series}/{number}"
        self._subject = subject
        self._reporter = WaitReporter(barrier.what or barrier.series, self._folder, barrier.waiting)
        self._began = time.monotonic()

    def outcome(self, end: float) -> _Outcome:
        """What came of it."""
        decided = self._decided(0)
        if decided is not None:
            return decided
        store.write(f"{self._folder}/here/{coordination.process_index()}", self._subject.encode())
        try:
            return self._wait(end)
        except BaseException:
            # This process goes elsewhere now: nobody shall take it for one that is here.
            self._decide(_Incomplete((coordination.process_index(),)))
            raise
        finally:
            self._reporter.done()

    def _wait(self, end: float) -> _Outcome:
        if coordination.process_index() == self._group[0]:
            return self._decide(self._collect(end))
        for seconds in self._intervals(end + _LONGER):
            decided = self._decided(seconds)
            if decided is not None:
                return decided
            vain = self._report(self._missing(store.listed(f"{self._folder}/here")))
            if vain is not None:
                return self._decide(vain)
        return self._decide(self._collect(0))

    def _collect(self, end: float) -> _Outcome:
        here = store.listed(f"{self._folder}/here")
        missing = self._missing(here)
        for seconds in self._intervals(end):
            if not missing:
                break
            came = store.read(f"{self._folder}/here/{missing[0]}", seconds)
            # Others may have come while that one was waited for.
            here = store.listed(f"{self._folder}/here")
            missing = self._missing(here)
            if came is None:
                vain = self._decided(0) or self._report(missing)
                if vain is not None:
                    return vain
        if missing:
            return _Incomplete(missing)
        # All are here, so nobody will ask for the meeting before this one again.
        if self._number > 1:
            store.drop(f"{self._series}/{self._number - 1}")
        return {process: here[str(process)].decode() for process in self._group}

    def _intervals(self, end: float) -> Iterator[float]:
        """How long to wait for the next look, until the end."""
        while (left := end - time.monotonic()) > 0:
            yield min(left, _LOOK)

    def _missing(self, here: dict[str, bytes]) -> tuple[int, ...]:
        return tuple(process for process in self._group if str(process) not in here)

    def _report(self, missing: tuple[int, ...]) -> _Incomplete | None:
        """Says who is missing. The outcome, where they can't come any more."""
        if not missing:
            return None
        vain = self._reporter.look(missing, time.monotonic() - self._began)
        if vain is None:
            return None
        self._release_others(vain)
        return _Incomplete(missing, vain.why)

    def _release_others(self, vain: Deadlock) -> None:
        """Ends the other meetings that wait in vain, so that all see the same error."""
        for _, wait in vain.waits:
            if wait.folder != self._folder:
                outcome = _Incomplete(wait.missing, vain.why)
                store.write(f"{wait.folder}/decided", _to_bytes(outcome))

    def _decide(self, outcome: _Outcome) -> _Outcome:
        """The outcome that counts: this one, unless another process was faster."""
        if store.write(f"{self._folder}/decided", _to_bytes(outcome)):
            return outcome
        return self._decided(_LONGER) or outcome

    def _decided(self, seconds: float) -> _Outcome | None:
        value = store.read(f"{self._folder}/decided", seconds)
        return None if value is None else _from_bytes(value, self._group)


def _to_bytes(outcome: _Outcome) -> bytes:
    if isinstance(outcome, _Incomplete):
        return json.dumps({"missing": outcome.processes, "why": outcome.why}).encode()
    subjects = list(outcome.values())
    # Most often all come for the same, which then goes to everybody once and not by process.
    same = len(set(subjects)) == 1
    return json.dumps({"same": subjects[0]} if same else {"came": subjects}).encode()


def _from_bytes(value: bytes, group: tuple[int, ...]) -> _Outcome:
    said = json.loads(value)
    if "missing" in said:
        return _Incomplete(tuple(said["missing"]), said["why"])
    subjects = [said["same"]] * len(group) if "same" in said else said["came"]
    return dict(zip(group, subjects, strict=True))


def _group_name(group: tuple[int, ...]) -> str:
    """A group in a key, short also in a large pod."""
    if group == tuple(range(coordination.process_count())):
        return "all"
    text = "-".join(map(str, group))
    return text if len(text) <= 40 else sha256(text.encode()).hexdigest()[:40]


RENDEZVOUS = Rendezvous()
"""The meetings of this process."""
