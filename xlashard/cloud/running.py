"""A job on all workers of all slices, from its start to its end."""

import queue
import shlex
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlashard.cloud.following import AgentStream, Follower, Over
from xlashard.cloud.jobs import Job, new_job, newest_job, start_job, stop_job
from xlashard.cloud.logs import LogBook
from xlashard.cloud.preparing import ready_workers
from xlashard.cloud.reaching import agent_call
from xlashard.cloud.retrying import Backoff
from xlashard.cloud.session import Session
from xlashard.cloud.settings import read_pairs
from xlashard.cloud.slices import Worker
from xlashard.errors import CloudError, counted
from xlashard.testing.launch.supervision import collect_signals, signal_name

_LAST_LINES = 20
# How long the last words of workers may take to come, when they have ended, in seconds.
_LAST_WORDS = 10.0
_TICK = 0.2


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        ends: How each worker's command ended, in their order.
        told: The signal by which this process was told to stop.
        lost: What was heard of the TPU, if it was taken away.
        folder: Where the logs are.
    """

    ends: tuple[Over, ...]
    told: int | None
    lost: str
    folder: Path

    @property
    def failed(self) -> tuple[Over, ...]:
        """Those that did not end well."""
        return tuple(end for end in self.ends if end.code != 0)

    @property
    def exit_code(self) -> int:
        """0 if all ended well; otherwise that of the first failure, or what a signal says."""
        if self.told is not None:
            return 128 + self.told
        if not self.failed and not self.lost:
            return 0
        return next((end.code for end in self.failed if end.code), 1)

    @property
    def unreachable(self) -> bool:
        """Whether a worker was lost, and none of its own commands failed first."""
        return bool(self.lost) or (bool(self.failed) and self.failed[0].code is None)


def run(session: Session) -> int:
    """Runs the command on all workers, which are set up, and follows it to its end.

    Returns:
        The exit code.

    Raises:
        CloudError: It could not be started.
    """
    chosen = session.settings.run
    if chosen.attach:
        workers = ready_workers(session)
        return follow_job(session, workers, newest_job(session, workers)).exit_code
    job = new_job(chosen.command, read_pairs("environment", chosen.environment))
    return run_job(session, ready_workers(session), job).exit_code


def run_job(
    session: Session,
    workers: Sequence[Worker],
    job: Job,
    look: Callable[[], str] = lambda: "",
) -> Outcome:
    """Runs a job on workers that are set up, shows what they write, and says how it ended.

    The first that fails ends the others. Ctrl-C ends all of them.

    Args:
        session: Reaches the workers.
        workers: Which.
        job: What runs there.
        look: Is called every `--poll` seconds, and says if the TPU was taken away.

    Raises:
        CloudError: It could not be started.
    """
    start_job(session, workers, job)
    session.say(f"{job.command!r} runs on {counted(len(workers), 'worker')}")
    return follow_job(session, workers, job, look)


def follow_job(
    session: Session,
    workers: Sequence[Worker],
    job: Job,
    look: Callable[[], str] = lambda: "",
) -> Outcome:
    """Shows what a job that was started has written and writes; otherwise as `run_job`."""
    folder = Path(session.settings.run.logs) / session.settings.tpu.name / job.name
    if session.runner.dry:
        for worker in workers:
            session.runner.start(_stream(session, worker, job).command())
        return Outcome((), None, "", folder)
    session.say(f"following {counted(len(workers), 'worker')}; logs in {folder}")
    book = LogBook(folder, [worker.label for worker in workers])
    try:
        outcome = _Watch(session, workers, job, book, look).to_end()
    finally:
        book.close()
    session.say(summary(outcome, book))
    return outcome


def _stream(session: Session, worker: Worker, job: Job) -> AgentStream:
    def command(seen: int) -> Any:
        script = agent_call("follow", job.name, str(seen))
        why = f"follow worker {worker.label}"
        return session.gcloud.ssh(worker.node, worker.number, script, why)

    return AgentStream(worker.label, command)


class _Watch:
    """Follows a job on all workers until all are over."""

    def __init__(
        self,
        session: Session,
        workers: Sequence[Worker],
        job: Job,
        book: LogBook,
        look: Callable[[], str],
    ) -> None:
        self._session, self._workers, self._job = session, workers, job
        self._book, self._look = book, look
        self._ends: queue.Queue[Over] = queue.Queue()
        self._over: dict[str, Over] = {}
        self._order: list[Over] = []
        wait = session.settings.wait
        backoff = Backoff(wait.ssh_wait, tries=wait.ssh_tries)
        self._followers = [
            Follower(
                worker.label,
                _stream(session, worker, job),
                lambda text, label=worker.label: book.write(label, text),
                self._ends,
                session.runner,
                backoff,
            )
            for worker in workers
        ]

    def to_end(self) -> Outcome:
        """Returns when the job is over on all workers, or they can't be reached."""
        told: int | None = None
        lost = ""
        with collect_signals() as signals:
            for follower in self._followers:
                follower.start()
            try:
                told, lost = self._wait(signals)
            finally:
                for follower in self._followers:
                    follower.cancel()
                for follower in self._followers:
                    follower.join()
        self._take_ends(0)
        first = [end for end in self._order if end.code != 0]
        rest = [self._over[worker.label] for worker in self._workers]
        ends = tuple(dict.fromkeys([*first, *rest]))
        return Outcome(ends, told, lost, self._book.folder)

    def _wait(self, signals: "deque[int]") -> tuple[int | None, str]:
        clock, poll = self._session.clock, self._session.settings.wait.poll
        next_look = clock.now() + poll
        while len(self._over) < len(self._workers):
            self._take_ends(_TICK)
            if signals:
                return self._stopped(signals), ""
            if any(end.code != 0 for end in self._over.values()):
                return self._after_failure(signals)
            if clock.now() >= next_look:
                if lost := self._look():
                    return None, lost
                next_look = clock.now() + poll
        return None, ""

    def _after_failure(self, signals: "deque[int]") -> tuple[int | None, str]:
        """One has failed: the others get some time, and are ended."""
        # What ends them by itself may be the better error.
        self._take_until(time.monotonic() + self._session.settings.run.others, signals)
        if lost := self._look():
            return None, lost
        if signals:
            return self._stopped(signals), ""
        left = [worker for worker in self._workers if worker.label not in self._over]
        if left:
            self._session.say(f"a worker has failed; ending {counted(len(left), 'other')}")
            self._stop(left, signals)
        return None, ""

    def _stopped(self, signals: "deque[int]") -> int:
        """This process was told to stop: so are all workers; a second time nobody is waited for."""
        number = signals.popleft()
        self._session.say(
            f"{signal_name(number)}: ending the job on all workers; once more leaves them alone"
        )
        self._stop(list(self._workers), signals)
        return number

    def _stop(self, workers: list[Worker], signals: "deque[int]") -> None:
        grace = self._session.settings.run.grace
        stop_job(self._session, workers, self._job, grace)
        self._take_until(time.monotonic() + _LAST_WORDS, signals)

    def _take_until(self, deadline: float, signals: "deque[int]") -> None:
        while len(self._over) < len(self._workers) and time.monotonic() < deadline and not signals:
            self._take_ends(_TICK)

    def _take_ends(self, seconds: float) -> None:
        """Notes the workers that are over: waits for the first one, and takes all there are."""
        try:
            while True:
                over = self._ends.get(timeout=seconds) if seconds else self._ends.get_nowait()
                self._over.setdefault(over.label, over)
                self._order.append(over)
                seconds = 0
        except queue.Empty:
            return


