"""Report of a program that makes no progress, from the stacks of all processes."""

from collections.abc import Mapping, Sequence

from xlashard.lazily import dataclass
from xlashard.processes import format_processes, group_by_value
from xlashard.processes.stack_dump import ProcessDump
from xlashard.processes.thread_stacks import ThreadStack

# Groups of equal stacks shown in full.
_SHOWN = 4


@dataclass(frozen=True)
class HangReport:
    """State of a pod that makes no progress.

    Attributes:
        count: Number of processes.
        answers: Answer of each process that replied.
        notes: Description of the barrier at which a process waits, by process.
        recent: Number of seconds after a step during which a process does not count as stuck.
    """

    count: int
    answers: Mapping[int, ProcessDump]
    notes: Mapping[int, str]
    recent: float = 0.0

    @property
    def silent(self) -> tuple[int, ...]:
        """Processes that did not answer."""
        return tuple(p for p in range(self.count) if p not in self.answers)

    @property
    def paused(self) -> dict[int, str]:
        """Processes that have paused their watchdog, with the reason."""
        reported = {p: answer.progress for p, answer in self.answers.items()}
        return {
            p: progress.paused for p, progress in reported.items() if progress and progress.paused
        }

    @property
    def moving(self) -> tuple[int, ...]:
        """Processes that have just made a step or ended a pause; peers may only be waiting."""
        reported = {p: answer.progress for p, answer in self.answers.items()}
        return tuple(
            p for p, progress in reported.items() if progress and progress.idle < self.recent
        )

    @property
    def behind(self) -> tuple[int, ...]:
        """Processes that have done fewer steps than the furthest."""
        steps = self._steps
        return tuple(p for p, step in steps.items() if step < max(steps.values()))

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Processes that execute their own code while others wait in a JAX call."""
        waiting = [p for p, answer in self.answers.items() if _in_runtime(answer)]
        if not waiting or len(waiting) == len(self.answers):
            return ()
        return tuple(p for p in self.answers if p not in waiting)

    @property
    def culprits(self) -> tuple[int, ...]:
        """Processes that the others wait for, as far as it can be determined."""
        return tuple(sorted({*self.silent, *self.behind, *self.elsewhere, *self.paused}))

    @property
    def _steps(self) -> dict[int, int]:
        reported = {p: answer.progress for p, answer in self.answers.items()}
        return {p: progress.step for p, progress in reported.items() if progress is not None}

    def __str__(self) -> str:
        return "\n".join([*self._verdict(), "", *self._stacks(), _BELOW])

    def _verdict(self) -> list[str]:
        lines = [f"{self._about(process)}" for process in self.culprits]
        others = [p for p in self.answers if p not in self.culprits]
        for text, processes in group_by_value({p: self._waits(p) for p in others}):
            verb = "waits" if len(processes) == 1 else "wait"
            lines.append(f"{format_processes(processes)} {verb} {text}")
        if self.moving:
            lines.append(f"{format_processes(self.moving)} made a step just now")
        if not self.culprits:
            lines.append("no process is behind the others: see the line at which each one waits")
        return lines

    def _about(self, process: int) -> str:
        """Describe the problem of a process that the others wait for."""
        if process in self.silent:
            return (
                f"process {process} does not answer: it is stopped (SIGSTOP), its machine is, or "
                "native code keeps Python's lock"
            )
        answer = self.answers[process]
        progress = answer.progress
        if process in self.paused:
            return f"process {process} is busy with {self.paused[process]}: {self._at(process)}"
        behind = ""
        if progress is not None and process in self.behind:
            furthest = max(self._steps.values())
            behind = f" at step {progress.step}, behind the others at step {furthest},"
        return f"process {process} is stuck{behind} in {self._at(process)}"

    def _waits(self, process: int) -> str:
        step = self._steps.get(process)
        at_step = "" if step is None else f" at step {step}"
        note = self.notes.get(process)
        return f"in {self._at(process)}{at_step}{f' ({note})' if note else ''}"

    def _at(self, process: int) -> str:
        main = self.answers[process].main
        frame = main.user_frame if main else None
        return "no line of Python" if frame is None else str(frame)

    def _stacks(self) -> list[str]:
        mains = {p: answer.main.text() for p, answer in self.answers.items() if answer.main}
        groups = group_by_value(mains)
        # Culprits first.
        groups.sort(key=lambda group: not set(group[1]) & set(self.culprits))
        lines = []
        for text, processes in groups[:_SHOWN]:
            lines += [f"{format_processes(processes)}, {text}", ""]
        if len(groups) > _SHOWN:
            lines += [f"and {len(groups) - _SHOWN} more stacks, in the processes' own logs", ""]
        return lines


_BELOW = (
    "Frames below Python are not visible from inside; `py-spy dump --native --pid PID` shows them."
)


def stacks_text(threads: Sequence[ThreadStack]) -> str:
    """Format the stacks of one process."""
    return "\n\n".join(thread.text() for thread in threads)


def _in_runtime(answer: ProcessDump) -> bool:
    return answer.main is not None and answer.main.in_runtime
