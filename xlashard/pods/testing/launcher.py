"""Launcher of the processes of a pod: start, events and termination."""

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from xlashard.config import POD_COORDINATOR, PodPlace
from xlashard.errors import LaunchError
from xlashard.pods.testing.emulated_devices import LOOPBACK, pod_environment

_GUARD = Path(__file__).with_name("guard.py")
_CHUNK = 1 << 16
# Longer than the guard needs to kill all processes.
_GUARD_TIMEOUT = 15.0

type StreamName = Literal["stdout", "stderr", "channel"]

CHANNEL = "{channel}"
"""Placeholder in a command that is replaced by the file descriptor of the channel."""


@dataclass(frozen=True)
class PodSize:
    """Size of an emulated pod.

    Attributes:
        processes: Number of processes.
        devices: Number of emulated devices per process.
    """

    processes: int
    devices: int


@dataclass(frozen=True)
class OutputChunk:
    """Bytes that a process wrote.

    Attributes:
        process: Index of the process.
        stream: The stream: "stdout" for both if they are merged, "channel" for its socket.
        text: The bytes; empty at the end of the stream.
    """

    process: int
    stream: StreamName
    text: bytes


@dataclass(frozen=True)
class ProcessExit:
    """Exit of a process.

    Attributes:
        process: Index of the process.
        code: Its exit code, or the negative number of the signal that killed it.
    """

    process: int
    code: int


@dataclass(frozen=True)
class StopRequest:
    """Signal that asked the guard to stop, from outside of the launcher.

    Attributes:
        signal: Number of the signal.
    """

    signal: int


type Event = OutputChunk | ProcessExit | StopRequest


@dataclass(frozen=True)
class LaunchPlan:
    """Parameters of a launch.

    Attributes:
        command: Command of each process.
        size: Number of processes, and of devices per process.
        environment: Base environment, to which the variables of the pod are added.
        folder: Working directory; None means that of this process.
        one_stream: Whether standard output and standard error are merged in the order of writing.
        channels: Whether each process gets a socket, whose descriptor replaces `CHANNEL`.
    """

    command: Sequence[str]
    size: PodSize
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str | None = None
    one_stream: bool = False
    channels: bool = False


