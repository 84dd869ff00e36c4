"""Agreement on a call that all processes make together, before any data is sent.

If one process skips a call or passes a different tree, the others would wait forever. Processes
therefore exchange a description of the call first, and all of them raise the same error.
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

from xlashard._jax.runtime import coordination
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
"""Barrier series shared by all these functions, so that mismatched calls are detected."""

# Seconds to wait for the peers when this process aborts the call.
_REFUSAL_SECONDS = 30.0


def can_meet() -> bool:
    """Return whether there is a key-value store; TPU hosts can run collectives without one."""
    return coordination.client() is not None


@dataclass(frozen=True)
class Contribution:
    """Data that one process contributes to a call.

    Attributes:
        digest: Digest of everything that must be equal in all processes.
        note: Text that may differ.
        data: The values themselves, if they are small.
    """

    digest: str
    note: str = ""
    data: bytes = b""


@dataclass(frozen=True)
class CollectiveCall:
    """A function that all processes call together.

    Attributes:
        name: The function and those of its arguments that must be equal, as source text.
        timeout: How long to wait for the other processes, in seconds.
        processes: Participating processes; all if None.
        series: Barrier series. Calls of one series must be made in the same order.
    """

    name: str
    timeout: float
    processes: tuple[int, ...] | None = None
    series: str = SERIES

    def __post_init__(self) -> None:
        checked_seconds(self.timeout, f"{self.name}: timeout")

    @property
    def barrier(self) -> Barrier:
        """Barrier of this call."""
        all_processes = tuple(range(jax.process_count()))
        group = self.processes or all_processes
        return Barrier(group, self.series, self.timeout, what=self.name)

    def exchange(self, mine: Contribution) -> dict[int, Contribution]:
        """Exchange contributions; return them by process.

        Raises:
            ProcessesError: Some processes did not arrive, made another call, or aborted it.
        """
        message = {
            "call": self.name,
            "digest": mine.digest,
            "note": mine.note,
            "data": base64.b64encode(mine.data).decode(),
        }
        everyone = self._meet(message)
        return {
            process: Contribution(they["digest"], they["note"], base64.b64decode(they["data"]))
            for process, they in everyone.items()
        }

    @contextmanager
    def abort_together(self) -> Iterator[None]:
        """Send an error raised in this block to the other processes before it propagates."""
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

    def _meet(self, message: dict[str, Any]) -> dict[int, dict[str, Any]]:
        with self._timeout_as_error():
            came = RENDEZVOUS.exchange(self.barrier, json.dumps(message))
        everyone = {process: json.loads(text) for process, text in came.items()}
        if "refused" not in message:
            self._check_calls(everyone)
        return everyone

    def differences(self, values: Sequence[NamedValue]) -> tuple[ValueDifference, ...]:
        """Return the values that differ between processes.

        Raises:
            ProcessesError: Some processes did not arrive.
        """
        with self._timeout_as_error():
            return differences(self.barrier, values)

    @contextmanager
    def _timeout_as_error(self) -> Iterator[None]:
        """Convert a barrier timeout in this block into an error that names missing processes."""
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
                "processes called different functions at the same time: "
                f"{format_by_process(calls)}; make the same calls in the same order in all "
                "processes, without a condition on the process",
                processes=tuple(calls),
            )
        refused = {p: they["refused"] for p, they in everyone.items() if "refused" in they}
        if refused:
            first, reason = next(iter(refused.items()))
            raise ProcessesError(  # no-catalogue: needs several processes
                f"{self.name} failed in {format_processes(tuple(refused))}; error of process "
                f"{first}: {reason}",
                processes=tuple(refused),
            )

    def check_same_types(
        self, came: dict[int, Contribution], types: Sequence[tuple[str, str]]
    ) -> None:
        """Check that all processes passed the same leaves.

        Args:
            came: Contribution of each process; the digests cover paths and types.
            types: Path and description of each leaf.

        Raises:
            ProcessesError: The leaves differ, with path and process.
        """
        if len({they.digest for they in came.values()}) < 2:
            return
        blank = np.empty(0, np.uint8)
        mine = [_Typed(path, blank, text) for path, text in types]
        found = self.differences(mine)
        listed = "; ".join(f"{d.path}: {d.text}" for d in found)
        raise ProcessesError(  # no-catalogue: needs several processes
            f"{self.name} was called with different trees: {listed}; pass the same leaves with "
            "the same dtypes and shapes in all processes, padded to one shape if needed",
            processes=tuple(sorted({p for d in found for p in d.processes})),
        )


class _Typed(NamedValue):
    """A leaf of which only the type must be equal."""

    def entry(self) -> tuple[str, str, str, str]:
        """Return the entry that is compared between processes."""
        return self.path, self.also, "", ""


def digest_of(types: Sequence[tuple[str, str]]) -> str:
    """Return a digest of the paths and types of leaves."""
    return hashlib.sha256(json.dumps(types).encode()).hexdigest()[:32]


def leaf_types(leaves: Sequence[HostLeaf]) -> list[tuple[str, str]]:
    """Return path and type of each leaf."""
    return [(leaf.path, leaf.type) for leaf in leaves]
