"""Report on the processes of a job: which of them the others wait for, where, and their state."""

import contextlib
import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from xlashard._jax.runtime import coordination
from xlashard.core.processes.process_facts import ProcessFacts, describe_other_code
from xlashard.core.processes.stack_dump import (
    ProcessDump,
    StepProgress,
    read_peer_facts,
    stack_server,
)
from xlashard.core.processes.wait_graph import read_status
from xlashard.errors import counted
from xlashard.support.background import read_process_stat
from xlashard.support.formatting import format_processes, group_by_value, in_bytes, in_seconds
from xlashard.support.lazily import dataclass

# Groups of equal stacks shown in full.
_SHOWN = 4
# Requests of other processes at the same time, for each of which a command waits.
_ATTEMPTS = 3
COMMAND_OUTCOME = "command"
"""Published in place of a report, which only the command gets."""
_NO_ANSWER = (
    "does not answer: it is stopped (SIGSTOP), its machine is, or native code keeps Python's lock"
)
_NATIVE_FRAMES = (
    "Frames below Python are not visible from inside; `py-spy dump --native --pid PID` shows them."
)
_COLUMNS = ("process", "host", "pid", "step", "memory", "devices", "last collective", "state")


@dataclass(frozen=True)
class HangReport:
    """State of the processes of a job, of which some may hang.

    Attributes:
        count: Number of processes.
        answers: Answer of each process that replied.
        silence: Why a process does not reply, such as `is dead: ...`.
        facts: Host, versions, code and memory of each process that has published or answered them.
        recent: Number of seconds after a step during which a process does not count as stuck.
    """

    count: int
    answers: Mapping[int, ProcessDump]
    silence: Mapping[int, str]
    facts: Mapping[int, ProcessFacts]
    recent: float = 0.0

    @property
    def silent(self) -> tuple[int, ...]:
        """Processes that did not answer."""
        return tuple(p for p in range(self.count) if p not in self.answers)

    @property
    def paused(self) -> dict[int, str]:
        """Processes that have paused their watchdog, with the reason."""
        return {p: progress.paused for p, progress in self._progress.items() if progress.paused}

    @property
    def moving(self) -> tuple[int, ...]:
        """Processes that have just made a step or ended a pause; peers may only be waiting."""
        return tuple(p for p, progress in self._progress.items() if progress.idle < self.recent)

    @property
    def behind(self) -> tuple[int, ...]:
        """Processes that have done fewer steps than the furthest."""
        return tuple(p for p, progress in self._progress.items() if progress.step < self._furthest)

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Processes that execute their own code while others wait in a JAX call."""
        mains = {p: answer.main for p, answer in self.answers.items()}
        running = [p for p, main in mains.items() if main is None or not main.in_runtime]
        return tuple(running) if len(running) < len(self.answers) else ()

    @property
    def other_code(self) -> dict[int, str]:
        """Processes whose code or versions differ from those of most, with the differences."""
        return describe_other_code(self.facts)

    @property
    def culprits(self) -> tuple[int, ...]:
        """Processes that the others wait for, as far as it can be determined."""
        return tuple(sorted({*self.silent, *self.behind, *self.elsewhere, *self.paused}))

    @property
    def odd(self) -> tuple[int, ...]:
        """The culprits, then the other processes with other code."""
        return tuple(dict.fromkeys((*self.culprits, *self.other_code)))

    @property
    def _progress(self) -> dict[int, StepProgress]:
        return {p: answer.progress for p, answer in self.answers.items() if answer.progress}

    @property
    def _furthest(self) -> int:
        return max(progress.step for progress in self._progress.values())

    def __str__(self) -> str:
        return "\n".join([*self._verdict(), "", *self._stacks(), _NATIVE_FRAMES])

    def _verdict(self) -> Iterator[str]:
        other_code = self.other_code
        for process in self.odd:
            if process in self.culprits:
                yield self._describe_culprit(process)
            if process in other_code:
                yield f"{self._name(process)} has other code: {other_code[process]}"
        others = [p for p in self.answers if p not in self.culprits]
        for text, processes in group_by_value({p: self._describe_wait(p) for p in others}):
            verb = "waits" if len(processes) == 1 else "wait"
            yield f"{format_processes(processes)} {verb} {text}"
        if self.moving:
            yield f"{format_processes(self.moving)} made a step just now"
        if not self.odd:
            yield "no process is behind the others: see the line at which each one waits"

    def _name(self, process: int) -> str:
        facts = self.facts.get(process)
        return f"process {process}{f' ({facts})' if facts else ''}"

    def _describe_culprit(self, process: int) -> str:
        """Describe the problem of a process that the others wait for."""
        if process in self.silent:
            return f"{self._name(process)} {self.silence.get(process, _NO_ANSWER)}"
        if process in self.paused:
            return f"process {process} is busy with {self.paused[process]}: {self._at(process)}"
        behind = ""
        if process in self.behind:
            step = self._progress[process].step
            behind = f" at step {step}, behind the others at step {self._furthest},"
        return f"process {process} is stuck{behind} in {self._at(process)}"

    def _describe_wait(self, process: int) -> str:
        progress, answer = self._progress.get(process), self.answers[process]
        at_step = f" at step {progress.step}" if progress else ""
        collective, main = answer.collective, answer.main
        if collective is not None and collective.waiting:
            return f"in {self._at(process)}{at_step} ({collective})"
        awaits = f", for the result of {main.awaits}" if main and main.awaits else ""
        return f"in {self._at(process)}{at_step}{awaits}"

    def _at(self, process: int) -> str:
        main = self.answers[process].main
        frame = main.user_frame if main else None
        return "no line of Python" if frame is None else str(frame)

    def _stacks(self) -> list[str]:
        mains = {p: answer.main.text() for p, answer in self.answers.items() if answer.main}
        groups = group_by_value(mains)
        # Culprits first.
        groups.sort(key=lambda group: not set(group[1]) & set(self.odd))
        lines = []
        for text, processes in groups[:_SHOWN]:
            lines += [f"{format_processes(processes)}, {text}", ""]
        if len(groups) > _SHOWN:
            lines += [f"and {len(groups) - _SHOWN} more stacks, in the processes' own logs", ""]
        return lines

    def table(self) -> str:
        """Return a table of the processes, and what their versions and code are."""
        rows = [_COLUMNS, *(self._row(process) for process in range(self.count))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        other_code = self.other_code
        usual = next((f for p, f in sorted(self.facts.items()) if p not in other_code), None)
        if usual is not None:
            versions = ", ".join(f"{name} {version}" for name, version in usual.versions.items())
            code = hashlib.sha256(repr(sorted(usual.code.items())).encode()).hexdigest()[:8]
            where = "other processes" if other_code else "all processes"
            lines += [
                "",
                f"{where}: {versions}, code {code} ({counted(len(usual.code), 'module')})",
            ]
        lines += [f"{self._name(p)} has other code: {text}" for p, text in other_code.items()]
        return "\n".join(lines)

    def _row(self, process: int) -> tuple[str, ...]:
        answer, facts = self.answers.get(process), self.facts.get(process)
        place = (str(process), facts.host if facts else "?", str(facts.pid) if facts else "?")
        if answer is None:
            return *place, "?", "?", "?", "?", self.silence.get(process, _NO_ANSWER)
        progress, collective = self._progress.get(process), answer.collective
        step = f"{progress.step}, {in_seconds(progress.idle)} ago" if progress else "?"
        memory = in_bytes(facts.resident_bytes) if facts and facts.resident_bytes else "?"
        last = "none"
        if collective is not None:
            since = in_seconds(collective.seconds)
            last = f"{collective}, {f'waits for {since}' if collective.waiting else f'{since} ago'}"
        return *place, step, memory, _format_devices(facts), last, self._describe_state(process)

    def _describe_state(self, process: int) -> str:
        if process in self.paused:
            return f"busy with {self.paused[process]}"
        main = self.answers[process].main
        verb = "waits" if main is not None and main.in_runtime else "runs"
        frame = main.user_frame if main else None
        awaits = f", for {main.awaits}" if main and main.awaits else ""
        return "no line of Python" if frame is None else f"{verb} in {frame.place}{awaits}"

    def to_json(self) -> str:
        """Return the processes as JSON, without their stacks."""
        other_code = self.other_code
        rows: list[dict[str, Any]] = []
        for process in range(self.count):
            answer, facts = self.answers.get(process), self.facts.get(process)
            row: dict[str, Any] = {"process": process, "answers": answer is not None}
            row["state"] = self._row(process)[-1]
            row["other_code"] = other_code.get(process, "")
            row |= asdict(facts) if facts else {}
            if answer is not None:
                row["progress"] = asdict(answer.progress) if answer.progress else None
                row["collective"] = asdict(answer.collective) if answer.collective else None
                row["awaits"] = answer.main.awaits if answer.main else ""
            rows.append(row)
        return json.dumps({"format": 1, "processes": rows}, indent=2)


def _format_devices(facts: ProcessFacts | None) -> str:
    if facts is None or facts.device_bytes is None:
        return "?"
    limit = f" of {in_bytes(facts.device_limit)}" if facts.device_limit else ""
    return f"{in_bytes(facts.device_bytes)}{limit}"


def make_hang_report(answers: Mapping[int, ProcessDump], recent: float = 0.0) -> HangReport:
    """Return the report of this job's answers, with what is known of the processes without one.

    Args:
        answers: Answers by process.
        recent: Number of seconds after a step during which a process does not count as stuck.
    """
    count = coordination.process_count()
    facts = {p: answer.facts for p, answer in answers.items() if answer.facts}
    lost = {p: how for answer in answers.values() for p, how in answer.lost}
    silence = {}
    for process in range(count):
        if process in answers:
            continue
        # The store may have ended with process 0.
        with contextlib.suppress(Exception):
            known = read_peer_facts(process)
            facts |= {} if known is None else {process: known}
        silence[process] = explain_silence(process, facts.get(process), lost)
    return HangReport(count, answers, silence, dict(sorted(facts.items())), recent)


def explain_silence(process: int, facts: ProcessFacts | None, lost: Mapping[int, str]) -> str:
    """Explain why a process does not answer: most certain causes first."""
    with contextlib.suppress(Exception):
        status = read_status(process)
        if status.ended:
            return str(status)
    if facts is not None and facts.host == socket.gethostname():
        try:
            state = read_process_stat(facts.pid)[0]
        except FileNotFoundError:
            return "is dead: its host has no such process"
        except (OSError, IndexError):
            state = ""  # Not Linux.
        if state in ("Z", "X"):
            return "is dead: its parent has not collected its exit code yet"
        if state in ("T", "t"):
            return f"is stopped by a signal (SIGSTOP) or a debugger: kill -CONT {facts.pid}"
    if process in lost:
        return lost[process]
    return _NO_ANSWER


def request_hang_report(seconds: float) -> HangReport:
    """Request the state of all processes, whatever other requests are on the way.

    Args:
        seconds: How long to wait for the answers.
    """
    if coordination.client() is None:
        return make_hang_report({0: stack_server.local_dump()})
    for _ in range(_ATTEMPTS):
        request = stack_server.request_all(seconds, by_command=True)
        if request.answers is not None:
            request.publish(COMMAND_OUTCOME)
            return make_hang_report(request.answers)
        # Another process has made a request at the same time.
        request.outcome(seconds)
    # no-catalogue: needs several processes
    raise TimeoutError("other processes request the state of all processes as well: try again")