@dataclass
class ProcessPipes:
    """Connections between the launcher and one process, as file descriptors by stream.

    Attributes:
        near: The launcher's ends.
        far: The other ends, for the guard and the process.
    """

    near: dict[StreamName, int] = field(default_factory=dict)
    far: dict[StreamName, int] = field(default_factory=dict)

    @classmethod
    def make(cls, one_stream: bool, channel: bool) -> Self:
        """Create the pipes, and a socket pair if a channel is requested."""
        pipes = cls()
        try:
            pipes.near["stdout"], pipes.far["stdout"] = os.pipe()
            if not one_stream:
                pipes.near["stderr"], pipes.far["stderr"] = os.pipe()
            if channel:
                near, far = socket.socketpair()
                pipes.near["channel"], pipes.far["channel"] = near.detach(), far.detach()
        except OSError:
            _close(pipes.far)
            _close(pipes.near)
            raise
        return pipes

    def request(self, command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
        """Return the launch request for the guard; `CHANNEL` becomes the channel's descriptor."""
        keep = [self.far["channel"]] if "channel" in self.far else []
        return {
            "command": [str(keep[0]) if word == CHANNEL else word for word in command],
            "environment": environment,
            "stdout": self.far["stdout"],
            "stderr": self.far.get("stderr", self.far["stdout"]),
            "keep": keep,
        }


def _close(ends: dict[StreamName, int]) -> None:
    for end in ends.values():
        os.close(end)


class Launch:
    """The running processes of a pod.

    They end with `close`, and also when this process ends in any way: see `guard`. Not thread-safe.

    Args:
        plan: Parameters of the launch.

    Attributes:
        pids: Process ids; each process leads its own session.
        running: Indices of the processes that have not exited.

    Raises:
        LaunchError: The processes could not be started.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self.pids: list[int] = []
        self._unread = b""
        self._closed = False
        # Reports of the guard that arrived before the first call of `events`.
        self._early: list[dict[str, Any]] = []
        self._port, number = _reserve_port()
        self._coordinator = f"{LOOPBACK}:{number}"
        self._wires: list[ProcessPipes] = []
        try:
            self._guard = self._start_guard(plan)
        except OSError as error:
            self._port.close()
            for wires in self._wires:
                _close(wires.near)
            # no-catalogue: needs processes that fail
            raise LaunchError(_too_many_text(plan, error), errno=error.errno) from None
        finally:
            for wires in self._wires:
                _close(wires.far)
        self.running: set[int] = set(range(plan.size.processes))
        self._selector = selectors.DefaultSelector()
        self._listen()
        try:
            self._await_start(plan)
        except BaseException:
            self.close()
            raise

    def _start_guard(self, plan: LaunchPlan) -> subprocess.Popen[bytes]:
        for _ in range(plan.size.processes):
            self._wires.append(ProcessPipes.make(plan.one_stream, plan.channels))
        guard = subprocess.Popen(
            # Isolated from the user's site packages: the guard needs none, and starts faster.
            [sys.executable, "-I", "-S", str(_GUARD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[end for wires in self._wires for end in wires.far.values()],
            start_new_session=True,
        )
        members = []
        for number, wires in enumerate(self._wires):
            place = PodPlace(self._coordinator, plan.size.processes, number, plan.size.devices)
            environment = pod_environment(plan.environment, place)
            members.append(wires.request(plan.command, environment))
        _write_line(guard, {"cwd": plan.folder, "members": members})
        return guard

    def _listen(self) -> None:
        assert self._guard.stdout is not None
        self._selector.register(self._guard.stdout, selectors.EVENT_READ, None)
        for number, wires in enumerate(self._wires):
            for stream, end in wires.near.items():
                os.set_blocking(end, False)
                self._selector.register(end, selectors.EVENT_READ, (number, stream))

    def _await_start(self, plan: LaunchPlan) -> None:
        while not self.pids:
            first, *self._early = self._read_guard() or [{}]
            if "failed" in first:
                # no-catalogue: needs processes that fail
                raise LaunchError(_why_not_started(plan, first), errno=first["errno"])
            self.pids = first.get("pids", [])

    def events(self, seconds: float) -> list[Event]:
        """Return new events: at least one, or none after a timeout.

        Args:
            seconds: How long to wait; 0 returns only events that are already available.
        """
        received: list[Event] = []
        reports, self._early = self._early, []
        # Update first: the guard may exit as soon as all processes have.
        self.running -= {event["ended"] for event in reports if "ended" in event}
        # A stopped guard would report no exit; to one that runs the signal is nothing.
        self._guard.send_signal(signal.SIGCONT)
        for key, _ in self._selector.select(0.0 if reports else max(0.0, seconds)):
            if key.data is None:
                reports += self._read_guard()
            else:
                received.append(self._read(key.fd, *key.data))
        # Output of a process precedes its exit.
        stops = [StopRequest(event["stop"]) for event in reports if "stop" in event]
        ends = [ProcessExit(event["ended"], event["code"]) for event in reports if "ended" in event]
        self.running -= {end.process for end in ends}
        return [*received, *stops, *ends]

    def rest(self) -> list[Event]:
        """Terminate all remaining processes and return the remaining events."""
        self._end_guard()
        received: list[Event] = []
        while more := self.events(0):
            received += more
        return received

    def _read(self, source: int, number: int, name: StreamName) -> OutputChunk:
        try:
            text = os.read(source, _CHUNK)
        except (ConnectionResetError, BrokenPipeError):
            text = b""
        if not text:
            self._selector.unregister(source)
        return OutputChunk(number, name, text)

    def _read_guard(self) -> list[dict[str, Any]]:
        assert self._guard.stdout is not None
        text = os.read(self._guard.stdout.fileno(), _CHUNK)
        if not text:
            self._selector.unregister(self._guard.stdout)
            return self._lose_guard() if self.running else []
        *lines, self._unread = (self._unread + text).split(b"\n")
        return [json.loads(line) for line in lines]

    def _lose_guard(self) -> list[dict[str, Any]]:
        """Handle the unexpected exit of the guard, and with it of its children."""
        self._kill_groups()
        if not self.pids:
            raise LaunchError(  # no-catalogue: needs processes that fail
                "the guard of the pod exited before its processes started; check whether this "
                f"command runs until Ctrl-C: {sys.executable} -I -S {_GUARD}"
            )
        return [{"ended": number, "code": -signal.SIGKILL} for number in sorted(self.running)]

    def send(self, process: int, text: bytes) -> None:
        """Write to the channel of a process.

        Raises:
            BrokenPipeError: The process has exited.
        """
        channel, left = self._wires[process].near["channel"], memoryview(text)
        os.set_blocking(channel, True)
        try:
            while left:
                left = left[os.write(channel, left) :]
        finally:
            os.set_blocking(channel, False)

    def signal(self, number: int, processes: Iterable[int] | None = None) -> None:
        """Send a signal to processes and to all children that they did not detach.

        Args:
            number: The signal.
            processes: Target processes; None means all.
        """
        to = sorted(self.running if processes is None else self.running.intersection(processes))
        # Without a guard no process is left.
        with contextlib.suppress(BrokenPipeError):
            _write_line(self._guard, {"signal": int(number), "to": to})

    def close(self) -> None:
        """Terminate all remaining processes immediately. Afterwards none of them runs."""
        if self._closed:
            return
        self._closed = True
        self._end_guard()
        assert self._guard.stdout is not None
        self._guard.stdout.close()
        self._selector.close()
        self._port.close()
        for wires in self._wires:
            _close(wires.near)

    def _end_guard(self) -> None:
        """Wait until the guard, and therefore every process, has ended."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard.send_signal(signal.SIGCONT)
        try:
            self._guard.wait(_GUARD_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._guard.returncode:
            self._kill_groups()

    def _kill_groups(self) -> None:
        """Kill the processes that the guard could not kill."""
        for number in self.running:
            if number < len(self.pids):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pids[number], signal.SIGKILL)
        # Detached children still have the environment of the pod.
        for pid in _processes_with(f"{POD_COORDINATOR}={self._coordinator}"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reserve_port() -> tuple[socket.socket, int]:
    """Return a free port on the loopback address for the coordinator, and the socket that holds it.

    On Linux the port stays reserved until the socket is closed: the coordinator can listen on it
    meanwhile, because both set SO_REUSEPORT, and the kernel assigns it to no other process. On
    other systems it is released at once, and another process may take it first.
    """
    holder = socket.socket()
    if sys.platform == "linux":
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((LOOPBACK, 0))
    number = holder.getsockname()[1]
    if sys.platform != "linux":
        holder.close()
    return holder, number


def _processes_with(variable: str) -> list[int]:
    """Return the processes with a variable in their environment; empty on systems without /proc."""
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in environment.read_bytes().split(b"\0"):
                pids.append(int(environment.parent.name))
    return pids


def _write_line(guard: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
    assert guard.stdin is not None
    guard.stdin.write(json.dumps(request).encode() + b"\n")
    guard.stdin.flush()


def _too_many_text(plan: LaunchPlan, error: OSError) -> str:
    return (
        f"a pod of {plan.size.processes:,} processes cannot be started ({error.strerror}): each "
        "needs several open files and the memory of a JAX process; reduce the number of "
        "processes, or raise the limit of the shell: ulimit -n 65536"
    )


def _why_not_started(plan: LaunchPlan, event: Mapping[str, Any]) -> str:
    program, reason = plan.command[0], os.strerror(event["errno"] or 0)
    if plan.folder is not None and not os.path.isdir(plan.folder):
        return f"the working directory {plan.folder!r} of {program!r} does not exist"
    problem = f"{program!r} cannot be started: {reason}"
    if event["errno"] == errno.ENOENT:
        problem = f"program {program!r} was not found on the PATH"
    advice = "write the command as a shell would find it: python script.py, or python -m package"
    if program.endswith(".py"):
        advice = f"a Python script is started by Python: python {program}"
    return f"{problem}; {advice}"
