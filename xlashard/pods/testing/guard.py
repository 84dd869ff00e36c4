"""Guard that starts the processes of a pod and ensures that none of them outlives it.

It is a program of its own, run by path with `python -I -S guard.py`, so it imports only the
standard library and starts in milliseconds. It runs between the launcher and the processes, because
a launcher cannot do the following itself:

- A launcher that is killed runs no more code. The guard waits on a pipe whose other end only the
  launcher holds, and terminates all processes when the pipe closes.
- Linux can kill a child with its parent (`PR_SET_PDEATHSIG`), but the setup runs between fork and
  exec, which is unsafe in a process with threads, such as one that has imported JAX. The guard has
  one thread. If the guard itself is killed, the kernel kills its children.
- Processes that the children leave behind or detach become children of the guard
  (`PR_SET_CHILD_SUBREAPER`), so it can find them.

The launcher writes JSON lines to the guard's standard input: first the request, then signals to
send. The guard writes JSON lines to its standard output: the process ids, the exit of each process,
and signals that ask the guard itself to stop. A batch system may send these to the processes of a
job alone or all at once, and the launcher alone decides how much time the processes have.
"""

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Processes in an uninterruptible system call die when it returns.
_KILL_TIMEOUT = 10.0


class Guard:
    """The processes, from start to exit."""

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        self._launcher = os.getppid()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        self._unread = b""
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._launcher_is_gone = False
        # The guard has its own session, so no terminal sends these signals.
        self._stop_signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._stop_signals.append(number))
        if self._prctl is not None:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            # A guard that is stopped (SIGSTOP) continues when its launcher ends, and ends as well.
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    def run(self) -> None:
        """Run until all processes, or the launcher, have exited."""
        try:
            requests: list[dict[str, Any]] | None = []
            while requests == []:
                requests = self._read()
            waiter = self._start(requests[0]) if requests else None
            if waiter is not None:
                self._watch(waiter)
        finally:
            self._kill_everything()

    def _start(self, request: dict[str, Any]) -> "_Waiter | None":
        for number, member in enumerate(request["members"]):
            descriptors = [member["stdout"], member["stderr"], *member["keep"]]
            try:
                process = subprocess.Popen(
                    member["command"],
                    env=member["environment"],
                    cwd=request["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=member["stdout"],
                    stderr=member["stderr"],
                    pass_fds=member["keep"],
                    start_new_session=True,
                    preexec_fn=self._die_with_the_guard(os.getpid()),
                )
            except OSError as error:
                self._send_event(failed=number, errno=error.errno, filename=str(error.filename))
                return None
            for descriptor in set(descriptors):
                os.close(descriptor)
            self._processes.append(process)
            self._running.add(number)
        # The launcher may terminate processes as soon as it has their ids: track exits first.
        waiter = _Waiter([sys.stdin.fileno(), self._wake], self._processes)
        self._send_event(pids=[process.pid for process in self._processes])
        return waiter

    def _die_with_the_guard(self, guard: int) -> Callable[[], None] | None:
        prctl = self._prctl
        if prctl is None:
            return None

        def prepare() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:  # The guard was killed before the line above.
                os._exit(1)

        return prepare

    def _watch(self, waiter: "_Waiter") -> None:
        while self._running and not self._launcher_is_gone and os.getppid() == self._launcher:
            # The timeout detects a launcher whose pipe another of its processes holds open.
            ready, ended = waiter.wait(1.0)
            if self._wake in ready:
                os.read(self._wake, 4096)
            while self._stop_signals:
                self._send_event(stop=self._stop_signals.pop(0))
            self._report(ended)
            if sys.stdin.fileno() in ready:
                requests = self._read()
                if requests is None:
                    return
                for request in requests:
                    self._send(request["signal"], request["to"])

    def _report(self, ended: list[int]) -> None:
        for number in ended:
            code = self._processes[number].poll()
            if code is not None and number in self._running:
                self._running.discard(number)
                self._send_event(ended=number, code=code)

    def _send(self, number: int, to: list[int]) -> None:
        for process in to:
            if process in self._running:
                _signal_group(self._processes[process].pid, number)

    def _read(self) -> list[dict[str, Any]] | None:
        """Return the complete lines received; None if the launcher has exited."""
        received = os.read(sys.stdin.fileno(), 1 << 16)
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def _send_event(self, **event: object) -> None:
        try:
            os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            self._launcher_is_gone = True

    def _kill_everything(self) -> None:
        # On systems other than Linux, processes left behind are found only by their group.
        groups = self._running if self._prctl is not None else range(len(self._processes))
        for number in groups:
            _signal_group(self._processes[number].pid, signal.SIGKILL)
        end = time.monotonic() + _KILL_TIMEOUT
        while time.monotonic() < end:
            for pid in _children():
                _signal_group(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            # SIGCHLD wakes the select call.
            select.select([self._wake], [], [], 0.05)


class _Waiter:
    """Waits for file descriptors and for processes to exit.

    The order of exits matters, but a busy machine may schedule the guard only after several
    processes have exited. On Linux epoll lists events in the order in which they occurred.

    Args:
        descriptors: File descriptors to read from.
        processes: Processes that may exit.
    """

    def __init__(self, descriptors: list[int], processes: list["subprocess.Popen[bytes]"]) -> None:
        self._descriptors = descriptors
        self._left = set(range(len(processes)))
        self._ends: dict[int, int] = {}
        self._epoll = None
        if sys.platform == "linux" and hasattr(os, "pidfd_open"):
            self._epoll = select.epoll()
            for descriptor in descriptors:
                self._epoll.register(descriptor, select.EPOLLIN)
            for number, process in enumerate(processes):
                end = os.pidfd_open(process.pid)
                self._ends[end] = number
                self._epoll.register(end, select.EPOLLIN)

    def wait(self, seconds: float) -> tuple[list[int], list[int]]:
        """Return the ready descriptors, and the processes that may have exited, in order."""
        if self._epoll is None:
            return select.select(self._descriptors, [], [], seconds)[0], sorted(self._left)
        ready = [descriptor for descriptor, _ in self._epoll.poll(seconds)]
        ended = [self._ends[end] for end in ready if end in self._ends]
        for end in set(ready).intersection(self._ends):
            self._epoll.unregister(end)
            os.close(end)
            del self._ends[end]
        return ready, ended


def _children() -> list[int]:
    """Return the current children of this process."""
    if sys.platform != "linux":
        return []
    me, pids = os.getpid(), []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The program name is in parentheses and may itself contain parentheses.
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == me:
            pids.append(int(name))
    return pids


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


if __name__ == "__main__":
    Guard().run()
