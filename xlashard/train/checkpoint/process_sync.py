"""Barriers of the processes that write a checkpoint, with an exchange of their errors."""

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from xlashard.core.processes import RENDEZVOUS, Barrier, BarrierTimeoutError
from xlashard.errors import DeadlockError
from xlashard.support.formatting import error_line, format_by_process
from xlashard.train.errors import CheckpointError

# Error numbers of a full disk, an exceeded quota, or a file at its maximum size.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OthersFailedError(CheckpointError):
    """Another process failed to write its shards."""


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
        return format_by_process(self.problems)


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
            absent = missed.missing(f"did not arrive within {self.timeout:g} s")
            raise MissingProcessError(f"{what}: {absent}") from None
        except DeadlockError as error:
            raise MissingProcessError(str(error)) from None
        values = {process: json.loads(word) for process, word in received.items()}
        _check_same({process: step for process, (step, _, _) in values.items()})
        problems = {process: problem for process, (_, problem, _) in values.items() if problem}
        return SyncResult(problems, values[min(values)][2])


def _check_same(what: Mapping[int, str]) -> None:
    if len(set(what.values())) > 1:
        raise CheckpointError(
            f"the processes are not in step: {format_by_process(what)}. All must call the methods "
            "of Checkpoints in the same order, with the same steps"
        )


def find_reason(error: BaseException) -> str:
    """Return the first line of an error, without TensorStore specifications."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code and int(code[1]) in _FULL:
        return os.strerror(int(code[1]))
    # ValueErrors of TensorStore include their kind in the text.
    return error_line(error, ValueError, CheckpointError).partition(" [tensorstore_spec=")[0]
