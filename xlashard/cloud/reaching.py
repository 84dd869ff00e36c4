"""The same on all workers at once, by a connection to each."""

import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from xlashard.cloud.commands import Finished
from xlashard.cloud.retrying import run_again
from xlashard.cloud.session import Session
from xlashard.cloud.slices import Worker
from xlashard.errors import CloudError, counted

# gcloud takes some 100 MB for each connection.
_AT_ONCE = 32
_FAILED_THERE = 77
"""The exit code by which a command that failed on a worker differs from a failing ssh."""

AGENT = "python3 ~/.xlashard/agent.py"
"""How the agent is called on a worker."""


@dataclass(frozen=True)
class End:
    """How a command ended on a worker.

    Attributes:
        worker: Which.
        finished: How.
    """

    worker: Worker
    finished: Finished


def on_all(
    session: Session,
    workers: Sequence[Worker],
    script: str | Callable[[Worker], str],
    why: str,
    *,
    once: bool = False,
) -> list[End]:
    """Runs a shell command on all workers at once, each by its own connection.

    Args:
        session: Runs it.
        workers: Which.
        script: The command, or what makes that of each worker; it may run twice without harm.
        why: What it is for, such as "reach": a worker's name comes after it.
        once: Fail at the first failure, instead of trying again.

    Returns:
        By worker, in their order, how the last try ended.
    """

    def run(worker: Worker) -> End:
        text = script if isinstance(script, str) else script(worker)
        text = f"{{ {text}; }} || exit {_FAILED_THERE}"
        name = f"{why} worker {worker.label}"
        command = session.gcloud.ssh(worker.node, worker.number, text, name)
        if once or session.runner.dry:
            return End(worker, session.runner.run(command))
        done = run_again(
            session.runner, command, session.patience, lambda done: done.code == _FAILED_THERE
        )
        return End(worker, done)

    return _at_once(session, workers, run)


def copy_to_all(
    session: Session, workers: Sequence[Worker], files: Sequence[str], folder: str
) -> list[End]:
    """Copies files to all workers at once; otherwise as `on_all`."""

    def run(worker: Worker) -> End:
        command = session.gcloud.copy(worker.node, worker.number, tuple(files), folder)
        if session.runner.dry:
            return End(worker, session.runner.run(command))
        return End(worker, run_again(session.runner, command, session.patience))

    return _at_once(session, workers, run)


def _at_once(
    session: Session, workers: Sequence[Worker], run: Callable[[Worker], End]
) -> list[End]:
    if session.runner.dry or len(workers) < 2:
        return [run(worker) for worker in workers]  # In their order, so that it reads well.
    with ThreadPoolExecutor(min(len(workers), _AT_ONCE)) as pool:
        return list(pool.map(run, workers))


def check_all(ends: Sequence[End]) -> None:
    """Checks that a command ended well everywhere.

    Raises:
        CloudError: It failed somewhere; with the text of the first such worker.
    """
    failed = [end for end in ends if end.finished.code]
    if not failed:
        return
    try:
        failed[0].finished.check()
    except CloudError as error:
        others = counted(len(failed) - 1, "other worker")
        more = f"\nIt failed on {others} too." if len(failed) > 1 else ""
        raise CloudError(f"{error}{more}", code=error.code) from None  # no-catalogue: needs a cloud


def agent_call(*words: str) -> str:
    """A shell command that calls the agent on a worker.

    Example:
        >>> agent_call("stop", "job 1", "30")
        "python3 ~/.xlashard/agent.py stop 'job 1' 30"
    """
    return f"{AGENT} {shlex.join(words)}"
