"""Pool of the worker processes of a pod, which all serve the same requests."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from xlashard.errors import PodError
from xlashard.pods.testing.launcher import (
    CHANNEL,
    Event,
    Launch,
    LaunchPlan,
    OutputChunk,
    PodSize,
    ProcessExit,
    StopRequest,
)
from xlashard.pods.testing.pod_worker import RemoteException, Reply, Unpacker, pack
from xlashard.pods.testing.supervision import (
    AFTER_ABORT,
    EndingRules,
    is_paused,
    last_lines,
    show_stacks,
    without_machinery,
    without_noise,
)
from xlashard.support.formatting import exit_text, format_processes
from xlashard.support.lending import repeat_words

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_WORKER = "xlashard.pods.testing.pod_worker"
_START_TIMEOUT = 300.0
# Longest wait for events, in seconds; the system's calls reject longer ones.
_LONGEST_WAIT = 3600.0


# Output lines of each process in an error.
_LINES = 100


@dataclass
class PoolResult:
    """Result of one request.

    Attributes:
        size: Size of the pod.
        rules: Time limits of the request.
        replies: Reply of each process that sent one.
        outputs: Output of each process during the request.
        ended: Processes that exited during the request, in order.
        late: Processes that were terminated because they did not reply in time.
        paused: Late processes that were suspended by a signal (SIGSTOP).
        timed_out: Whether the request timed out, rather than the grace period after a failure.
        heard: Processes that replied or exited, in order.
    """

    size: PodSize
    rules: EndingRules
    replies: dict[int, Reply] = field(default_factory=dict)
    outputs: dict[int, bytearray] = field(default_factory=dict)
    ended: list[ProcessExit] = field(default_factory=list)
    late: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    timed_out: bool = False
    heard: list[int] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """True if every process replied with success."""
        replied = len(self.replies) == self.size.processes
        return replied and all(reply.well for reply in self.replies.values())

    @property
    def damage(self) -> dict[int, tuple[str, ...]]:
        """Reasons why processes should serve no other request, by process."""
        return {number: reply.damage for number, reply in self.replies.items() if reply.damage}

    @property
    def in_step(self) -> bool:
        """True if all processes replied, and failures have the same location."""
        places = {(reply.well, reply.place) for reply in self.replies.values()}
        return len(self.replies) == self.size.processes and len(places) == 1

    def output(self, process: int) -> str:
        """Return the merged output of a process."""
        return without_machinery(without_noise(bytes(self.outputs.get(process, b""))))

    def fate(self, process: int) -> str:
        """Describe why a process did not reply; "" if it replied."""
        if process in self.replies:
            return ""
        if process in self.late:
            how = "was stopped by a signal (SIGSTOP)" if process in self.paused else "still ran"
            if self.timed_out:
                return f"{how} after {self.rules.timeout:g} s"
            return f"{how} {self.rules.grace:g} s after another process had failed"
        for place, event in enumerate(self.ended):
            if event.process == process:
                first = ", before the others" if not place and self.size.processes > 1 else ""
                return f"ended{first}: {exit_text(event.code)}"
        return "did not reply"

    def order(self) -> list[int]:
        """Return all processes, in the order of their replies or exits."""
        processes = [*self.heard, *self.late, *range(self.size.processes)]
        return list(dict.fromkeys(processes))

    def groups(self) -> list[tuple[list[int], str]]:
        """Group processes by the text of their failure, earliest failure first."""
        by_text: dict[str, list[int]] = {}
        for process in self.order():
            text = self.fate(process)
            reply = self.replies.get(process)
            if reply is not None and not reply.well:
                text = getattr(reply.value, "traceback", str(reply.value))
            if text:
                by_text.setdefault(text, []).append(process)
        return [(processes, text) for text, processes in by_text.items()]


def pod_error(title: str, result: PoolResult) -> PodError:
    """Return the error that describes a failed request."""
    parts = [title]
    for processes, text in result.groups():
        subject = f"{format_processes(sorted(processes))} of {result.size.processes}"
        parts.append(f"--- {subject} ---\n{text.rstrip()}")
    outputs = {process: result.output(process) for process in range(result.size.processes)}
    for process, text in outputs.items():
        if text.strip():
            parts.append(f"--- output of process {process} ---\n{last_lines(text, _LINES)}")
    raised = {
        process: reply.value
        for process, reply in result.replies.items()
        if isinstance(reply.value, RemoteException)
    }
    return PodError(
        "\n".join(parts),
        tracebacks={process: value.traceback for process, value in raised.items()},
        outputs=outputs,
        errors={
            process: value.error for process, value in raised.items() if value.error is not None
        },
    )


def _python(size: PodSize, environment: Mapping[str, str]) -> list[str]:
    """Return the start of a worker's command line; tests replace this function."""
    return [sys.executable]


