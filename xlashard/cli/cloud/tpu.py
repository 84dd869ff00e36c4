"""The state of a TPU, creating and deleting it; commands on all its workers, and their code."""

import gzip
import json
import os
import shlex
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from xlashard.cli.cloud.session import Finished, Session
from xlashard.errors import CloudError, counted
from xlashard.support.formatting import in_bytes

# https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes#State
# All other states are on the way to READY.
_LOST = {"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "HIDDEN", "HIDING", "UNKNOWN"}
_LOST |= {"DELETING", "SUSPENDED", "SUSPENDING", "FAILED"}


@dataclass(frozen=True)
class TpuStatus:
    """State of a TPU at one moment.

    Attributes:
        name: Name of the TPU.
        state: State, in Google Cloud's words; empty if the TPU does not exist.
        addresses: Addresses of the workers in the network.
    """

    name: str
    state: str
    addresses: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """True if the TPU can run jobs."""
        return self.state == "READY"

    @property
    def is_pending(self) -> bool:
        """True if the TPU is expected to become ready."""
        return bool(self.state) and not self.is_ready and self.state not in _LOST

    @property
    def text(self) -> str:
        """Description of the state."""
        return f"{self.name} is {self.state}" if self.state else f"{self.name} does not exist"


def query(session: Session) -> TpuStatus:
    """Return the state of the TPU.

    Raises:
        CloudError: gcloud fails repeatedly.
    """
    text, name = session.retry(session.gcloud.list()).check(), session.settings.tpu.name
    try:
        nodes = {each["name"].rpartition("/")[2]: each for each in json.loads(text or "[]")}
    except (ValueError, KeyError, TypeError, AttributeError):
        # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
        raise CloudError(
            f"the output of gcloud is invalid: expected a JSON list of TPUs, got {text[:200]!r}"
        ) from None
    node = nodes.get(name, {})
    addresses = tuple(each.get("ipAddress", "") for each in node.get("networkEndpoints", ()))
    return TpuStatus(name, node.get("state", "STATE_UNSPECIFIED") if node else "", addresses)


def ready_status(session: Session) -> TpuStatus:
    """Return the state of a TPU that is ready; in a dry run that of its accelerator type.

    Raises:
        CloudError: The TPU is not ready.
    """
    name = session.settings.tpu.name
    if session.runner.dry:
        return TpuStatus(name, "READY", ("WORKER-0",) * session.accelerator.hosts)
    status = query(session)
    if not status.is_ready:
        # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
        raise CloudError(
            f"the TPU is not ready: {status.text}. Create it, or wait for it:\n"
            f"  python tpu_scripts/create.py --name={name}"
        )
    return status


def lost_reason(session: Session) -> str:
    """Return the state of the TPU if it is not ready; empty if it is, or gcloud fails."""
    try:
        status = query(session)
    except CloudError as error:
        session.report(f"querying again later: {error}")
        return ""
    return "" if status.is_ready else status.text


def create(session: Session) -> int:
    """Request a TPU, unless it exists or was requested, and wait until it is ready.

    Raises:
        CloudError: The request failed, an earlier TPU has the name, or the time limit has passed.
    """
    command, name = session.gcloud.create(session.accelerator), session.settings.tpu.name
    if session.runner.dry:
        return session.runner.run(command).code
    status = query(session)
    if not status.state:
        session.runner.run(command).check()
        session.report(f"requested {name}: {_description(session)}")
    elif not (status.is_pending or status.is_ready):
        # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
        raise CloudError(
            f"an earlier TPU has this name: {status.text}. Delete it:\n"
            f"  python tpu_scripts/delete.py --name={name}"
        )
    _wait_until_ready(session)
    return 0


def _description(session: Session) -> str:
    accelerator = session.accelerator
    chips, workers = counted(accelerator.chips, "chip"), counted(accelerator.hosts, "worker")
    return f"{accelerator.name}, {session.settings.tpu.capacity}, {chips}, {workers}"


def _wait_until_ready(session: Session) -> None:
    wait, reported = session.settings.wait, ""
    started = time.monotonic()
    while not (status := query(session)).is_ready:
        if not status.is_pending:
            # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
            raise CloudError(f"the TPU is not available: {status.text}")
        waited = time.monotonic() - started
        if waited >= wait.ready_within:
            # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
            raise CloudError(
                f"the TPU is not ready after {waited:.0f} s: {status.text}. Wait longer with "
                f"--ready_within={2 * wait.ready_within:g}"
            )
        if status.text != reported:
            session.report(f"waiting: {status.text}")
            reported = status.text
        session.sleep(wait.poll)
    workers = counted(len(status.addresses), "worker")
    session.report(f"{status.text}: {workers}")
    if len(status.addresses) != session.accelerator.hosts:
        # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
        raise CloudError(
            f"{status.name} has {workers}, expected those of {_description(session)}. If it has "
            "another type, write that: --accelerator=TYPE"
        )


def delete(session: Session) -> int:
    """Delete a TPU; one that does not exist is no error.

    Raises:
        CloudError: gcloud fails.
    """
    status = None if session.runner.dry else query(session)
    if status is not None and status.state in ("", "DELETING"):
        session.report(f"nothing to delete: {status.text}")
    else:
        session.runner.run(session.gcloud.delete()).check()
        session.report(f"deleted {session.settings.tpu.name}")
    return 0


REMOTE = Path(__file__).with_name("remote")
_FOLDER = ".xlashard"
_LARGEST_CODE = 512 * 1024 * 1024
# Exit code of a command that failed on a worker; ssh's own failure has another one.
_FAILED_REMOTELY = 77


def run_on_all(
    session: Session, workers: Sequence[int], script: str, purpose: str
) -> list[Finished]:
    """Run a shell command on all workers at once, and retry where the connection fails.

    Args:
        session: The call of the script.
        workers: Numbers of the workers.
        script: The command; running it twice must do no harm.
        purpose: Purpose, such as "check"; the worker's name is appended.

    Returns:
        The results, in the order of the workers.
    """

    def run(worker: int) -> Finished:
        text = f"{{ {script}; }} || exit {_FAILED_REMOTELY}"
        command = session.gcloud.ssh(worker, text, purpose)
        return session.retry(command, lambda done: done.code == _FAILED_REMOTELY)

    return _map(session, workers, run)


def worker_script(*words: str) -> str:
    """Return the shell command that calls `remote/worker.sh` on a worker."""
    return f"bash ~/{_FOLDER}/worker.sh {shlex.join(words)}"


def copy_tools(session: Session, workers: Sequence[int], *more: Path) -> None:
    """Copy the programs of `remote/`, and other files, into `~/.xlashard` of all workers.

    Raises:
        CloudError: A worker can't be reached.
    """
    files = (str(REMOTE / "worker.sh"), str(REMOTE / "probe.py"), *map(str, more))

    def copy(worker: int) -> Finished:
        return session.retry(session.gcloud.copy(worker, files, _FOLDER))

    check_all(run_on_all(session, workers, f"mkdir -p ~/{_FOLDER}", "create a folder on"))
    check_all(_map(session, workers, copy))


def set_up(session: Session, workers: Sequence[int]) -> None:
    """Install the project's code on all workers; code that is installed already is skipped.

    Raises:
        CloudError: A worker can't be reached, or the installation failed.
    """
    chosen = session.settings.setup
    with tempfile.TemporaryDirectory(prefix="xlashard-") as folder:
        archive = Path(folder, "code.tar.gz")
        files = write_archive(Path(chosen.code), archive)
        session.report(f"copying {counted(files, 'file')} to {counted(len(workers), 'worker')}")
        copy_tools(session, workers, archive)
    session.report("installing")
    script = worker_script("setup", chosen.python, chosen.install)
    check_all(run_on_all(session, workers, script, "set up"))


def _map(
    session: Session, workers: Sequence[int], run: Callable[[int], Finished]
) -> list[Finished]:
    # A dry run prints the commands in order.
    with ThreadPoolExecutor(1 if session.runner.dry else len(workers)) as pool:
        return list(pool.map(run, workers))


def check_all(results: Sequence[Finished]) -> None:
    """Check that a command succeeded on all workers.

    Raises:
        CloudError: It failed on a worker; with the output of the first one.
    """
    failed = [result for result in results if result.code]
    if not failed:
        return
    try:
        failed[0].check()
    except CloudError as error:
        others = counted(len(failed) - 1, "other worker")
        more = f"\nIt failed on {others} too." if len(failed) > 1 else ""
        # no-catalogue: needs a cloud, for which tests/cli/cloud has a stand-in
        raise CloudError(f"{error}{more}") from None


def list_files(folder: Path) -> list[Path]:
    """Return the files that git tracks or would add, in order, relative to the folder.

    Raises:
        CloudError: The folder does not exist, is not in a git repository, or is empty.
    """
    if not folder.is_dir():
        raise CloudError(f"--code={folder}: the folder does not exist", code=2)
    words = ["git", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        # no-catalogue: needs a folder of its own, as in tests/cli/cloud/test_workers.py
        raise CloudError(
            f"--code={folder}: the folder is not a git repository, so its files can't be listed. "
            f"Write:\n  git init {folder}",
            code=2,
        )
    names = {Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name}
    # git lists a link to a folder (`xlashard/configs`) like a file, and a submodule as a folder.
    paths = {name: folder / name for name in names}
    files = sorted(
        name
        for name, path in paths.items()
        if path.is_file() or (path.is_symlink() and path.exists())
    )
    if not files:
        # no-catalogue: needs a folder of its own, as in tests/cli/cloud/test_workers.py
        raise CloudError(f"--code={folder}: the folder has no files to copy", code=2)
    return files


def write_archive(folder: Path, archive: Path) -> int:
    """Write a compressed archive of a project; the same files give the same bytes.

    Returns:
        Number of files.

    Raises:
        CloudError: The folder does not exist, is empty, or holds more than 512 MiB.
    """
    files = list_files(folder)
    sizes = {path: (folder / path).stat().st_size for path in files}
    if sum(sizes.values()) > _LARGEST_CODE:
        largest = sorted(files, key=lambda path: -sizes[path])[:3]
        shown = ", ".join(f"{path} ({in_bytes(sizes[path])})" for path in largest)
        # no-catalogue: needs a folder of its own, as in tests/cli/cloud/test_workers.py
        raise CloudError(
            f"--code={folder} holds {in_bytes(sum(sizes.values()))}, more than the "
            f"{in_bytes(_LARGEST_CODE)} that are copied to each worker; largest files: {shown}. "
            "Keep data in a bucket, and add these files to .gitignore",
            code=2,
        )
    # Workers compare the bytes with those installed, so the archive must not hold any time.
    with (
        gzip.GzipFile(str(archive), "wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in files:
            tar.add(folder / path, str(path), recursive=False, filter=_without_times)
    return len(files)


def _without_times(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
