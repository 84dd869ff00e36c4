"""Folders of runs on Google Cloud Storage, through etils' paths, beside pathlib's of file systems.

An object appears with its last byte and is replaced whole. Nothing is renamed, and nothing is
appended to: what a run appends to is written again, whole, from time to time. TensorStore, which
writes the arrays, writes locks too: an object can be written on the condition that it is the one
that was read.
"""

import errno
import importlib.util
import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import fsspec
import fsspec.config
import fsspec.core
import tensorstore
from etils import epath

from xlashard.support.documents import write_whole
from xlashard.support.formatting import error_line
from xlashard.train.errors import SettingsError

SCHEME = "gs://"
"""Beginning of the URLs of objects. Of orbax 0.12, TensorStore's path to arrays has no other."""

# Google limits writes of one object to one in a second; a run writes text less often, and spends
# this fraction of its time with it, however long the text.
_INTERVAL = 10.0
_SHARE = 0.05

# Seconds for which an access of a lock is repeated; TensorStore alone would repeat it for minutes.
_TIMEOUT = 30.0


def locate(location: str | os.PathLike[str]) -> Path:
    """Return the path of a file or folder, or of an object's URL, which has the same methods."""
    if not os.fspath(location).startswith(SCHEME):
        return Path(location)
    # Listings that gcsfs keeps would lack what TensorStore and other processes have written.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return cast(Path, epath.Path(location))


def is_object(path: Path) -> bool:
    """Return True for the path of an object, or of a folder of objects."""
    return os.fspath(path).startswith(SCHEME)


def make_absolute(path: Path) -> Path:
    """Return a path that is absolute, as URLs are."""
    return path if is_object(path) else path.absolute()


def check_store(option: str, location: str) -> None:
    """Check that a run can use a folder of an object store, before anything is compiled.

    Args:
        option: Option in messages.
        location: URL of the folder.

    Raises:
        SettingsError: A package is missing, or the bucket cannot be read.
    """
    if importlib.util.find_spec("gcsfs") is None:
        raise SettingsError(
            f"{option} is {location}, and gcsfs, which orbax and etils read and write objects "
            f"with, is not installed. Install it:\n  pip install 'xlashard[gcs]'"
        )
    try:
        with reporting_store(locate(location)):
            locate(location).exists()
    except OSError as error:
        raise SettingsError(
            f"{option} is {location}, which cannot be read: {error.strerror}. Check the bucket's "
            f"name and the permissions of this process (storage.objects.list, get, create and "
            f"delete), for example:\n  gcloud storage ls {location}"
        ) from None


@contextmanager
def reporting_store(path: Path) -> Iterator[None]:
    """Turn the errors of a store's clients, which have many classes, into OSErrors with a path.

    Raises:
        OSError: An access failed, after retries.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        if not is_object(path) or (isinstance(error, OSError) and error.strerror):
            raise
        # Of gcsfs' OSErrors the first line lacks the reason.
        text = " ".join(str(error).split()) if isinstance(error, OSError) else error_line(error)
        raise OSError(errno.EIO, text, os.fspath(path)) from error


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file or an object, whole or not at all.

    Raises:
        OSError: It can't be written; the old one stays.
    """
    if not is_object(path):
        write_whole(path, data)
        return
    with reporting_store(path):
        path.write_bytes(data.encode() if isinstance(data, str) else data)


def write_copy(path: Path, copy: Path) -> None:
    """Copy a file beside others that are synced later, or an object.

    Raises:
        FileNotFoundError: It does not exist.
    """
    if is_object(copy):
        with reporting_store(path):
            copy.write_bytes(path.read_bytes())
    else:
        shutil.copyfile(path, copy)


def move_command(path: Path) -> str:
    """Return the command that moves a folder at a path."""
    return "gcloud storage mv" if is_object(path) else "mv"


def list_objects(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the metadata of the objects below a folder, by their paths in it."""
    system, place = fsspec.core.url_to_fs(os.fspath(folder))
    with reporting_store(folder):
        objects = system.find(place, detail=True)
    return {name.removeprefix(f"{place}/"): objects[name] for name in sorted(objects)}


def remove_objects(folder: Path, first: str) -> None:
    """Delete the objects below a folder, as far as the store answers.

    Args:
        folder: The folder.
        first: Name of the object to delete before the others.
    """
    with suppress(OSError), reporting_store(folder):
        (folder / first).unlink(missing_ok=True)
        cast(Any, folder).rmtree(missing_ok=True)


def open_objects(folder: Path) -> Any:
    """Return TensorStore's key-value store of a folder, whose writes can have a condition."""
    return tensorstore.KvStore.open(f"{os.fspath(folder)}/").result(_TIMEOUT)


def read_object(objects: Any, name: str) -> tuple[bytes | None, bytes]:
    """Return an object of `open_objects`, None for a missing one, and its generation."""
    read = objects.read(name).result(_TIMEOUT)
    return (read.value if read.state == "value" else None), read.stamp.generation


def replace_object(objects: Any, name: str, data: bytes | None, generation: Any) -> bool:
    """Write an object, or delete it, if it still has a generation; return whether it had."""
    return bool(objects.write(name, data, if_equal=generation).result(_TIMEOUT).generation)


def make_new_folder(path: Path) -> None:
    """Create a folder and its parents; one of objects begins to exist with its first object.

    Raises:
        FileExistsError: It exists.
    """
    if not is_object(path):
        path.mkdir(parents=True)
        return
    with reporting_store(path):
        if path.exists():
            raise FileExistsError(errno.EEXIST, "it exists", os.fspath(path))


def read_time(path: Path) -> float:
    """Return when a file or an object was written, in seconds."""
    return cast(Any, path).stat().mtime if is_object(path) else path.stat().st_mtime


def open_appended(path: Path) -> Any:
    """Open a file, or an object, to append bytes to it."""
    return _AppendedObject(path) if is_object(path) else path.open("ab")


def write_appended(text: io.TextIOWrapper) -> None:
    """Write what was appended to a file or an object of `open_appended`."""
    text.flush()
    if isinstance(text.buffer, _AppendedObject):
        text.buffer.upload()


class _AppendedObject(io.BytesIO):
    """Content of an object, which `flush` writes whole if some time has passed since, and `close`.

    Args:
        path: The object.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._due = 0.0
        self._written = 0
        with reporting_store(path):
            self._written = self.write(path.read_bytes()) if path.exists() else 0

    def flush(self) -> None:
        """Write the object if it is due."""
        if time.monotonic() >= self._due:
            self.upload()

    def upload(self) -> None:
        """Write the object if it has changed."""
        if self.tell() == self._written:
            return
        begun = time.monotonic()
        write_file(self._path, self.getvalue())
        ended, self._written = time.monotonic(), self.tell()
        self._due = ended + max(_INTERVAL, (ended - begun) / _SHARE)

    def close(self) -> None:
        """Write the object, and forget the content also after an error."""
        try:
            if not self.closed:
                self.upload()
        finally:
            super().close()
