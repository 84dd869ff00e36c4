"""The files of checkpoints: where they lie, their digests, and how a folder appears at once.

```text
checkpoints/
    00000200/             a committed step: it was renamed to this when all in it was on the disk
        checkpoint.json   what it is, and the digest of every file
        arrays/           written by orbax
    .saving-00000300-1c9f04e2/
                          being written, or left by a process that was killed
    .deleting-00000100/   being deleted, or left likewise
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

from xlashard.documents import parse_json, read_text
from xlashard.train.errors import CheckpointError

SAVING, _DELETING = ".saving-", ".deleting-"
_PROCESS = re.compile(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)")
_STEP = re.compile(r"\d{8,}")
# Reading and hashing let other threads run; more of them than this is more than disks give.
_THREADS = 4


def path_of(folder: Path, step: int) -> Path:
    """The folder of a committed step: `checkpoints/00000200`."""
    return folder / f"{step:08d}"


def room_of(folder: Path, step: int, token: str) -> Path:
    """The folder in which a step is written.

    The token keeps it apart from the folders of saves that failed, where orbax may go on writing,
    and of processes of an earlier run that have not ended yet.
    """
    return folder / f"{SAVING}{step:08d}-{token}"


def steps_in(folder: Path) -> list[int]:
    """The committed steps of a folder, in order; none where there is no folder."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror}") from None
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def make(room: Path) -> None:
    """Makes the folder in which a step is written, and clears away what killed processes left."""
    room.parent.mkdir(parents=True, exist_ok=True)
    for entry in list(os.scandir(room.parent)):
        if entry.name.startswith((SAVING, _DELETING)):
            shutil.rmtree(entry.path, ignore_errors=True)
    room.mkdir()


def commit(room: Path, step: int) -> None:
    """Makes a step that is written a committed one; from here on nothing takes it back."""
    for path in [*(p for p in room.rglob("*") if p.is_dir()), room]:
        _sync_entries(path)
    room.rename(path_of(room.parent, step))
    _sync_entries(room.parent)


def remove(folder: Path, step: int) -> None:
    """Deletes a committed step. If it is interrupted, no part of the step passes for one."""
    away = folder / f"{_DELETING}{step:08d}"
    path_of(folder, step).rename(away)
    shutil.rmtree(away)


def discard(room: Path) -> None:
    """Deletes what was written of a step that won't be committed, as far as that goes."""
    shutil.rmtree(room, ignore_errors=True)


def _sync_entries(folder: Path) -> None:
    """Waits until the entries of a folder are on the disk, if its file system can do that."""
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
    """What a file is known by.

    Attributes:
        bytes: Its size.
        sha256: In hexadecimal. Of the hashes in Python's library that nobody can turn around it
            is the fastest on processors of this decade: 1.7 GB/s in one thread.
    """

    bytes: int
    sha256: str


def files_in(folder: Path) -> dict[str, int]:
    """The sizes of all files below a folder, by their paths from it, with `/` between names."""
    return {
        path.relative_to(folder).as_posix(): path.stat(follow_symlinks=path.exists()).st_size
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    }


def link_out_of(folder: Path, name: str) -> str:
    """Return the reason why a file does not lie in a folder itself; empty if it does.

    Args:
        folder: The folder.
        name: A path from there.
    """
    path = folder / name
    # `Path.resolve` of Python 3.12 raises an error for links in a circle.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        return f"is a symbolic link out of its folder, to {os.path.realpath(path)}"
    if path.exists() and not path.is_file():
        return "is no regular file"
    return ""


def writer_of(name: str) -> int:
    """The process that wrote a file of a step, as orbax names what each writes; else the first.

    What nobody claims because it is named otherwise, the first process reads for its digest.
    """
    found = _PROCESS.search(name)
    return int(found[1]) if found else 0


def digests(folder: Path, names: Iterable[str], *, durable: bool = False) -> dict[str, Digest]:
    """Reads files.

    Args:
        folder: The folder.
        names: Paths from there.
        durable: Wait until each is on the disk.

    Returns:
        By name its digest.
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


def write_digests(folder: Path, name: str, found: dict[str, Digest]) -> None:
    """Writes digests down for another process."""
    folder.mkdir(exist_ok=True)
    text = json.dumps({name: asdict(digest) for name, digest in found.items()})
    (folder / name).write_text(text, encoding="utf-8")


def take_digests(folder: Path, count: int) -> dict[str, Digest]:
    """Reads what each of so many processes wrote down, and deletes it; one alone writes nothing."""
    if count == 1:
        return {}
    found: dict[str, Digest] = {}
    for process in range(count):
        said = parse_json(read_text(folder / str(process)))
        found |= {name: Digest(**digest) for name, digest in said.items()}
    shutil.rmtree(folder)
    return found
