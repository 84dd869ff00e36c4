"""Barriers in the key-value store, before operations that all processes must perform.

A collective that one process does not join blocks the others forever. Processes therefore meet at a
barrier first. The outcome of a barrier is a single key, written once: the first writer wins, so
every process sees the same outcome, even if it arrives late or times out early.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from xlashard._jax.runtime import coordination
from xlashard.core.processes import store
from xlashard.core.processes.wait_graph import (
    Deadlock,
    WaitReporter,
    call_site,
    describe_statuses,
    own_status,
)
from xlashard.errors import ArgumentError, DeadlockError
from xlashard.support.formatting import format_processes
from xlashard.support.lazily import dataclass

# Extra seconds for the processes that wait for the first one: it determines who is missing.
_LONGER = 2.0
# Poll interval, in seconds.
_LOOK = 1.0


class BarrierTimeoutError(Exception):
    """Some processes did not reach a barrier in time.

    Attributes:
        processes: Indices of the missing processes.
        doing: Published statuses of the missing processes; may be empty.
    """

    def __init__(self, processes: Sequence[int], doing: str = "") -> None:
        super().__init__(f"{format_processes(processes)} did not come")
        self.processes = tuple(processes)
        self.doing = doing

    def missing(self, missed: str, count: int = 0) -> str:
        """Name the missing processes, what they missed, and what they do where it is known.

        Args:
            missed: What they missed, such as `did not arrive`.
            count: Number of processes that the barrier waits for; 0 leaves it out.
        """
        total = f" of {count}" if count else ""
        doing = f" ({self.doing})" if self.doing else ""
        return f"{format_processes(self.processes)}{total} {missed}{doing}"

    def after(self, seconds: float, count: int) -> str:
        """Describe the timeout of a function that all processes must call.

        Args:
            seconds: How long this process waited.
            count: Number of processes that must call the function.

        Example:
            >>> BarrierTimeoutError([3, 7]).after(5, 8)
            'waited 5 s, and processes 3, 7 of 8 did not call it'
        """
        return f"waited {seconds:g} s, and {self.missing('did not call it', count)}"


# Largest timeout in seconds; system clocks reject larger ones.
_FOR_EVER = 1e9


@dataclass(frozen=True)
class Barrier:
    """Participants and timeout of a barrier.

    Attributes:
        processes: Indices of the participants, including this process.
        series: Barriers are numbered per series and group of processes. All processes of a group
            must reach the barriers of one series in the same order.
        timeout: How long to wait, in seconds.
        waiting: Called about once a second with the missing processes and the seconds waited so
            far. An exception that it raises ends the barrier for all processes.
        what: Name of the operation in messages; the series if empty.

    Raises:
        ArgumentError: The timeout is not a finite number of seconds.
    """

    processes: tuple[int, ...]
    series: str
    timeout: float
    waiting: Callable[[tuple[int, ...], float], None] | None = None
    what: str = ""

    def __post_init__(self) -> None:
        checked_seconds(self.timeout, f"{self.what or self.series}: timeout")


def processes_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """Return the sorted process indices that own the given devices."""
    return tuple(sorted({device.process_index for device in devices}))


def checked_seconds(value: object, name: str) -> float:
    """Validate a time in seconds that the user passed.

    Args:
        value: The user's value.
        name: Function and argument, for the error message: `initialize: timeout`.

    Raises:
        ArgumentError: The value is not a finite number >= 0.
    """
    number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not number or not 0 <= value < _FOR_EVER:
        shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
        raise ArgumentError(
            f"{name} must be a number of seconds from 0 to {_FOR_EVER:.0e}, not {shown:.60}: write "
            f"{name.rpartition(' ')[2]}=600"
        )
    return float(value)


class Rendezvous:
    """Barriers of this process, numbered per series and group."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, tuple[int, ...]], int] = {}
        self._locks: dict[tuple[str, tuple[int, ...]], threading.Lock] = {}
        self._lock = threading.Lock()

    def exchange(self, barrier: Barrier, subject: str) -> dict[int, str]:
        """Wait until all processes have arrived; return the text of each process.

        Returns immediately if the barrier has fewer than two participants, or the program has one
        process.

        Args:
            barrier: The barrier to wait at.
            subject: Text that this process contributes.

        Raises:
            BarrierTimeoutError: Some processes did not arrive in time. A process that arrives later
                raises the same error.
            DeadlockError: Some processes can no longer arrive: they have ended, or wait elsewhere
                for processes that wait here. Every waiting process raises it within seconds.
        """
        group = tuple(sorted(set(barrier.processes)))
        me = coordination.process_index()
        if coordination.client() is None or len(group) < 2:
            return {me: subject}
        own_status.end_at_exit()
        end = time.monotonic() + barrier.timeout
        key = barrier.series, group
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        what = barrier.what or barrier.series
        with own_status.in_collective(what, call_site()), lock:
            while True:
                number = self._held[key] = self._held.get(key, 0) + 1
                outcome = _BarrierRound(barrier, group, number, subject).outcome(end)
                # The others gave up on this barrier without this process, and have moved on.
                if not isinstance(outcome, _Incomplete) or me not in outcome.processes:
                    break
        if not isinstance(outcome, _Incomplete):
            return outcome
        if outcome.why:
            raise DeadlockError(  # no-catalogue: needs several processes
                f"{what} cannot complete: {outcome.why}", processes=outcome.processes
            )
        # no-catalogue: needs several processes
        raise BarrierTimeoutError(outcome.processes, describe_statuses(outcome.processes))


