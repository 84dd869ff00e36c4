"""Barriers of the processes that save or restore, with an exchange of errors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from xlashard.errors import DeadlockError
from xlashard.processes import (
    RENDEZVOUS,
    Barrier,
    BarrierTimeoutError,
    format_by_process,
    format_processes,
)
from xlashard.train.errors import CheckpointError


class MissingProcessError(CheckpointError):
    """Some processes missed a barrier, so the operation is abandoned."""


@dataclass(frozen=True)
class SyncResult:
    """Result of an exchange, identical in all processes.

    Attributes:
        problems: Error texts by process; empty if all succeeded.
        first: Value of the first process.
    """

    problems: Mapping[int, str]
    first: str

    def __str__(self) -> str:
        if len(self.problems) == jax.process_count() and len(set(self.problems.values())) == 1:
            return self.problems[0]
        return "; ".join(f"process {process}: {text}" for process, text in self.problems.items())


@dataclass(frozen=True)
class ProcessSync:
    """Barriers of all processes of the run, in the same order everywhere.

    Attributes:
        series: Name of the sequence of barriers.
        timeout: Timeout of a barrier in seconds.
    """

    series: str
    timeout: float

    @property
    def first(self) -> bool:
        """Return True in the process that performs the shared writes."""
        return jax.process_index() == 0

    def exchange(self, what: str, problem: str = "", word: str = "") -> SyncResult:
        """Wait for all processes, and exchange errors.

        Args:
            what: Name of the operation.
            problem: Error of this process; empty on success.
            word: Value to broadcast; that of the first process counts.

        Raises:
            MissingProcessError: Processes missed the barrier, or wait elsewhere.
            CheckpointError: Processes are in different operations.
        """
        processes = tuple(range(jax.process_count()))
        series = f"checkpoints/{self.series}"
        barrier = Barrier(processes, series, self.timeout, what=f"{what} (checkpoints)")
        try:
            received = RENDEZVOUS.exchange(barrier, json.dumps([what, problem, word]))
        except BarrierTimeoutError as missed:
            doing = f": {missed.doing}" if missed.doing else ""
            raise MissingProcessError(
                f"{what}: {format_processes(missed.processes)} did not arrive within "
                f"{self.timeout:g} s{doing}"
            ) from None
        except DeadlockError as error:
            raise MissingProcessError(str(error)) from None
        values = {process: json.loads(word) for process, word in received.items()}
        _check_same({process: its for process, (its, _, _) in values.items()})
        problems = {process: problem for process, (_, problem, _) in values.items() if problem}
        return SyncResult(problems, values[min(values)][2])


def _check_same(what: Mapping[int, str]) -> None:
    if len(set(what.values())) > 1:
        raise CheckpointError(
            f"the processes are not in step: {format_by_process(what)}. All must call the methods "
            "of Checkpoints in the same order, with the same steps"
        )
