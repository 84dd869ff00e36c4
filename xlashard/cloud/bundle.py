"""The code that workers get: one archive of a folder, made of what belongs to the project."""

import gzip
import os
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from xlashard.errors import CloudError
from xlashard.wording import in_bytes

_MOST_BYTES = 512 * 1024 * 1024
# Where there is no git to say what belongs to a project: what never does.
_FOREIGN = {"__pycache__", "node_modules", "venv", "runs", "logs", "build", "dist"}


def list_files(folder: Path) -> list[Path]:
    """The files of a project, relative to its folder, in order.

    In a git repository those that git tracks, or would if asked to; elsewhere all but those whose
    name, or a folder's above, begins with a dot or is known for what is made again.

    Args:
        folder: Of the project.

    Raises:
        CloudError: There is no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise CloudError(f"--code={folder}: there is no such folder", code=2)
    words = ["git", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"]
    try:
        done = subprocess.run(words, capture_output=True, check=False)
        tracked = done.stdout.decode().split("\0") if done.returncode == 0 else None
    except FileNotFoundError:
        tracked = None
    found = _walk(folder) if tracked is None else (Path(name) for name in tracked if name)
    files = sorted(path for path in set(found) if (folder / path).is_file())
    if not files:
        # no-catalogue: needs a folder of its own
        raise CloudError(f"--code={folder}: there is no file in it", code=2)
    return files


def _walk(folder: Path) -> Iterable[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_foreign(name)]
        for name in files:
            if not name.startswith("."):
                yield Path(root, name).relative_to(folder)


def _is_foreign(name: str) -> bool:
    return name.startswith(".") or name in _FOREIGN or name.endswith(".egg-info")


def write_bundle(folder: Path, to: Path) -> int:
    """Writes a compressed archive of a project; the same files give the same bytes.

    Args:
        folder: Of the project.
        to: The archive.

    Returns:
        How many files are in it.

    Raises:
        CloudError: The folder holds no project, or far more than one's code.
    """
    files = list_files(folder)
    sizes = {path: (folder / path).stat().st_size for path in files}
    if sum(sizes.values()) > _MOST_BYTES:
        largest = sorted(files, key=lambda path: -sizes[path])[:3]
        shown = ", ".join(f"{path} ({in_bytes(sizes[path])})" for path in largest)
        raise CloudError(  # no-catalogue: needs a folder of its own
            f"--code={folder} holds {in_bytes(sum(sizes.values()))}, and is copied to every "
            f"worker; the largest files: {shown}. Keep data in a bucket, and name such files in "
            ".gitignore",
            code=2,
        )
    # Workers tell by the bytes whether they have it already. gzip would write the time into them.
    with (
        gzip.GzipFile(str(to), "wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for path in files:
            archive.add(folder / path, str(path), recursive=False, filter=_plain)
    return len(files)


def _plain(about: tarfile.TarInfo) -> tarfile.TarInfo:
    about.uid = about.gid = about.mtime = 0
    about.uname = about.gname = ""
    return about
