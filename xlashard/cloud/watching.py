"""A job that is restarted when its TPU is preempted."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from xlashard.cloud.cloud_settings import check_command
from xlashard.cloud.jobs import INTERRUPTED, ExitStatus, run_job
from xlashard.cloud.session import Session, backoff
from xlashard.cloud.tpu import create, delete, lost_reason, ready_status
from xlashard.cloud.workers import set_up
from xlashard.errors import CloudError

# Exit code of `xlashard train` when another process is gone, and of a job that was killed.
_PEER_GONE = 75
# Google Cloud reports a preemption some seconds after the VM is gone.
_SETTLES = 60.0
_LONGEST_PAUSE = 600.0


class Next(enum.Enum):
    """Reaction to the end of a job."""

    STOP = "stop"
    RESTART = "restart the job"
    RECREATE = "create the TPU again"


@dataclass(frozen=True)
class Actions:
    """Actions of the loop.

    Attributes:
        make: Create the TPU and set it up.
        run: Run the job for the n-th time; return its exit code and the reaction to it.
        remove: Delete the TPU.
    """

    make: Callable[[], None]
    run: Callable[[int], tuple[int, Next]]
    remove: Callable[[], None]


def keep_running(session: Session, actions: Actions) -> int:
    """Create a TPU and run a job on it, again and again until the job is done.

    Args:
        session: Limits, and pauses.
        actions: Actions of the loop.

    Returns:
        The exit code of the job; 1 if the limit of starts was reached before it ended.
    """
    limits = session.settings.watch
    pauses = backoff(limits.pause, _LONGEST_PAUSE)
    code, reaction = 1, Next.RECREATE
    for attempt in range(1, limits.tries + 1):
        try:
            if reaction is Next.RECREATE:
                actions.make()
        except CloudError as error:
            if error.code == 2:
                raise  # The request is invalid.
            session.report(f"could not create the TPU: {error}")
        else:
            pauses = backoff(limits.pause, _LONGEST_PAUSE)
            session.report(f"start {attempt} of at most {limits.tries}")
            code, reaction = actions.run(attempt)
        if reaction is Next.STOP:
            break
        if reaction is Next.RECREATE and attempt < limits.tries:
            actions.remove()
            pause = next(pauses)
            session.report(f"creating the TPU again in {pause:g} s")
            session.sleep(pause)
    else:
        session.report(f"gave up after {limits.tries} attempts")
        code = code or 1
    if not limits.keep:
        actions.remove()
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

    def remove() -> None:
        delete(session)

    try:
        return keep_running(session, Actions(make, run, remove))
    except KeyboardInterrupt:
        if not session.settings.watch.keep:
            session.report("interrupted; deleting the TPU")
            remove()
        raise


def _reaction(session: Session, status: ExitStatus) -> Next:
    if session.runner.dry or status.code in (0, INTERRUPTED):
        return Next.STOP
    if not status.unreachable and status.code != _PEER_GONE:
        return Next.STOP
    deadline = time.monotonic() + min(_SETTLES, 4 * session.settings.wait.poll)
    while not (lost := lost_reason(session)):
        if time.monotonic() >= deadline:
            session.report("a worker was lost, but the TPU is ready: restarting the job")
            return Next.RESTART
        session.sleep(session.settings.wait.poll)
    session.report(f"the TPU was preempted: {lost}")
    return Next.RECREATE
