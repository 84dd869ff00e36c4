"""Calls that all processes make together: each says what it came with before anything is sent.

A call that one process leaves out, or makes with another tree, would let the others wait for ever.
So they meet first, and all of them are told what is wrong.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from xlashard._jax import coordination
from xlashard.errors import ProcessesError, XlashardError
from xlashard.lazily import dataclass
from xlashard.multihost.leaves import HostLeaf
from xlashard.processes import (
    RENDEZVOUS,
    Barrier,
    BarrierTimeoutError,
    NamedValue,
    ValueDifference,
    checked_seconds,
    differences,
    format_by_process,
    format_processes,
)

SERIES = "multihost"
"""The meetings of all these functions: one of them called in the place of another is noticed."""

# For how long others are waited for, to be told that this process can't go on.
_REFUSAL_SECONDS = 30.0


def can_meet() -> bool:
    """Whether there is a store to meet in: TPU hosts may work together without one."""
    return coordination.client() is not None


@dataclass(frozen=True)
class Contribution:
    """What a process came with.

    Attributes:
        digest: Of what must be the same in all.
        note: What need not be.
        data: The values themselves, where they are small.
    """

    digest: str
    note: str = ""
    data: bytes = b""


@dataclass(frozen=True)
class CollectiveCall:
    """A function that all processes call together.

    Attributes:
        name: The function, and what of its arguments must be the same, as a person writes it.
        timeout: How long to wait for the other processes, in seconds.
        processes: Who calls it; all, if not given.
        series: The series of meetings. Calls of one are made in one order.
    """

    name: str
    timeout: float
    processes: tuple[int, ...] | None = None
    series: str = SERIES

    def __post_init__(self) -> None:
        checked_seconds(self.timeout, f"{self.name}: timeout")

    @property
    def barrier(self) -> Barrier:
        """Who comes."""
        all_processes = tuple(range(jax.process_count()))
        group = self.processes or all_processes
        return Barrier(group, self.series, self.timeout, what=self.name)

    def exchange(self, mine: Contribution) -> dict[int, Contribution]:
        """Meets the others; gives by process what it came with.

        Raises:
            ProcessesError: Some did not come, or came for another call, or with something that
                can't be exchanged.
        """
        said = {
            "call": self.name,
            "digest": mine.digest,
            "note": mine.note,
            "data": base64.b64encode(mine.data).decode(),
        }
        everyone = self._meet(said)
        return {
            process: Contribution(they["digest"], they["note"], base64.b64decode(they["data"]))
            for process, they in everyone.items()
        }

    @contextmanager
    def abort_together(self) -> Iterator[None]:
        """A block whose error the others are told as well, before it is raised here."""
        try:
            yield
        except XlashardError as error:
            if can_meet() and jax.process_count() > 1:
                try:
                    self._refuse(str(error))
                except ProcessesError as others:
                    error.add_note(str(others))
            raise

    def _refuse(self, reason: str) -> None:
        brief = replace(self, timeout=min(self.timeout, _REFUSAL_SECONDS))
        brief._meet({"call": self.name, "refused": reason})

    def _meet(self, said: dict[str, Any]) -> dict[int, dict[str, Any]]:
        with self._timeout_as_error():
            came = RENDEZVOUS.exchange(self.barrier, json.dumps(said))
        everyone = {process: json.loads(text) for process, text in came.items()}
        if "refused" not in said:
            self._check_calls(everyone)
        return everyone

    def differences(self, values: Sequence[NamedValue]) -> tuple[ValueDifference, ...]:
        """What of some values is not the same in all processes, and where.

        Raises:
            ProcessesError: Some processes did not come.
        """
        with self._timeout_as_error():
            return differences(self.barrier, values)

    @contextmanager
    def _timeout_as_error(self) -> Iterator[None]:
        """A block in which processes meet, and that says who did not come."""
        try:
            yield
        except BarrierTimeoutError as error:
            waited = error.after(self.timeout, len(self.barrier.processes))
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{self.name} {waited}; every process must, in the same order",
                processes=error.processes,
            ) from None

    def _check_calls(self, everyone: dict[int, dict[str, Any]]) -> None:
        calls = {process: they["call"] for process, they in everyone.items()}
        if len(set(calls.values())) > 1:
            raise ProcessesError(  # no-catalogue: needs several processes
                f"processes called different functions at the same time: "
                f"{format_by_process(calls)}; "
                "let all make the same calls in the same order, none under a condition on the "
                "process",
                processes=tuple(calls),
            )
        refused = {p: they["refused"] for p, they in everyone.items() if "refused" in they}
        if refused:
            first, reason = next(iter(refused.items()))
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{self.name} failed in {format_processes(tuple(refused))}: process {first} says: "
                f"{reason}",
                processes=tuple(refused),
            )

    def check_same_types(
        self, came: dict[int, Contribution], types: Sequence[tuple[str, str]]
    ) -> None:
        """Checks that all came with the same leaves.

        Args:
            came: What each came with; the digests are of paths and types.
            types: By path what must be the same, in words.

        Raises:
            ProcessesError: They differ, by path and process.
        """
        if len({they.digest for they in came.values()}) < 2:
            return
        blank = np.empty(0, np.uint8)
        mine = [_Typed(path, blank, said) for path, said in types]
        found = self.differences(mine)
        listed = "; ".join(f"{d.path}: {d.text}" for d in found)
        raise ProcessesError(  # no-catalogue: needs several processes
            f"{self.name} was called with different trees: {listed}; all processes must give the "
            "same leaves with the same dtypes and shapes: pad them to one shape first",
            processes=tuple(sorted({p for d in found for p in d.processes})),
        )


class _Typed(NamedValue):
    """A leaf of which only the type must be the same."""

    def listed(self) -> tuple[str, str, str, str]:
        """What is told to the others."""
        return self.path, self.also, "", ""


def digest_of(types: Sequence[tuple[str, str]]) -> str:
    """A sum of paths and types of leaves."""
    return hashlib.sha256(json.dumps(types).encode()).hexdigest()[:32]


def leaf_types(leaves: Sequence[HostLeaf]) -> list[tuple[str, str]]:
    """The paths of leaves, and what must be the same of each."""
    return [(leaf.path, leaf.type) for leaf in leaves]
