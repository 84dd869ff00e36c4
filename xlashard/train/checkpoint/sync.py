"""Telling the other processes how it went, so that all go on or all stop."""

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


class AbsentError(CheckpointError):
    """Processes that are waited for in vain: what is left to do with them is not worth trying."""


@dataclass(frozen=True)
class Heard:
    """What the processes told each other, the same in each.

    Attributes:
        problems: By process why it failed; empty if all is well.
        first: The word of the first process.
    """

    problems: Mapping[int, str]
    first: str

    def __str__(self) -> str:
        if len(self.problems) == jax.process_count() and len(set(self.problems.values())) == 1:
            return self.problems[0]
        return "; ".join(f"process {process}: {text}" for process, text in self.problems.items())


@dataclass(frozen=True)
class Together:
    """All processes of the run, which do everything with checkpoints in the same order.

    Attributes:
        series: Tells these meetings from others.
        timeout: How long processes wait for each other, in seconds.
    """

    series: str
    timeout: float

    @property
    def first(self) -> bool:
        """Whether this is the process that does what is done once."""
        return jax.process_index() == 0

    def hear(self, what: str, problem: str = "", word: str = "") -> Heard:
        """Waits until all processes are as far as this one.

        Args:
            what: What has been done, or was to be done.
            problem: Why it failed here; empty if it did not.
            word: What the first process has to say to all; others need not say it.

        Raises:
            AbsentError: Processes did not come, or can't.
            CheckpointError: They came for something else.
        """
        everybody = tuple(range(jax.process_count()))
        series = f"checkpoints/{self.series}"
        invitation = Barrier(everybody, series, self.timeout, what=f"{what} (checkpoints)")
        try:
            came = RENDEZVOUS.exchange(invitation, json.dumps([what, problem, word]))
        except BarrierTimeoutError as missed:
            doing = f": {missed.doing}" if missed.doing else ""
            raise AbsentError(
                f"{what}: {format_processes(missed.processes)} did not come to it within "
                f"{self.timeout:g} s{doing}"
            ) from None
        except DeadlockError as error:
            raise AbsentError(str(error)) from None
        said = {process: json.loads(word) for process, word in came.items()}
        _check_same({process: its for process, (its, _, _) in said.items()})
        problems = {process: problem for process, (_, problem, _) in said.items() if problem}
        return Heard(problems, said[min(said)][2])


def _check_same(what: Mapping[int, str]) -> None:
    if len(set(what.values())) > 1:
        raise CheckpointError(
            f"the processes are not in step: {format_by_process(what)}. All must call the methods "
            "of Checkpoints in the same order, with the same steps"
        )
