"""A job on all workers: starting, following, stopping it, and restarts after a preemption."""

import contextlib
import enum
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xlashard.cli.cloud.cloud_settings import check_command
from xlashard.cli.cloud.session import Session, backoff
from xlashard.cli.cloud.tpu import (
    check_all,
    create,
    delete,
    lost_reason,
    ready_status,
    run_on_all,
    set_up,
    worker_script,
)
from xlashard.errors import CloudError, counted
from xlashard.multihost import GONE_EXIT_CODE
from xlashard.pods.testing.pod_command import as_shown
from xlashard.pods.testing.supervision import last_lines
from xlashard.support.background import end_process, start_background

# Google Cloud reports a preemption some seconds after the VM is gone.
_SETTLES = 60.0


_LONGEST_PAUSE = 600.0


INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_LAST_LINES = 20
# Time for the other workers to end by themselves when one has failed, in seconds.
_OTHERS = 5.0
# Time for the last output to arrive when all workers have ended, in seconds.
_LAST_OUTPUT = 10.0
_END = re.compile(rb"^job ended with exit code (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class ExitStatus:
    """End of a job on one worker, or on all of them.

    Attributes:
        code: Exit code.
        unreachable: Reason why the worker or the TPU is gone; empty if the job itself has ended.
        worker: Number of the worker.
    """

    code: int
    unreachable: str = ""
    worker: int = 0


type _Ends = queue.SimpleQueue[ExitStatus]


def run(session: Session) -> int:
    """Install the code on all workers, run the command there, and follow it to its end.

    Returns:
        The exit code of the worker that failed first; 130 after Ctrl-C, which stops the job.

    Raises:
        CloudError: The TPU is not ready, or the job could not be started.
    """
    command = check_command(session.settings.run.command)
    workers = range(len(ready_status(session).addresses))
    set_up(session, workers)
    return run_job(session, workers, command).code


def logs(session: Session) -> int:
    """Follow the job that was started last, from its first line; Ctrl-C leaves it running.

    Raises:
        CloudError: The TPU is not ready, or has run no job.
    """
    workers = range(len(ready_status(session).addresses))
    results = run_on_all(session, workers[:1], worker_script("newest"), "look for a job on")
    check_all(results)
    job = "NEWEST" if session.runner.dry else results[0].stdout.strip()
    if not job:
        tpu = session.settings.tpu.name
        # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
        raise CloudError(
            f"{tpu} has run no job yet. Start one:\n"
            f"  python tpu_scripts/run.py --name={tpu} --command=COMMAND"
        )
    return _follow(session, workers, job, stop_on_interrupt=False).code


def run_job(session: Session, workers: Sequence[int], command: str) -> ExitStatus:
    """Start a job on workers that are set up, and follow it to its end.

    The first worker that fails stops the job on the others.

    Raises:
        CloudError: The job could not be started.
    """
    job = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{time.time_ns() % 10**9:09d}"
    script = worker_script("start", job, f"{session.settings.run.grace:.0f}", command)
    try:
        check_all(run_on_all(session, workers, script, "start the job on"))
    except BaseException:
        _stop(session, workers)
        raise
    return _follow(session, workers, job, stop_on_interrupt=True)


def _stop(session: Session, workers: Sequence[int]) -> None:
    script = worker_script("stop", f"{session.settings.run.grace:.0f}")
    for done in run_on_all(session, workers, script, "stop the job on"):
        if done.code:
            session.report(f"could not {done.command.purpose}: {done.last_error}")


def _follow(
    session: Session, workers: Sequence[int], job: str, stop_on_interrupt: bool
) -> ExitStatus:
    folder = Path(session.settings.run.logs) / session.settings.tpu.name / job
    followers = [_Follower(session, worker, job, folder) for worker in workers]
    if session.runner.dry:
        for follower in followers:
            follower.connect()
        return ExitStatus(0)
    session.report(f"following {counted(len(workers), 'worker')}; logs in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    ends: _Ends = queue.SimpleQueue()
    try:
        for follower in followers:
            follower.start(ends)
        status = _wait(session, workers, ends, stop_others=stop_on_interrupt)
    except KeyboardInterrupt:
        status = ExitStatus(INTERRUPTED)
        if stop_on_interrupt:
            session.report("stopping the job on all workers; Ctrl-C again leaves it running")
            _stop(session, workers)
            _take(ends, len(workers), _LAST_OUTPUT)
    finally:
        for follower in followers:
            follower.cancel()
    session.report(_summary(status, folder, len(workers)))
    return status


def _wait(session: Session, workers: Sequence[int], ends: _Ends, stop_others: bool) -> ExitStatus:
    """Wait until all workers have ended, one has failed, or the TPU is gone."""
    poll = session.settings.wait.poll
    next_query = time.monotonic() + poll
    for left in reversed(range(len(workers))):
        while not (ended := _take(ends, 1, poll)):
            if time.monotonic() >= next_query:
                if lost := lost_reason(session):
                    return ExitStatus(1, lost)
                next_query = time.monotonic() + poll
        if ended[0].code == 0:
            continue
        left -= len(_take(ends, left, min(_OTHERS, session.settings.run.grace)))
        if lost := lost_reason(session):
            return ExitStatus(ended[0].code, lost)
        if left and stop_others:
            session.report(f"worker {ended[0].worker} has failed; stopping the others")
            _stop(session, workers)
            _take(ends, left, _LAST_OUTPUT)
        return ended[0]
    return ExitStatus(0)


def _take(ends: _Ends, count: int, seconds: float) -> list[ExitStatus]:
    """Return the ends of workers, up to a count, that come within some seconds."""
    deadline, received = time.monotonic() + seconds, []
    with contextlib.suppress(queue.Empty):
        while len(received) < count:
            received.append(ends.get(timeout=max(0.0, deadline - time.monotonic())))
    return received


def _log(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}.log"


class _Follower:
    """Follows a job on one worker in a thread, by a connection that is made again when it breaks.

    The log goes on at the byte where the connection broke.
    """

    def __init__(self, session: Session, worker: int, job: str, folder: Path) -> None:
        self._session, self._worker, self._job, self._folder = session, worker, job, folder
        self._offset = 0
        self._cancelled = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, ends: _Ends) -> None:
        """Follow the job, and put its end into a queue."""

        def follow() -> None:
            try:
                ends.put(self._follow())
            except Exception as error:  # The main thread waits for an end.
                ends.put(ExitStatus(1, str(error), self._worker))

        self._thread = start_background(follow, self.cancel, f"worker {self._worker}")

    def cancel(self) -> None:
        """Stop following; the job goes on."""
        self._cancelled.set()
        if self._process is not None:
            end_process(self._process)
        if self._thread is not None:
            self._thread.join(_LAST_OUTPUT)

    def _follow(self) -> ExitStatus:
        wait, worker = self._session.settings.wait, self._worker
        _log(self._folder, worker).write_bytes(b"")
        failures, waits = 0, backoff(wait.ssh_wait)
        while not self._cancelled.is_set():
            before = self._offset
            errors = self.connect()
            if match := _END.search(errors):
                return ExitStatus(int(match[1]), worker=worker)
            if self._offset > before:
                failures, waits = 0, backoff(wait.ssh_wait)
            failures += 1
            if failures >= wait.ssh_tries:
                reason = (errors.decode(errors="replace").strip().splitlines() or ["no error"])[-1]
                return ExitStatus(1, f"worker {worker} is unreachable ({reason})", worker)
            self._cancelled.wait(next(waits))
        return ExitStatus(1, "it was not followed to its end", worker)

    def connect(self) -> bytes:
        """Follow by one connection; return its standard error."""
        script = worker_script("follow", self._job, str(self._offset))
        command = self._session.gcloud.ssh(self._worker, script, "follow")
        if self._session.runner.dry:
            self._session.runner.run(command)
            return b""
        path = self._folder / f"ssh-{self._worker}.log"
        with path.open("wb") as errors, _log(self._folder, self._worker).open("ab", 0) as log:
            process = self._process = self._session.runner.start(command, errors)
            assert process is not None and process.stdout is not None
            if self._cancelled.is_set():  # Since before the process was started.
                end_process(process)
            with process:
                for line in process.stdout:
                    self._offset += len(line)
                    log.write(line)
                    sys.stdout.write(f"[{self._worker}] {as_shown(line.rstrip(b'\n'))}\n")
                    sys.stdout.flush()
        return path.read_bytes()


def _summary(status: ExitStatus, folder: Path, workers: int) -> str:
    if status.code == 0:
        return f"done on {counted(workers, 'worker')}; logs in {folder}"
    if status.code == INTERRUPTED:
        return f"interrupted; logs in {folder}"
    if status.unreachable:
        return f"the job was lost: {status.unreachable}"
    path = _log(folder, status.worker)
    lines = last_lines(path.read_text(encoding="utf-8", errors="replace"), _LAST_LINES)
    return f"worker {status.worker} failed first: exit code {status.code}\n--- {path} ---\n{lines}"


class Next(enum.Enum):
    """Reaction to the end of a job."""

    STOP = "stop"
    RESTART = "restart the job"
    RECREATE = "create the TPU again"


def keep_running(
    session: Session,
    make: Callable[[], None],
    run: Callable[[int], tuple[int, Next]],
    remove: Callable[[], object],
) -> int:
    """Create a TPU and run a job on it, again and again until the job is done.

    Args:
        session: Limits, and pauses.
        make: Creates the TPU and sets it up.
        run: Runs the job for the n-th time; returns its exit code and the reaction to it.
        remove: Deletes the TPU.

    Returns:
        The exit code of the job; 1 if the limit of starts was reached before it ended.
    """
    limits = session.settings.watch
    pauses = backoff(limits.pause, _LONGEST_PAUSE)
    code, reaction = 1, Next.RECREATE
    for attempt in range(1, limits.tries + 1):
        try:
            if reaction is Next.RECREATE:
                make()
        except CloudError as error:
            if error.code == 2:
                raise  # The request is invalid.
            session.report(f"could not create the TPU: {error}")
        else:
            pauses = backoff(limits.pause, _LONGEST_PAUSE)
            session.report(f"start {attempt} of at most {limits.tries}")
            code, reaction = run(attempt)
        if reaction is Next.STOP:
            break
        if reaction is Next.RECREATE and attempt < limits.tries:
            remove()
            pause = next(pauses)
            session.report(f"creating the TPU again in {pause:g} s")
            session.sleep(pause)
    else:
        session.report(f"gave up after {limits.tries} attempts")
        code = code or 1
    if not limits.keep:
        remove()
    return code


def watch(session: Session) -> int:
    """Create a TPU and run the job there; again when the TPU is preempted.

    Returns:
        The exit code of the job.

    Raises:
        CloudError: The request is invalid, or the TPU could not be deleted.
    """
    command = check_command(session.settings.run.command)
    if "xlashard train" in command and "resume" not in command:
        session.report(
            "after a preemption the command starts from step 0; add --auto-resume to xlashard train"
        )

    def make() -> None:
        create(session)
        set_up(session, range(len(ready_status(session).addresses)))

    def run(attempt: int) -> tuple[int, Next]:
        script = f"export LAUNCHER_ATTEMPT={attempt}\n{command}"
        try:
            workers = range(len(ready_status(session).addresses))
            status = run_job(session, workers, script)
        except CloudError as error:
            session.report(str(error))
            return error.code, Next.RECREATE if lost_reason(session) else Next.STOP
        return status.code, _reaction(session, status)

    try:
        return keep_running(session, make, run, lambda: delete(session))
    except KeyboardInterrupt:
        if not session.settings.watch.keep:
            session.report("interrupted; deleting the TPU")
            delete(session)
        raise


def _reaction(session: Session, status: ExitStatus) -> Next:
    if session.runner.dry or status.code in (0, INTERRUPTED):
        return Next.STOP
    # `remote/worker.sh` reports the same code for a job that was killed.
    if not status.unreachable and status.code != GONE_EXIT_CODE:
        return Next.STOP
    deadline = time.monotonic() + min(_SETTLES, 4 * session.settings.wait.poll)
    while not (lost := lost_reason(session)):
        if time.monotonic() >= deadline:
            session.report("a worker was lost, but the TPU is ready: restarting the job")
            return Next.RESTART
        session.sleep(session.settings.wait.poll)
    session.report(f"the TPU was preempted: {lost}")
    return Next.RECREATE
