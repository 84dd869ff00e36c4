"""What came of a request to the processes of a pod, and how it is told."""

from dataclasses import dataclass, field

from xlashard.errors import PodError
from xlashard.processes import format_processes
from xlashard.testing.launch.launcher import PodSize, ProcessExit
from xlashard.testing.launch.output_text import last_lines, without_machinery, without_noise
from xlashard.testing.launch.supervision import describe_code
from xlashard.testing.workers.channel import RemoteException, Reply

# Of the output of each process in an error.
_LINES = 100


@dataclass(frozen=True)
class Timeouts:
    """How long workers are waited for.

    Attributes:
        timeout: Seconds that all have for a request.
        grace: Seconds that the others have left when one has failed.
    """

    timeout: float
    grace: float = 5.0


@dataclass
class PoolResult:
    """What came of one request.

    Attributes:
        size: Of the pod.
        patience: With the workers.
        replies: By process its reply, if there was one.
        outputs: By process what it wrote meanwhile.
        ended: The processes that ended meanwhile, the first one first.
        late: Those that were ended because they had no reply in time.
        paused: Those of them that were stopped by a signal (SIGSTOP).
        timed_out: Whether the time was over, and not just the others' patience.
        heard: The processes that replied or ended, in this order.
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
        """Whether every process replied that all is well."""
        replied = len(self.replies) == self.size.processes
        return replied and all(reply.well for reply in self.replies.values())

    @property
    def in_step(self) -> bool:
        """Whether all processes replied, and ended at the same place if they failed."""
        places = {(reply.well, reply.place) for reply in self.replies.values()}
        return len(self.replies) == self.size.processes and len(places) == 1

    def output(self, process: int) -> str:
        """What a process wrote meanwhile, standard output and standard error in one."""
        return without_machinery(without_noise(bytes(self.outputs.get(process, b""))))

    def fate(self, process: int) -> str:
        """What kept a process from replying, in words; "" if it replied."""
        if process in self.replies:
            return ""
        if process in self.late:
            how = "was stopped by a signal (SIGSTOP)" if process in self.paused else "still ran"
            if self.timed_out:
                return f"{how} when {self.timeouts.timeout:g} s were over"
            return f"{how} {self.timeouts.grace:g} s after another process had failed"
        for place, event in enumerate(self.ended):
            if event.process == process:
                first = ", before the others" if not place and self.size.processes > 1 else ""
                return f"ended{first}: {describe_code(event.code)}"
        return "did not reply"

    def order(self) -> list[int]:
        """All processes; first those that were first to reply or to end."""
        heard = [*self.heard, *self.late, *range(self.size.processes)]
        return list(dict.fromkeys(heard))

    def groups(self) -> list[tuple[list[int], str]]:
        """Processes whose failure is told in the same words, with these; who failed first leads."""
        told: dict[str, list[int]] = {}
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
                told.setdefault(text, []).append(process)
        return [(processes, text) for text, processes in told.items()]


def pod_error(title: str, result: PoolResult) -> PodError:
    """The error that tells of a round that went wrong."""
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