def summary(outcome: Outcome, book: LogBook) -> str:
    """How a job ended, in words; with the last lines of the worker that failed first."""
    if outcome.told is not None:
        return f"stopped by {signal_name(outcome.told)}; logs in {outcome.folder}"
    if outcome.lost:
        return f"the TPU was taken away: {outcome.lost}"
    if not outcome.failed:
        return f"done on {counted(len(outcome.ends), 'worker')}; logs in {outcome.folder}"
    first, *others = outcome.failed
    text = f"worker {first.label} failed first: {_how(first)}"
    for end in others:
        text += f"; worker {end.label}: {_how(end)}"
    lines = book.last_lines(first.label, _LAST_LINES) or "[it wrote nothing]"
    return f"{text}\n--- worker {first.label}, the end of {book.path(first.label)} ---\n{lines}"


def _how(end: Over) -> str:
    return end.why if end.code is None else f"exit code {end.code}"


def ssh(session: Session, words: Sequence[str]) -> int:
    """A shell on one worker, or a command there.

    Args:
        session: Reaches it.
        words: The worker's label, `0`, or `1.0` with several slices; and the command, if it is to
            be no shell.

    Returns:
        Its exit code.

    Raises:
        CloudError: There is no such worker.
    """
    workers = {each.label: each for each in ready_workers(session)}
    label, *command = words or [next(iter(workers))]
    if label not in workers:
        raise CloudError(f"there is no worker {label!r}; there are {', '.join(workers)}", code=2)
    node, number = workers[label].node, workers[label].number
    if not command:
        return session.runner.show(session.gcloud.shell(node, number))
    script = command[0] if len(command) == 1 else shlex.join(command)
    why = f"run a command on worker {label}"
    return session.runner.show(session.gcloud.ssh(node, number, script, why))
