"""Temporary folders of which none stays for good, however the process that made it ends.

libtpu keeps SIGTERM for itself while it compiles, so that no handler of Python runs then, and
SIGKILL asks nobody. Each folder is therefore locked while somebody works in it. The kernel lets go
of the lock when the process is gone, and whoever makes a folder next removes those without one.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "xlashard-dump-"


@contextmanager
def temporary_dump_folder() -> Iterator[Path]:
    """A folder for as long as this takes; those of processes that are gone go first."""
    remove_abandoned_folders()
    folder, held = _made()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def remove_abandoned_folders() -> None:
    """Removes this user's folders that no process works in any more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _opened(folder) as held:
            if os.fstat(held).st_uid == os.geteuid():
                # Fails where another thread or process has it.
                _lock(held)
                shutil.rmtree(folder, ignore_errors=True)


def _made() -> tuple[Path, int]:
    """A new folder, and what holds its lock until it is closed."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            held = _open(folder)
        except FileNotFoundError:
            continue
        try:
            _lock(held)
        except BlockingIOError:
            os.close(held)
            continue
        except OSError:
            # A file system without locks: there nobody removes the folder of another.
            return folder, held
        # Until it was locked, somebody could take it for an abandoned one.
        if folder.exists():
            return folder, held
        os.close(held)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    held = _open(folder)
    try:
        yield held
    finally:
        os.close(held)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(held: int) -> None:
    """Takes the lock of a folder.

    Raises:
        BlockingIOError: If it is taken.
        OSError: If the file system knows none.
    """
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
