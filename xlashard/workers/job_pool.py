"""Pool of worker processes for jobs that may crash, such as compilations.

Each worker runs one job after another. A worker that dies, exceeds its memory or times out fails
its current job only, and is replaced. All workers end with the pool.
"""

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import IO, Any, Self

from xlashard.support.background import at_exit, end_process, python_path, read_process_stat
from xlashard.support.formatting import in_bytes, signal_name
from xlashard.support.host_memory import read_available_memory
from xlashard.support.lending import repeat_words
from xlashard.workers.dump_folder import temporary_dump_folder

_WORKER = Path(__file__).with_name("job_worker.py")
FAILED = "failed"
"""Outcome of a job without a result."""
TIMED_OUT = "it timed out after"
"""Start of the reason for a job that takes too long."""
# Polling interval, in seconds.
_TICK = 0.5
# Memory of a worker with a program of usual size.
_USUAL_BYTES = 3 * 2**30
_SHOWN_LINES = 4
_LONGEST = 500
_CHECK = "Check failed: "
_PASS = re.compile(r"xla::(?:\w+::)*(\w+)::RunImpl\(\)")
_PIPELINE = "HloPassPipeline"


@dataclass(frozen=True)
class WorkerJob:
    """Job for a worker process.

    Attributes:
        key: Unique key.
        runner: `module:function` that takes the request and returns a dict.
        request: JSON value.
    """

    key: str
    runner: str
    request: dict[str, Any]


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of the worker processes.

    Attributes:
        workers: Number of worker processes.
        bytes: Host memory per worker; 0 for no limit.
        seconds: Timeout per job; 0 for no limit.
    """

    workers: int
    bytes: int = 0
    seconds: float = 0.0


def is_worker() -> bool:
    """Return True in a worker process of a pool."""
    return getattr(sys.modules.get("__main__"), "__file__", None) == str(_WORKER)


def default_limits(workers: int | None = None, seconds: float = 0.0) -> WorkerLimits:
    """Return limits for as many workers as CPUs and memory allow.

    Args:
        workers: Number of workers; None to choose.
        seconds: Timeout per job; 0 for no limit.
    """
    processors = len(os.sched_getaffinity(0))
    free = read_available_memory()
    if workers is None:
        workers = max(1, min(processors, int(free // _USUAL_BYTES)) if free else processors)
    return WorkerLimits(workers, int(free * 0.9 / workers), seconds)


class JobPool:
    """Worker processes, kept from one series of jobs to the next.

    They are started by the first jobs. A context manager, which ends them.

    Args:
        limits: Limits of the processes.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        _POOLS.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in list(self._workers):
            self._remove(worker)
        self._selector.close()

    def leave_to_parent(self) -> None:
        """Forget the processes of the parent, in its forked child; the child starts its own."""
        self._workers.clear()
        # To unregister a pipe would also remove it from the parent's selector.
        self._selector.close()
        self._selector = selectors.DefaultSelector()

    def run(self, jobs: Iterable[WorkerJob]) -> Generator[tuple[WorkerJob, dict[str, Any]]]:
        """Run jobs and yield each result as soon as it is available.

        A failed job yields `{"outcome": "failed", "reason": ..., "seconds": ...}`, another one its
        result with `log`, what its process wrote to standard error. Closing the iterator ends the
        processes that are at work.

        Args:
            jobs: The jobs. Each is taken from the iterable when a worker is idle.

        Raises:
            OSError: If no process can be started.
        """
        waiting, more = iter(jobs), True
        try:
            while True:
                while more and (len(self._busy()) < self._limits.workers):
                    job = next(waiting, None)
                    more = job is not None
                    if job is not None:
                        self._idle().give(job)
                if not self._busy():
                    return
                yield from self._answers()
        finally:
            for worker in self._busy():
                self._remove(worker)

    def _answers(self) -> Iterator[tuple[WorkerJob, dict[str, Any]]]:
        """Yield the results that are available soon, and remove workers that ended."""
        ready = {key.data for key, _ in self._selector.select(_TICK)}
        for worker in list(self._workers):
            answer = worker.answer() if worker in ready else worker.overdue(self._limits)
            if answer is not None and worker.job is not None:
                if answer.get("outcome") == FAILED:
                    answer["seconds"] = worker.seconds
                yield worker.done(), answer
            if not worker.is_alive:
                self._remove(worker)

    def _busy(self) -> "list[_Worker]":
        return [worker for worker in self._workers if worker.job is not None]

    def _idle(self) -> "_Worker":
        """Return an idle worker; start one if all are busy."""
        for worker in list(self._workers):
            if worker.job is None and worker.has_ended:
                self._remove(worker)
            elif worker.job is None:
                return worker
        worker = _Worker()
        self._workers.append(worker)
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        return worker

    def _remove(self, worker: "_Worker") -> None:
        self._selector.unregister(worker.answers)
        self._workers.remove(worker)
        worker.close()


