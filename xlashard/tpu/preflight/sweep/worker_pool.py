"""Processes that work off the jobs of a sweep side by side, and what becomes of those that don't.

Each job runs in a process that was started for the sweep and takes one after the other. A process
that dies, grows too large or takes too long costs its own job only: another one is started. When
the sweep ends in any way, so do they.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xlashard.wording import in_bytes

_WORKER = Path(__file__).with_name("sweep_worker.py")
# How often the processes are looked at, in seconds.
_TICK = 0.5
# What a process takes before it compiles anything large, and what is left to it.
_USUAL_BYTES = 3 * 2**30
_SHOWN_LINES = 4


@dataclass(frozen=True)
class SweepJob:
    """Something to find out in another process.

    Attributes:
        key: Tells it from the others.
        runner: The `module:function` that does it: takes the request, gives a dict.
        request: What JSON can say.
    """

    key: str
    runner: str
    request: dict[str, Any]


@dataclass(frozen=True)
class WorkerLimits:
    """How much the processes may take.

    Attributes:
        workers: How many there are side by side.
        bytes: Memory of this machine that each may take; 0 for no limit.
        seconds: How long a job may take; 0 for no limit.
    """

    workers: int
    bytes: int = 0
    seconds: float = 0.0


def default_limits(workers: int | None = None, seconds: float = 0.0) -> WorkerLimits:
    """As many processes as there are processors and memory for, each with its share of that.

    Args:
        workers: How many there are to be; None to choose.
        seconds: How long a job may take; 0 for no limit.
    """
    processors = len(os.sched_getaffinity(0))
    free = _free_bytes()
    if workers is None:
        workers = max(1, min(processors, int(free // _USUAL_BYTES)) if free else processors)
    return WorkerLimits(workers, int(free * 0.9 / workers), seconds)


def _free_bytes() -> int:
    """The memory that is free, as Linux says it; 0 if it doesn't."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def run_jobs(
    jobs: Sequence[SweepJob], limits: WorkerLimits
) -> Generator[tuple[SweepJob, dict[str, Any]]]:
    """Runs jobs, and gives what each has found as soon as it is known.

    What could not be found is `{"outcome": "failed", "reason": ...}`. Closing the iterator ends the
    processes.
    """
    waiting = deque(jobs)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        workers: list[_Worker] = []
        while waiting or any(w.job is not None for w in workers):
            for worker in workers:
                if worker.job is None and waiting:
                    worker.give(waiting.popleft())
            if waiting and len(workers) < limits.workers:
                worker = stack.enter_context(_Worker())
                selector.register(worker.answers, selectors.EVENT_READ, worker)
                workers.append(worker)
                worker.give(waiting.popleft())
                continue
            ready = {key.data for key, _ in selector.select(_TICK)}
            for worker in list(workers):
                found = worker.answer() if worker in ready else worker.overdue(limits)
                if found is not None and worker.job is not None:
                    yield worker.done(), found
                if not worker.is_alive:
                    selector.unregister(worker.answers)
                    workers.remove(worker)
                    worker.close()


class _Worker:
    """A process that takes jobs."""

    def __init__(self) -> None:
        self.job: SweepJob | None = None
        self.is_alive = True
        self._started = 0.0
        self._unread = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        try:
            self._process = subprocess.Popen(
                # By its path, without what stands beside it: it is there before JAX is.
                [sys.executable, "-P", str(_WORKER), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(),
                # A Ctrl-C in the terminal is meant for the sweep.
                start_new_session=True,
            )
        except BaseException:
            self._errors.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._jobs, self.answers = self._process.stdin, self._process.stdout
        os.set_blocking(self.answers.fileno(), False)

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def give(self, job: SweepJob) -> None:
        """Lets it do a job."""
        self.job, self._started = job, time.monotonic()
        self._errors.truncate(0)
        self._errors.seek(0)
        line = {"key": job.key, "runner": job.runner, "request": job.request}
        with contextlib.suppress(BrokenPipeError):  # told by its answers, which end
            self._jobs.write(f"{json.dumps(line)}\n".encode())
            self._jobs.flush()

    def done(self) -> SweepJob:
        """The job that it has done."""
        assert self.job is not None
        job, self.job = self.job, None
        return job

    def answer(self) -> dict[str, Any] | None:
        """What it has found; None if that is not all there yet."""
        part = self.answers.read()
        if part:
            self._unread += part
            line, end, rest = self._unread.partition(b"\n")
            if not end:
                return None
            self._unread = rest
            return json.loads(line)["found"]
        if part is None:
            return None
        code = self._process.wait()
        self.is_alive = False
        said = self._last_words()
        return _failure(f"its process ended with {_code_text(code)}{said}")

    def overdue(self, limits: WorkerLimits) -> dict[str, Any] | None:
        """Ends it if it takes more than it may; gives the failure then."""
        if self.job is None:
            return None
        taken = self._resident_bytes()
        if limits.bytes and taken > limits.bytes:
            self._end()
            share = in_bytes(limits.bytes)
            return _failure(f"compiling it takes more than {share} of this machine's memory")
        if limits.seconds and time.monotonic() - self._started > limits.seconds:
            self._end()
            return _failure(f"it was not found out in {limits.seconds:g} s")
        return None

    def close(self) -> None:
        """Ends it, and all that it has started."""
        self._end()
        self._process.wait()
        self._errors.close()
        for pipe in (self._jobs, self.answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _end(self) -> None:
        self.is_alive = False
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _resident_bytes(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm") as said:
                return int(said.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = [line.strip() for line in lines if line.strip()][-_SHOWN_LINES:]
        return f": {' / '.join(last)}" if last else ""


def _environment() -> dict[str, str]:
    """What its processes are started with: they compile for TPUs, and take none."""
    paths = [os.path.abspath(path) for path in sys.path]
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def _failure(reason: str) -> dict[str, Any]:
    return {"outcome": "failed", "reason": reason}


def _code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"{name}, as where the machine has no memory left"
    return name
