"""Keeping a job going on a TPU that may be taken away at any moment."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from xlashard.cloud.jobs import new_job
from xlashard.cloud.preparing import prepare
from xlashard.cloud.provisioning import create, delete, wait_until_ready
from xlashard.cloud.resuming import Resumption, resumption_of, start_or_resume
from xlashard.cloud.retrying import Backoff, Clock
from xlashard.cloud.running import Outcome, run_job
from xlashard.cloud.session import Session
from xlashard.cloud.settings import read_pairs
from xlashard.cloud.slices import State
from xlashard.errors import CloudError

# What `xlashard train` ends with when another process is gone.
_PEER_GONE = 75
# Google Cloud says some seconds after a VM is gone that it was taken away.
_SETTLES = 60.0


class Step(Enum):
    """Where the loop is."""

    MAKE = "make"
    RUN = "run"
    REMAKE = "delete and make again"
    DONE = "done"


class After(Enum):
    """What a start of the job came to."""

    DONE = "done"
    LOST = "the TPU was taken away"
    BROKEN = "the job broke off, and the TPU is there"
    FAILED = "the job failed"
    STOPPED = "somebody stopped it"


@dataclass(frozen=True)
class Ended:
    """A start of the job that is over.

    Attributes:
        after: What it came to.
        code: The exit code.
        why: In words.
    """

    after: After
    code: int
    why: str = ""


@dataclass(frozen=True)
class Doings:
    """What the loop does, each by a function.

    Attributes:
        make: Makes the TPU, waits for it and sets it up.
        run: Runs the job for the so-many-th time.
        remove: Deletes the TPU and all that was asked for it.
    """

    make: Callable[[], None]
    run: Callable[[int], Ended]
    remove: Callable[[], None]


@dataclass(frozen=True)
class Limits:
    """When the loop gives up.

    Attributes:
        tries: Starts of the job, and vain attempts to make the TPU, in all.
        backoff: How long it waits before it makes the TPU again.
        keep: Leave the TPU there in the end.
    """

    tries: int
    backoff: Backoff
    keep: bool


def keep_going(doings: Doings, limits: Limits, clock: Clock, say: Callable[[str], None]) -> int:
    """Makes a TPU and runs a job on it, again and again until the job is done.

    Args:
        doings: What it does.
        limits: When it gives up.
        clock: By which it waits.
        say: Is told what happens.

    Returns:
        The exit code of the job.
    """
    step, tried, in_vain = Step.MAKE, 0, 0
    ended = Ended(After.LOST, 1)
    while step is not Step.DONE and tried < limits.tries:
        if step is Step.REMAKE:
            doings.remove()
            pause = limits.backoff.wait(max(in_vain, 1))
            say(f"making the TPU again in {pause:g} s")
            clock.sleep(pause)
        if step is not Step.RUN:
            try:
                doings.make()
            except CloudError as error:
                if error.code == 2:
                    raise  # A wrong request stays wrong.
                tried, in_vain = tried + 1, in_vain + 1
                say(f"could not make the TPU: {error}")
                step, ended = Step.REMAKE, Ended(After.LOST, 1, str(error))
                continue
        tried += 1
        say(f"start {tried} of at most {limits.tries}")
        ended = doings.run(tried)
        step = _next(ended)
        # A TPU that came and went is no reason to wait longer for the next one.
        in_vain = 0 if ended.after is After.LOST else in_vain + 1
        if step is not Step.DONE:
            say(f"{ended.after.value}: {ended.why}" if ended.why else ended.after.value)
    if step is not Step.DONE:
        say(f"gave up after {tried} tries")
    if not limits.keep:
        doings.remove()
    return ended.code if step is Step.DONE else ended.code or 1


def _next(ended: Ended) -> Step:
    steps = {After.LOST: Step.REMAKE, After.BROKEN: Step.RUN}
    return steps.get(ended.after, Step.DONE)


def watch(session: Session) -> int:
    """Makes a TPU, runs the job there, and begins anew when the TPU is taken away.

    Returns:
        The exit code of the job.

    Raises:
        CloudError: The request is wrong, or the TPU could not be deleted.
    """
    settings = session.settings
    start = new_job(settings.run.command, read_pairs("environment", settings.run.environment))
    resumption = how_to_resume(session)
    if resumption is None:
        session.say(
            "nothing says how the job goes on when it is started again; its command runs as it is, "
            "with LAUNCHER_ATTEMPT=2, 3, ... (or say --resume=COMMAND --checkpoints=PATTERN)"
        )
    command = start_or_resume(start.command, resumption)

    def make() -> None:
        create(session)
        workers = session.expected() if session.runner.dry else wait_until_ready(session)
        prepare(session, workers)

    def run(attempt: int) -> Ended:
        again = new_job(command, {**start.environment, "LAUNCHER_ATTEMPT": str(attempt)})
        workers = session.expected() if session.runner.dry else session.survey().workers
        try:
            outcome = run_job(session, workers, again, lambda: lost_text(session))
        except CloudError as error:
            return _ended_before(session, error)
        return judge(session, outcome)

    limits = Limits(
        1 if session.runner.dry else settings.watch.tries,
        Backoff(settings.watch.pause, most=600.0),
        settings.watch.keep,
    )
    doings = Doings(make, run, lambda: _remove(session))
    try:
        return keep_going(doings, limits, session.clock, session.say)
    except KeyboardInterrupt:
        # Nobody waits for it any more, and it costs money.
        if not limits.keep:
            session.say("stopped; deleting the TPU, or the request for it")
            _remove(session)
        raise


def _remove(session: Session) -> None:
    delete(session)


def how_to_resume(session: Session) -> Resumption | None:
    """How the job goes on, as the settings say or its command lets know.

    Raises:
        CloudError: Half of it was said.
    """
    chosen = session.settings.watch
    if bool(chosen.resume) != bool(chosen.checkpoints):
        given, missing = ("resume", "checkpoints")[:: 1 if chosen.resume else -1]
        raise CloudError(
            f"--{given} needs --{missing}: the command that goes on runs if there is a path of "
            "that pattern, for example --resume='python train.py --resume' "
            "--checkpoints='/mnt/runs/one/*.ckpt'",
            code=2,
        )
    if chosen.resume:
        return Resumption(chosen.resume, chosen.checkpoints)
    return resumption_of(session.settings.run.command)


def lost_text(session: Session) -> str:
    """What is said of the TPU if it was taken away; empty if it is there, or nobody says."""
    try:
        found = session.survey()
    except CloudError as error:
        session.say(f"looking again later: {error}")
        return ""
    return "" if found.state is State.READY else found.text


def judge(session: Session, outcome: Outcome) -> Ended:
    """What the end of a job means."""
    code = outcome.exit_code
    if outcome.told is not None:
        return Ended(After.STOPPED, code)
    if code == 0:
        return Ended(After.DONE, 0)
    if outcome.lost:
        return Ended(After.LOST, code, outcome.lost)
    if outcome.unreachable or code == _PEER_GONE:
        return _missing(session, code)
    return Ended(After.FAILED, code)


def _missing(session: Session, code: int) -> Ended:
    """A worker was lost: soon the TPU is said to be so too, or it was the worker alone."""
    deadline = session.clock.now() + min(_SETTLES, 4 * session.settings.wait.poll)
    while True:
        if lost := lost_text(session):
            return Ended(After.LOST, code, lost)
        if session.clock.now() >= deadline:
            return Ended(After.BROKEN, code, "a worker was lost, and all are said to be there")
        session.clock.sleep(session.settings.wait.poll)


def _ended_before(session: Session, error: CloudError) -> Ended:
    """The job could not be started."""
    if lost := lost_text(session):
        return Ended(After.LOST, error.code, lost)
    session.say(f"error: {error}")
    return Ended(After.FAILED, error.code, str(error))