_POOLS: weakref.WeakSet[JobPool] = weakref.WeakSet()
"""Pools of this process, and of its parents."""


def _close_pools() -> None:
    for pool in list(_POOLS):
        pool.close()


def _begin_child() -> None:
    for pool in list(_POOLS):
        pool.leave_to_parent()
    at_exit(_close_pools)


at_exit(_close_pools)
os.register_at_fork(after_in_child=_begin_child)


def _open_log() -> IO[bytes]:
    """Open the file of a worker's standard error; in memory, since a full disk would cut it off."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("log"), "w+b")
    return tempfile.TemporaryFile()


# Seconds after which a worker that is stopped, or that uses no CPU, has failed. A stopped process
# may be continued soon; one that computes nothing may read a file over a slow network.
_STOPPED_SECONDS, _IDLE_SECONDS = 60.0, 600.0
_STOPPED_STATES = "Tt"


class _Stall:
    """Time that a worker spends stopped, or without computing."""

    def __init__(self) -> None:
        self._seen = time.monotonic()
        self._cpu_ticks = -1
        self._stopped = self._idle = 0.0

    def observe(self, pid: int) -> str:
        """Look at a process; return why it is given up, empty if it isn't.

        Args:
            pid: Its process id.
        """
        now = time.monotonic()
        # This process may have been stopped, too.
        passed, self._seen = min(now - self._seen, 2 * _TICK), now
        state, ticks = _read_activity(pid)
        self._stopped = self._stopped + passed if state in _STOPPED_STATES else 0.0
        is_idle, self._cpu_ticks = ticks == self._cpu_ticks, ticks
        self._idle = self._idle + passed if is_idle else 0.0
        if self._stopped > _STOPPED_SECONDS:
            return f"its process {pid} was stopped for {_STOPPED_SECONDS:g} s, as by SIGSTOP"
        if self._idle > _IDLE_SECONDS:
            return f"its process {pid} used no CPU for {_IDLE_SECONDS:g} s"
        return ""


def _read_activity(pid: int) -> tuple[str, int]:
    """Return the state of a process, and the CPU time of it and its children, in clock ticks.

    Without /proc it is always computing.
    """
    try:
        fields = [read_process_stat(each) for each in (pid, *_read_children(pid))]
    except OSError:
        return "R", time.monotonic_ns()
    return fields[0][0], sum(sum(map(int, each[11:15])) for each in fields)


def _read_children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


class _Worker:
    """Worker process."""

    def __init__(self) -> None:
        self.job: WorkerJob | None = None
        self.is_alive = True
        self._started = 0.0
        self._stall = _Stall()
        self._unread = b""
        if not sys.executable or getattr(sys, "frozen", False):
            # no-catalogue: needs a program that Python is a part of
            raise OSError(f"this process has no Python interpreter to start: {sys.executable!r}")
        self._errors = _open_log()
        self._folders = contextlib.ExitStack()
        try:
            logs = self._folders.enter_context(temporary_dump_folder())
            self._process = subprocess.Popen(
                # Started by path, without importing the package.
                [sys.executable, "-P", *repeat_words(), str(_WORKER), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(logs),
                # The parent process handles Ctrl-C.
                start_new_session=True,
            )
        except BaseException:
            self._errors.close()
            self._folders.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs, self.answers = self._process.stdin, self._process.stdout
        os.set_blocking(self.answers.fileno(), False)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    @property
    def seconds(self) -> float:
        """Seconds since the process got its job."""
        return time.monotonic() - self._started

    def give(self, job: WorkerJob) -> None:
        """Send a job to the process."""
        self.job, self._started = job, time.monotonic()
        self._stall = _Stall()
        self._errors.truncate(0)
        self._errors.seek(0)
        with contextlib.suppress(BrokenPipeError):  # `answer` handles the end of the process
            self._jobs.write(f"{json.dumps(asdict(job))}\n".encode())
            self._jobs.flush()

    def done(self) -> WorkerJob:
        """Return the finished job and become idle."""
        assert self.job is not None
        job, self.job = self.job, None
        return job

    def answer(self) -> dict[str, Any] | None:
        """Return the result of the job, or None if it is incomplete."""
        part = self.answers.read()
        if part:
            self._unread += part
            line, end, rest = self._unread.partition(b"\n")
            if not end:
                return None
            self._unread = rest
            return {**json.loads(line), "log": self._log()}
        if part is None:
            return None
        code = self._process.wait()
        self.is_alive = False
        stderr = self._last_words()
        return _failure(f"the worker process ended with {_code_text(code)}{stderr}")

    def overdue(self, limits: WorkerLimits) -> dict[str, Any] | None:
        """Kill the process if it exceeds a limit, and return the failure."""
        if self.job is None:
            return None
        nbytes = self._resident_bytes()
        if limits.bytes and nbytes > limits.bytes:
            self._end()
            share = in_bytes(limits.bytes)
            return _failure(f"compiling it exceeded {share} of this machine's memory")
        if limits.seconds and self.seconds > limits.seconds:
            self._end()
            return _failure(f"{TIMED_OUT} {limits.seconds:g} s")
        stalled = self._stall.observe(self._process.pid)
        if stalled:
            self._end()
            return _failure(stalled)
        return None

    def close(self) -> None:
        """Kill the process and everything that it started."""
        self._end()
        self._process.wait()
        self._errors.close()
        self._folders.close()
        for pipe in (self._jobs, self.answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _end(self) -> None:
        self.is_alive = False
        end_process(self._process)

    def _resident_bytes(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm") as statm:
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def _log(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _last_words(self) -> str:
        lines = self._log().split("\n")
        last = [line.strip() for line in lines if line.strip()][-_SHOWN_LINES:]
        # XLA's reason to abort, among its stack.
        checks = [line[line.index(_CHECK) :].strip() for line in lines if _CHECK in line]
        last = checks[:1] or last
        return f": {shorten(' / '.join(last), _LONGEST)}{_pass_text(lines)}" if last else ""


def _pass_text(lines: Sequence[str]) -> str:
    """Return the pass of XLA's pipeline that its stack names, as a clause."""
    outermost = ""
    for line in lines:
        if _PIPELINE in line:
            break
        frame = _PASS.search(line)
        outermost = outermost if frame is None else frame[1]
    # Passes are named after their classes.
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", outermost).lower()
    return f", in the pass {name}" if name else ""


def _environment(logs: Path) -> dict[str, str]:
    """Return the environment of a worker process, which compiles for TPUs without using one."""
    # libtpu's warnings are in the log of a job. It writes files, too, beside other temporary files
    # if there is no folder for them.
    levels = {"TPU_STDERR_LOG_LEVEL": "1", "TPU_MIN_LOG_LEVEL": "1"}
    log = {**levels, "TPU_LOG_DIR": str(logs)}
    return {**os.environ, **log, "JAX_PLATFORMS": "cpu", "PYTHONPATH": python_path()}


def _failure(reason: str) -> dict[str, Any]:
    return {"outcome": FAILED, "reason": reason}


def _code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    if -code == signal.SIGKILL:
        return f"{name}, as when the machine runs out of memory"
    return name
