"""Launcher of the processes of a pod: start, events and termination."""

import contextlib
import errno
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from xlashard.config import POD_COORDINATOR, PodPlace
from xlashard.errors import LaunchError
from xlashard.testing.emulated_devices import LOOPBACK, pod_environment
from xlashard.testing.pipes import Port, ProcessPipes, StreamName

_GUARD = Path(__file__).with_name("guard.py")
_CHUNK = 1 << 16
# Longer than the guard needs to kill all processes.
_GUARD_TIMEOUT = 15.0


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
    """Output of a process.

    Attributes:
        process: Index of the process.
        stream: The stream; "stdout" for both if they are merged.
        text: The bytes; empty at the end of the stream.
    """

    process: int
    stream: StreamName
    text: bytes


@dataclass(frozen=True)
class ChannelData:
    """Data that a process sent through its channel.

    Attributes:
        process: Index of the process.
        text: The bytes received so far; empty at the end.
    """

    process: int
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


type Event = OutputChunk | ChannelData | ProcessExit


@dataclass(frozen=True)
class LaunchPlan:
    """Parameters of a launch.

    Attributes:
        command: Command of each process.
        size: Number of processes, and of devices per process.
        environment: Base environment, to which the variables of the pod are added.
        folder: Working directory; None means that of this process.
        one_stream: Whether standard output and standard error are merged in the order of writing.
        channels: Whether each process gets a socket to the launcher. Its descriptor replaces the
            word `CHANNEL` in the command.
    """

    command: Sequence[str]
    size: PodSize
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str | None = None
    one_stream: bool = False
    channels: bool = False


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
        # Reserved for the lifetime of the pod, so that no other process takes the port.
        self._port = Port()
        self._coordinator = f"{LOOPBACK}:{self._port.number}"
        self._wires: list[ProcessPipes] = []
        try:
            self._guard = self._start_guard(plan)
        except OSError as error:
            self._port.release()
            for wires in self._wires:
                wires.close_near_ends()
            # no-catalogue: needs processes that fail
            raise LaunchError(_too_many_text(plan, error), errno=error.errno) from None
        finally:
            for wires in self._wires:
                wires.close_far_ends()
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
            pass_fds=[end for wires in self._wires for end in wires.far_ends],
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
            for stream, end in wires.outputs.items():
                os.set_blocking(end, False)
                self._selector.register(end, selectors.EVENT_READ, (number, stream))
            if wires.channel is not None:
                wires.channel.setblocking(False)
                self._selector.register(wires.channel, selectors.EVENT_READ, (number, "channel"))

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
        self.running -= {event["ended"] for event in reports}
        for key, _ in self._selector.select(0.0 if reports else max(0.0, seconds)):
            if key.data is None:
                reports += self._read_guard()
            else:
                received.append(self._read(key.fileobj, *key.data))
        # Output of a process precedes its exit.
        ends = [ProcessExit(event["ended"], event["code"]) for event in reports]
        self.running -= {end.process for end in ends}
        return [*received, *ends]

    def rest(self) -> list[Event]:
        """Terminate all remaining processes and return the remaining events."""
        self._end_guard()
        received: list[Event] = []
        while more := self.events(0):
            received += more
        return received

    def _read(self, source: Any, number: int, name: str) -> Event:
        try:
            text = source.recv(_CHUNK) if name == "channel" else os.read(source, _CHUNK)
        except (ConnectionResetError, BrokenPipeError):
            text = b""
        if not text:
            self._selector.unregister(source)
        if name == "channel":
            return ChannelData(number, text)
        return OutputChunk(number, "stderr" if name == "stderr" else "stdout", text)

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
        channel = self._wires[process].channel
        assert channel is not None
        channel.setblocking(True)
        try:
            channel.sendall(text)
        finally:
            channel.setblocking(False)

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
        self._port.release()
        for wires in self._wires:
            wires.close_near_ends()

    def _end_guard(self) -> None:
        """Wait until the guard, and therefore every process, has ended."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
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
    if event["errno"] == errno.ENOENT:
        return f"program {program!r} was not found on the PATH; {_advice(program)}"
    return f"{program!r} cannot be started: {reason}; {_advice(program)}"


def _advice(program: str) -> str:
    if program.endswith(".py"):
        return f"a Python script is started by Python: python {program}"
    return "write the command as a shell would find it: python script.py, or python -m package"
