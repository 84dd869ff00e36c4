"""Files of checkpoints: paths, digests, and the atomic commit of a folder.

```text
checkpoints/
    00000200/             a committed step: renamed after all its files were on the disk
        checkpoint.json   metadata, and the digest of every file
        arrays/           written by orbax
    .saving-00000300-1c9f04e2/
                          being written, or left by a killed process
    .deleting-00000100/   being deleted, or left by a killed process
```
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xlashard.documents import parse_json, read_text
from xlashard.train.errors import CheckpointError

SAVING, _DELETING = ".saving-", ".deleting-"
_PROCESS = re.compile(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)")
_STEP = re.compile(r"\d{8,}")
# Reading and hashing release the GIL; more threads than this exceed the speed of disks.
_THREADS = 4


def path_of(folder: Path, step: int) -> Path:
    """Return the folder of a committed step: `checkpoints/00000200`."""
    return folder / f"{step:08d}"


def staging_path(folder: Path, step: int, token: str) -> Path:
    """Return the staging folder of a step.

    The token makes it unique: orbax may still write into the folder of a failed save, and so may
    processes of an earlier run.
    """
    return folder / f"{SAVING}{step:08d}-{token}"


def steps_in(folder: Path) -> list[int]:
    """Return the committed steps of a folder, in order; none for a missing folder."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror}") from None
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def make(staging: Path) -> None:
    """Create a staging folder, and remove those that killed processes left."""
    staging.parent.mkdir(parents=True, exist_ok=True)
    for entry in list(os.scandir(staging.parent)):
        if entry.name.startswith((SAVING, _DELETING)):
            shutil.rmtree(entry.path, ignore_errors=True)
    staging.mkdir()


def commit(staging: Path, step: int) -> None:
    """Commit a written step: flush its folders and rename the staging folder."""
    for path in [*(p for p in staging.rglob("*") if p.is_dir()), staging]:
        _sync_entries(path)
    staging.rename(path_of(staging.parent, step))
    _sync_entries(staging.parent)


def remove(folder: Path, step: int) -> None:
    """Delete a committed step; an interrupted deletion leaves no step."""
    away = folder / f"{_DELETING}{step:08d}"
    path_of(folder, step).rename(away)
    shutil.rmtree(away)


def discard(staging: Path) -> None:
    """Delete a staging folder, ignoring errors."""
    shutil.rmtree(staging, ignore_errors=True)


def _sync_entries(folder: Path) -> None:
    """Flush the entries of a folder to the disk, if its file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Digest:
    """Size and hash of a file.

    Attributes:
        bytes: Size of the file.
        sha256: Hexadecimal SHA-256, the fastest cryptographic hash of Python's library on current
            processors: 1.7 GB/s in one thread.
    """

    bytes: int
    sha256: str


def files_in(folder: Path) -> dict[str, int]:
    """Return the sizes of all files below a folder, by POSIX paths relative to it."""
    return {
        path.relative_to(folder).as_posix(): path.stat(follow_symlinks=path.exists()).st_size
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }


def link_out_of(folder: Path, name: str) -> str:
    """Return the reason why a file is not inside of a folder; empty if it is.

    Args:
        folder: The folder.
        name: Path relative to the folder.
    """
    path = folder / name
    # `Path.resolve` of Python 3.12 raises an error for cyclic links.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        return f"is a symbolic link out of its folder, to {os.path.realpath(path)}"
    if path.exists() and not path.is_file():
        return "is not a regular file"
    return ""


def writer_of(name: str) -> int:
    """Return the process that wrote a file, from orbax's naming; 0 for other names."""
    match = _PROCESS.search(name)
    return int(match[1]) if match else 0


def digests(folder: Path, names: Iterable[str], *, durable: bool = False) -> dict[str, Digest]:
    """Compute the digests of files.

    Args:
        folder: The folder.
        names: Paths relative to the folder.
        durable: Flush each file to the disk.

    Returns:
        Digests by name.
    """
    names = list(names)

    def read(name: str) -> Digest:
        with (folder / name).open("rb") as file:
            if durable:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Digest(file.tell(), digest)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as threads:
        return dict(zip(names, threads.map(read, names), strict=True))


def write_digests(folder: Path, name: str, by_name: dict[str, Digest]) -> None:
    """Write digests for another process."""
    folder.mkdir(exist_ok=True)
    text = json.dumps({name: asdict(digest) for name, digest in by_name.items()})
    (folder / name).write_text(text, encoding="utf-8")


def take_digests(folder: Path, count: int) -> dict[str, Digest]:
    """Read and delete the digests of all processes; a single process writes none."""
    if count == 1:
        return {}
    values: dict[str, Any] = {}
    for process in range(count):
        values |= parse_json(read_text(folder / str(process)))
    shutil.rmtree(folder)
    return {name: Digest(**digest) for name, digest in values.items()}
