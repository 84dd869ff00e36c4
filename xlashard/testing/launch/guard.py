"""Starts the processes of a pod and sees to it that none of them outlives it.

A program of its own, run by path with `python -I -S guard.py`, so it imports only what comes with
Python and starts in milliseconds. It stands between the launcher and the processes because of what
a launcher can't do itself:

- A launcher that is killed runs no code any more. The guard waits on a pipe whose other end only
  the launcher holds, and ends everything when that closes.
- Asking Linux to kill a child with its parent (`PR_SET_PDEATHSIG`) takes a step between fork and
  exec, which is not safe in a process with threads, as one that has imported JAX is. The guard has
  one thread. Should it be killed itself, the kernel ends its children.
- What the processes start, and leave behind or detach, becomes the guard's own child
  (`PR_SET_CHILD_SUBREAPER`), so it can find it.

The launcher writes JSON lines to its standard input: first the request, then signals to send. It
writes JSON lines to its standard output: the process ids, and how each process ended.
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
# Processes in an uninterruptible call of the kernel die when it returns.
_PATIENCE = 10.0


def _load_prctl() -> Callable[..., int] | None:
    return ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Guard:
    """The processes, from their start to their end."""

    def __init__(self) -> None:
        self._prctl = _load_prctl()
        self._launcher = os.getppid()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        self._unread = b""
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # It has a session of its own, so no terminal sends these: somebody means the guard.
        self._told_to_end = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        if self._prctl is not None:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _end(self, *_: object) -> None:
        self._told_to_end = True

    def run(self) -> None:
        """Works until all processes are gone, or their launcher is."""
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
                self._say(failed=number, errno=error.errno, filename=str(error.filename))
                return None
            for descriptor in set(descriptors):
                os.close(descriptor)
            self._processes.append(process)
            self._running.add(number)
        # Whoever is told of the processes may end them: from here on the order of ends is known.
        waiter = _Waiter([sys.stdin.fileno(), self._wake], self._processes)
        self._say(pids=[process.pid for process in self._processes])
        return waiter

    def _die_with_the_guard(self, guard: int) -> Callable[[], None] | None:
        prctl = self._prctl
        if prctl is None:
            return None

        def prepare() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:  # It was killed before the line above.
                os._exit(1)

        return prepare

    def _watch(self, waiter: "_Waiter") -> None:
        while self._running and not self._told_to_end and os.getppid() == self._launcher:
            # The second is for a launcher whose pipe another process of its holds open.
            ready, ended = waiter.wait(1.0)
            if self._wake in ready:
                os.read(self._wake, 4096)
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
                self._say(ended=number, code=code)

    def _send(self, number: int, to: list[int]) -> None:
        for process in to:
            if process in self._running:
                _signal_group(self._processes[process].pid, number)

    def _read(self) -> list[dict[str, Any]] | None:
        """The whole lines that have come; None when the launcher is gone."""
        found = os.read(sys.stdin.fileno(), 1 << 16)
        if not found:
            return None
        *lines, self._unread = (self._unread + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def _say(self, **event: object) -> None:
        try:
            os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            self._told_to_end = True

    def _kill_everything(self) -> None:
        # Elsewhere than on Linux, what a process left behind is found by its group alone.
        groups = self._running if self._prctl is not None else range(len(self._processes))
        for number in groups:
            _signal_group(self._processes[number].pid, signal.SIGKILL)
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            for pid in _children():
                _signal_group(pid, signal.SIGKILL)
                _signal(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            # Woken by the end of a child.
            select.select([self._wake], [], [], 0.05)


class _Waiter:
    """Waits for descriptors, and for processes to end.

    Which process ended first matters, and a busy machine may let the guard run only when several
    have. Linux lists what is ready in the order in which it became so.

    Args:
        descriptors: To read from.
        processes: That may end.
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
        """The descriptors that are ready, and the processes that may have ended, in order."""
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
    """The processes whose parent this one is, by now."""
    if sys.platform != "linux":
        return []
    me, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                # The program's name is in brackets and may hold anything, also brackets.
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == me:
            found.append(int(name))
    return found


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


if __name__ == "__main__":
    Guard().run()
