"""Setting up workers: the agent, the project's code, a Python that is new enough, the packages."""

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from xlashard.cloud.bundle import write_bundle
from xlashard.cloud.reaching import check_all, copy_to_all, on_all
from xlashard.cloud.session import Session
from xlashard.cloud.slices import Worker
from xlashard.errors import counted

_REMOTE = Path(__file__).with_name("remote")
_OURS = ("agent.py", "probe.py", "chips.py", "setup.sh")
_ROOM = ".xlashard"


def setup(session: Session) -> int:
    """Prepares all workers of a TPU that is ready.

    Raises:
        CloudError: It is not ready, or a worker could not be prepared.
    """
    prepare(session, ready_workers(session))
    return 0


def ready_workers(session: Session) -> tuple[Worker, ...]:
    """The workers of a TPU that is there.

    Raises:
        CloudError: It is not ready.
    """
    if session.runner.dry:
        return session.expected()
    return session.survey().ready(session.settings.tpu.name)


def prepare(session: Session, workers: Sequence[Worker]) -> None:
    """Gives workers the code and what it needs; what they have already is not made again.

    Raises:
        CloudError: A worker could not be reached, or the installation failed there.
    """
    chosen = session.settings.setup
    check_all(on_all(session, workers, f"mkdir -p ~/{_ROOM}", "make a folder on"))
    with tempfile.TemporaryDirectory(prefix="xlashard-") as folder:
        bundle = Path(folder, "code.tar.gz")
        files = write_bundle(Path(chosen.code), bundle)
        session.say(f"copying {counted(files, 'file')} to {counted(len(workers), 'worker')}")
        ours = [str(_REMOTE / name) for name in _OURS]
        check_all(copy_to_all(session, workers, [*ours, str(bundle)], _ROOM))
    words = shlex.join([chosen.folder, chosen.python, chosen.install])
    session.say("installing")
    check_all(on_all(session, workers, f"bash ~/{_ROOM}/setup.sh {words}", "set up"))
    session.say(f"{counted(len(workers), 'worker')} set up")


def give_tools(session: Session, workers: Sequence[Worker]) -> None:
    """Gives workers the agent alone, for what needs no code of the project.

    Raises:
        CloudError: A worker could not be reached.
    """
    check_all(on_all(session, workers, f"mkdir -p ~/{_ROOM}", "make a folder on"))
    check_all(copy_to_all(session, workers, [str(_REMOTE / name) for name in _OURS], _ROOM))