@dataclass(frozen=True)
class _Incomplete:
    """Outcome of a barrier that not all processes reached.

    Attributes:
        processes: The missing processes.
        why: Reason why they can no longer arrive; empty after a plain timeout.
    """

    processes: tuple[int, ...]
    why: str = ""


type _Outcome = dict[int, str] | _Incomplete
"""Text of each process, or the missing processes."""


class _BarrierRound:
    """One barrier, as seen by one of its processes."""

    def __init__(self, barrier: Barrier, group: tuple[int, ...], number: int, subject: str) -> None:
        self._group = group
        self._series = f"meetings/{barrier.series}/{_group_name(group)}"
        self._number = number
        self._folder = f"{self._series}/{number}"
        self._subject = subject
        self._reporter = WaitReporter(barrier.what or barrier.series, self._folder, barrier.waiting)
        self._began = time.monotonic()

    def outcome(self, end: float) -> _Outcome:
        """Return the outcome of the barrier."""
        decided = self._decided(0)
        if decided is not None:
            return decided
        store.write(f"{self._folder}/here/{coordination.process_index()}", self._subject.encode())
        try:
            return self._wait(end)
        except BaseException:
            # This process leaves the barrier, so it must not count as present.
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
            vain = self._report(self._missing(self._here()))
            if vain is not None:
                return self._decide(vain)
        return self._decide(self._collect(0))

    def _collect(self, end: float) -> _Outcome:
        present = self._here()
        missing = self._missing(present)
        for seconds in self._intervals(end):
            if not missing:
                break
            value = store.read(f"{self._folder}/here/{missing[0]}", seconds)
            # Other processes may have arrived in the meantime.
            present = self._here()
            missing = self._missing(present)
            vain = None if value is not None else self._decided(0) or self._report(missing)
            if vain is not None:
                return vain
        if missing:
            return _Incomplete(missing)
        # All are present, so no process reads the previous barrier again.
        if self._number > 1:
            store.drop(f"{self._series}/{self._number - 1}")
        return {process: present[str(process)].decode() for process in self._group}

    def _intervals(self, end: float) -> Iterator[float]:
        """Yield the timeout of each poll until the end."""
        while (left := end - time.monotonic()) > 0:
            yield min(left, _LOOK)

    def _here(self) -> dict[str, bytes]:
        return store.listed(f"{self._folder}/here")

    def _missing(self, present: dict[str, bytes]) -> tuple[int, ...]:
        return tuple(process for process in self._group if str(process) not in present)

    def _report(self, missing: tuple[int, ...]) -> _Incomplete | None:
        """Report the missing processes; return an outcome if they can no longer arrive."""
        if not missing:
            return None
        vain = self._reporter.poll(missing, time.monotonic() - self._began)
        if vain is None:
            return None
        self._release_others(vain)
        return _Incomplete(missing, vain.why)

    def _release_others(self, vain: Deadlock) -> None:
        """Decide the deadlock's other barriers, so that every process raises the same error."""
        for _, wait in vain.waits:
            if wait.folder != self._folder:
                outcome = _Incomplete(wait.missing, vain.why)
                store.write(f"{wait.folder}/decided", _to_bytes(outcome))

    def _decide(self, outcome: _Outcome) -> _Outcome:
        """Write the outcome, unless another process was faster; return the one that counts."""
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
    # Usually all texts are equal; then one copy is stored instead of one per process.
    same = len(set(subjects)) == 1
    return json.dumps({"same": subjects[0]} if same else {"came": subjects}).encode()


def _from_bytes(value: bytes, group: tuple[int, ...]) -> _Outcome:
    fields = json.loads(value)
    if "missing" in fields:
        return _Incomplete(tuple(fields["missing"]), fields["why"])
    subjects = [fields["same"]] * len(group) if "same" in fields else fields["came"]
    return dict(zip(group, subjects, strict=True))


def _group_name(group: tuple[int, ...]) -> str:
    """Return a short key for a group, also in a large pod."""
    if group == tuple(range(coordination.process_count())):
        return "all"
    text = "-".join(map(str, group))
    return text if len(text) <= 40 else sha256(text.encode()).hexdigest()[:40]


RENDEZVOUS = Rendezvous()
"""Barriers of this process."""
