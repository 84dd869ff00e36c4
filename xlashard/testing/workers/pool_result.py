"""Result of a request to the workers of a pod, and the error made from it."""

from dataclasses import dataclass, field

from xlashard.errors import PodError
from xlashard.processes import format_processes
from xlashard.testing.launch.launcher import PodSize, ProcessExit
from xlashard.testing.launch.output_text import last_lines, without_machinery, without_noise
from xlashard.testing.launch.supervision import describe_code
from xlashard.testing.workers.channel import RemoteException, Reply

# Output lines of each process in an error.
_LINES = 100


@dataclass(frozen=True)
class Timeouts:
    """Time limits of a request.

    Attributes:
        timeout: Seconds for all workers to reply.
        grace: Seconds left for the other workers after one has failed.
    """

    timeout: float
    grace: float = 5.0


@dataclass
class PoolResult:
    """Result of one request.

    Attributes:
        size: Size of the pod.
        timeouts: Time limits of the request.
        replies: Reply of each process that sent one.
        outputs: Output of each process during the request.
        ended: Processes that exited during the request, in order.
        late: Processes that were terminated because they did not reply in time.
        paused: Late processes that were suspended by a signal (SIGSTOP).
        timed_out: Whether the request timed out, rather than the grace period after a failure.
        heard: Processes that replied or exited, in order.
    """

    size: PodSize
    timeouts: Timeouts
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
                return f"{how} after {self.timeouts.timeout:g} s"
            return f"{how} {self.timeouts.grace:g} s after another process had failed"
        for place, event in enumerate(self.ended):
            if event.process == process:
                first = ", before the others" if not place and self.size.processes > 1 else ""
                return f"ended{first}: {describe_code(event.code)}"
        return "did not reply"

    def order(self) -> list[int]:
        """Return all processes, in the order of their replies or exits."""
        heard = [*self.heard, *self.late, *range(self.size.processes)]
        return list(dict.fromkeys(heard))

    def groups(self) -> list[tuple[list[int], str]]:
        """Group processes by the text of their failure, earliest failure first."""
        by_text: dict[str, list[int]] = {}
        for process in self.order():
            text = self.fate(process)
            reply = self.replies.get(process)
            if reply is not None and not reply.well:
                text = (
                    reply.value.traceback
                    if isinstance(reply.value, RemoteException)
                    else str(reply.value)
                )
            if text:
                by_text.setdefault(text, []).append(process)
        return [(processes, text) for text, processes in by_text.items()]


def pod_error(title: str, result: PoolResult) -> PodError:
    """Return the error that describes a failed request."""
    parts = [title]
    for processes, text in result.groups():
        who = f"{format_processes(sorted(processes))} of {result.size.processes}"
        parts.append(f"--- {who} ---\n{text.rstrip()}")
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
