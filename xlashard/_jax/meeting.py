"""Agreeing with other processes before something that they must all do together.

A collective that one process doesn't join waits for ever. So those who want one meet first, in the
key-value store of JAX's coordination service. Whatever comes of a meeting is one value, written
once: the service lets only the first writer have a key, so that all see the same outcome, whoever
comes late or gives up early.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import distributed

_FOLDER = "xlashard/meetings"

# Processes that wait for the first one's word wait longer than it does: it knows who is missing.
_LONGER = 2.0


class MissedError(Exception):
    """Processes that did not come to a meeting.

    Attributes:
        processes: Their indices.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        super().__init__(f"processes {list(processes)} did not come")
        self.processes = tuple(processes)


class DisagreedError(Exception):
    """Processes that came for something else.

    Attributes:
        subjects: By process what it came for.
    """

    def __init__(self, subjects: dict[int, str]) -> None:
        super().__init__(f"they came for {subjects}")
        self.subjects = subjects


class Meetings:
    """The meetings of this process, numbered for each group of processes that meet."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()

    def meet(self, processes: Sequence[int], subject: str, timeout: float) -> None:
        """Returns when all these processes are here for the same thing.

        Args:
            processes: The indices of those that must come, this one among them.
            subject: What for.
            timeout: How long to wait, in seconds.

        Raises:
            MissedError: Some didn't come in time. They will find out, should they come later.
            DisagreedError: Some came for something else.
        """
        group = tuple(sorted(processes))
        client = distributed.global_state.client
        if client is None or len(group) < 2:
            return
        end = time.monotonic() + timeout
        with self._lock:
            while True:
                number = self._held[group] = self._held.get(group, 0) + 1
                outcome = _Meeting(client, group, number, subject).outcome(end)
                # The others gave this meeting up without this process, and are further by now.
                if jax.process_index() not in _missing(outcome):
                    break
        if missing := _missing(outcome):
            raise MissedError(missing)
        came = dict(zip(group, outcome.split("\n"), strict=True))
        if len(set(came.values())) > 1:
            raise DisagreedError(came)


def _missing(outcome: str) -> list[int]:
    head, _, listed = outcome.partition("missing:")
    return [] if head else [int(number) for number in listed.split(",") if number]


class _Meeting:
    """One meeting as one of its processes sees it.

    Args:
        client: Of the coordination service.
        group: The processes.
        number: Of the meeting, counted by the group.
        subject: What this process comes for.
    """

    def __init__(self, client: Any, group: tuple[int, ...], number: int, subject: str) -> None:
        self._client = client
        self._group = group
        self._folder = f"{_FOLDER}/{'-'.join(map(str, group))}"
        self._number = number
        self._subject = subject.replace("\n", " ")

    def outcome(self, end: float) -> str:
        """What came of it: what each process came for, or who was missing."""
        me, first = jax.process_index(), self._group[0]
        decided = self._read("decided", 0)
        if decided is not None:
            return decided
        self._write(f"here/{me}", self._subject)
        if me == first:
            return self._decide(self._collect(end))
        left = end + _LONGER - time.monotonic()
        return self._read("decided", left) or self._decide(self._collect(0))

    def _collect(self, end: float) -> str:
        found = {
            process: self._read(f"here/{process}", end - time.monotonic())
            for process in self._group
        }
        missing = [process for process, subject in found.items() if subject is None]
        if missing:
            return f"missing:{','.join(map(str, missing))}"
        # All are here, so nobody will ask for the meeting before this one again.
        self._client.key_value_delete(f"{self._folder}/{self._number - 1}")
        return "\n".join(str(subject) for subject in found.values())

    def _decide(self, outcome: str) -> str:
        """The outcome that counts: this one, unless another process was faster."""
        if self._write("decided", outcome):
            return outcome
        return self._read("decided", _LONGER) or outcome

    def _key(self, name: str) -> str:
        return f"{self._folder}/{self._number}/{name}"

    def _write(self, name: str, value: str) -> bool:
        try:
            self._client.key_value_set(self._key(name), value or " ")
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def _read(self, name: str, seconds: float) -> str | None:
        try:
            if seconds <= 0:
                return self._client.key_value_try_get(self._key(name))
            return self._client.blocking_key_value_get(self._key(name), int(seconds * 1000) + 1)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise


meetings = Meetings()
"""The meetings of this process."""