class WorkerPool:
    """Workers of one pod, joined by JAX.

    Args:
        size: Number of processes, and of devices per process.
        environment: Environment of the workers; None means that of this process.
        on_output: Called with output as it arrives.

    Raises:
        PodError: The workers did not start.
        LaunchError: The processes could not be launched.
    """

    def __init__(
        self,
        size: PodSize,
        *,
        environment: Mapping[str, str] | None = None,
        on_output: Callable[[OutputChunk], None] = lambda printed: None,
    ) -> None:
        environment = dict(os.environ) if environment is None else environment
        self.size = size
        self.usable = True
        self._on_output = on_output
        self._unpackers = [Unpacker() for _ in range(size.processes)]
        self._launch = Launch(
            LaunchPlan(
                [*_python(size, environment), *repeat_words(), str(_BOOTSTRAP), CHANNEL],
                size,
                environment=environment,
                one_stream=True,
                channels=True,
            )
        )
        start = json.dumps({"path": sys.path, "module": _WORKER}).encode() + b"\n"
        began = self._round([start] * size.processes, EndingRules(_START_TIMEOUT))
        if not began.well:
            self.close()
            # no-catalogue: needs processes that fail
            raise pod_error("the pod did not start", began)

    def request(self, request: object, rules: EndingRules) -> PoolResult:
        """Send the same request to all workers and wait for their replies.

        A worker that does not reply in time prints the stacks of its threads and is terminated.
        After a failure that is not identical in all workers, all are terminated, because their
        states differ.
        """
        return self._round([pack(request)] * self.size.processes, rules)

    def request_each(self, requests: Sequence[object], rules: EndingRules) -> PoolResult:
        """Send one request per worker and wait for their replies."""
        return self._round([pack(request) for request in requests], rules)

    def _round(self, requests: Sequence[bytes], rules: EndingRules) -> PoolResult:
        result = PoolResult(self.size, rules)
        self.usable = False
        try:
            for number, request in enumerate(requests):
                # The exit of a worker is among the events.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._launch.send(number, request)
            self._await_replies(result)
        finally:
            if result.in_step and not result.ended and not result.damage:
                self.usable = True
            else:
                self._end(result)
        return result

    def _await_replies(self, result: PoolResult) -> None:
        end = time.monotonic() + result.rules.timeout
        failed = False
        while waiting := self._launch.running - set(result.replies):
            now = time.monotonic()
            if now >= end:
                result.timed_out = not failed
                result.late = tuple(sorted(waiting))
                result.paused = tuple(n for n in waiting if is_paused(self._launch.pids[n]))
                return
            self._note(self._launch.events(min(end - now, _LONGEST_WAIT)), result)
            has_failed = result.ended or not all(reply.well for reply in result.replies.values())
            if has_failed and not failed:
                failed = True
                end = min(end, time.monotonic() + result.rules.grace)
        # Output written before the replies has arrived by now.
        while events := self._launch.events(0):
            self._note(events, result)

    def _note(self, events: list[Event], result: PoolResult) -> None:
        for event in events:
            if isinstance(event, StopRequest):
                # Workers have nothing to save.
                self._launch.signal(signal.SIGKILL)
            elif isinstance(event, ProcessExit):
                result.ended.append(event)
                result.heard.append(event.process)
            elif event.stream == "channel":
                for reply in self._unpackers[event.process].feed(event.text):
                    result.replies[event.process] = reply
                    result.heard.append(event.process)
            else:
                result.outputs.setdefault(event.process, bytearray()).extend(event.text)
                self._on_output(event)

    def _end(self, result: PoolResult) -> None:
        """Terminate the workers; workers that did not reply print their stacks first."""
        if result.late:
            show_stacks(self._launch, result.late)
            end = time.monotonic() + AFTER_ABORT
            while self._launch.running & set(result.late) and time.monotonic() < end:
                self._note_late(self._launch.events(end - time.monotonic()), result)
        self._note_late(self._launch.rest(), result)
        self.close()

    def _note_late(self, events: list[Event], result: PoolResult) -> None:
        # Output of the other workers is only about the exit of their peers.
        of_processes = [event for event in events if not isinstance(event, StopRequest)]
        self._note([event for event in of_processes if event.process in result.late], result)

    def close(self) -> None:
        """Terminate the workers."""
        self.usable = False
        self._launch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
