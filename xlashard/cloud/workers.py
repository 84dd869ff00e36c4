"""Commands on all workers at once, and the code and packages that they need."""

import gzip
import os
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xlashard.cloud.session import Finished, Session
from xlashard.errors import CloudError, counted
from xlashard.wording import in_bytes

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
    names = ("worker.sh", "probe.py", "chips.py")
    files = (*(str(REMOTE / name) for name in names), *map(str, more))

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
        # no-catalogue: needs a cloud, for which tests/cloud has a stand-in
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
        # no-catalogue: needs a folder of its own, as in tests/cloud/test_workers.py
        raise CloudError(
            f"--code={folder}: the folder is not a git repository, so its files can't be listed. "
            f"Write:\n  git init {folder}",
            code=2,
        )
    names = {Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name}
    files = sorted(name for name in names if (folder / name).is_file())
    if not files:
        # no-catalogue: needs a folder of its own, as in tests/cloud/test_workers.py
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
        # no-catalogue: needs a folder of its own, as in tests/cloud/test_workers.py
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
