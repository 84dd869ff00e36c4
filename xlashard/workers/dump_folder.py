"""Temporary folders that are removed even after their process is killed.

No Python handler runs after SIGTERM while the main thread compiles, and none after SIGKILL. Each
folder is locked while in use. The kernel releases the lock when the process ends, and the next
caller removes unlocked folders.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "xlashard-dump-"
_OWN: set[Path] = set()
"""Folders that this process uses."""
# A forked child leaves the folders to its parent.
os.register_at_fork(after_in_child=_OWN.clear)


@contextmanager
def temporary_dump_folder() -> Iterator[Path]:
    """Yield a temporary folder, after removing folders of ended processes."""
    remove_abandoned_folders()
    folder, held = _create_folder()
    _OWN.add(folder)
    try:
        yield folder
    finally:
        if folder in _OWN:
            _OWN.discard(folder)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def remove_own_folders() -> None:
    """Remove the folders that this process uses, before it exits in the middle of it."""
    for folder in list(_OWN):
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_folders() -> None:
    """Remove this user's folders that no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _opened(folder) as held:
            if os.fstat(held).st_uid == os.geteuid():
                # Fails if another thread or process holds the lock.
                _lock(held)
                shutil.rmtree(folder, ignore_errors=True)


def _create_folder() -> tuple[Path, int]:
    """Create a folder and return it with its locked file descriptor."""
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
            # Without file locks, other processes don't remove the folder.
            return folder, held
        # Another process may have removed the folder before it was locked.
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
    """Lock a folder.

    Raises:
        BlockingIOError: If another process holds the lock.
        OSError: If the file system doesn't support locks.
    """
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
