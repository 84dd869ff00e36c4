"""Telling the other processes how it went, so that all go on or all stop."""

import json
from dataclasses import dataclass

import jax

from xlashard.processes import Invitation, MissedError, meetings
from xlashard.train.errors import CheckpointError


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

    def hear(self, what: str, problem: str = "") -> str:
        """Waits until all processes are as far as this one.

        Args:
            what: What has been done, or was to be done.
            problem: Why it failed here; empty if it did not.

        Returns:
            What is wrong, the same text in every process: a process failed, or came for something
            else. Empty if all is well.

        Raises:
            CheckpointError: Processes did not come.
        """
        everybody = tuple(range(jax.process_count()))
        invitation = Invitation(everybody, f"checkpoints/{self.series}", self.timeout)
        try:
            came = meetings.meet(invitation, json.dumps([what, problem]))
        except MissedError as missed:
            raise CheckpointError(
                f"{what}: processes {list(missed.processes)} did not come within "
                f"{self.timeout:g} s. They are slow, stuck, or ended"
            ) from None
        said = {process: json.loads(word) for process, word in came.items()}
        return _failure(said) or _difference(said)


def _failure(said: dict[int, list[str]]) -> str:
    problems = {process: problem for process, (_, problem) in said.items() if problem}
    if len(said) == 1:
        return "".join(problems.values())
    return "; ".join(f"process {process}: {problem}" for process, problem in problems.items())


def _difference(said: dict[int, list[str]]) -> str:
    by_what: dict[str, list[int]] = {}
    for process, (what, _) in said.items():
        by_what.setdefault(what, []).append(process)
    if len(by_what) == 1:
        return ""
    doing = (f"{what} (processes {', '.join(map(str, who))})" for what, who in by_what.items())
    return f"the processes do different things: {'; '.join(doing)}"
