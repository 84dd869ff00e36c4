"""Reading and replacing source files: declared encodings, owners, modes and links are kept."""

import io
import os
import shutil
import stat
import tempfile
import tokenize
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from xlashard.cli.commands.result_files import reason_of
from xlashard.errors import ArgumentError
from xlashard.support.documents import sync_path


@dataclass(frozen=True)
class SourceFile:
    """Source file as it was read.

    Attributes:
        path: The path, as the user wrote it.
        data: The bytes.
        encoding: The declared encoding.
    """

    path: str
    data: bytes
    encoding: str

    @property
    def text(self) -> str:
        """The decoded bytes."""
        return self.data.decode(self.encoding)


def read_source(path: str) -> SourceFile:
    """Read a source file whose declared encoding restores its bytes.

    Args:
        path: The path.

    Raises:
        ArgumentError: The file can't be read, is not text in its encoding, or its encoding
            does not restore its bytes.
    """
    try:
        backup = _locate_backup(Path(os.path.realpath(path)))
        if backup.exists():
            raise ArgumentError(
                f"{path} may be damaged, since an earlier --write was interrupted: restore it by "
                f"cp {backup} {path}, then delete {backup}"
            )
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} can't be read: {reason_of(error)}") from None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        source = SourceFile(path, data, encoding)
        restored = source.text.encode(encoding)
    except (UnicodeError, SyntaxError, LookupError):
        raise ArgumentError(
            f"{path} is not text in UTF-8: save it as UTF-8, or write its encoding into its first "
            "line, such as `# -*- coding: latin-1 -*-`"
        ) from None
    if restored != data:
        raise ArgumentError(
            f"{path} is encoded in {encoding}, which does not restore the file's bytes: save it as "
            "UTF-8, without a declared encoding"
        )
    return source


def write_source(source: SourceFile, text: str) -> None:
    """Replace the text of a file.

    A process that is killed leaves the old file or the new one. A file with hard links, or with
    an owner that this user can't set, is written in place, and a copy lies beside it meanwhile.

    Args:
        source: The file as it was read.
        text: The new text.

    Raises:
        ArgumentError: The file can't be written, or has changed since it was read, or its encoding
            lacks a character.
    """
    data = _encode(source, text)
    path = Path(os.path.realpath(source.path))
    try:
        _check_writable(source.path, path)
        if path.read_bytes() != source.data:
            raise ArgumentError(
                f"{source.path} has changed since it was read: run the command again"
            )
        if path.stat().st_nlink > 1 or not _replace(path, data):
            _overwrite(path, source.data, data)
    except OSError as error:
        raise ArgumentError(f"{source.path} can't be written: {reason_of(error)}") from None


def _encode(source: SourceFile, text: str) -> bytes:
    """Encode a text as its file is encoded."""
    data = text.encode(source.encoding, "replace")
    if data.decode(source.encoding, "replace") != text:
        raise ArgumentError(
            f"{source.path} can't be written in its encoding {source.encoding}: save it as UTF-8"
        )
    return data


def _check_writable(name: str, path: Path) -> None:
    if not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise ArgumentError(f"{name} is read-only: write chmod u+w {name}")
    if not os.access(path, os.W_OK):
        raise ArgumentError(f"{name} can't be written: Permission denied")


def _replace(path: Path, data: bytes) -> bool:
    """Replace a file by a new one; return False if the new one can't get the file's owner."""
    # A short name: the file's own may be as long as the file system allows.
    descriptor, name = tempfile.mkstemp(".tmp", ".", path.parent)
    beside = Path(name)
    try:
        _write_durably(descriptor, data)
        before = path.stat()
        try:
            os.chown(beside, before.st_uid, before.st_gid)
        except PermissionError:
            return False
        # After the owner, whose change clears the bits of setuid; extended attributes as well.
        shutil.copystat(path, beside)
        os.utime(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_path(path.parent)
    return True


def _overwrite(path: Path, old: bytes, new: bytes) -> None:
    """Write a file in place, while a copy of its old bytes lies beside it."""
    backup = _locate_backup(path)
    try:
        _write_durably(os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), old)
    except OSError:
        backup.unlink(missing_ok=True)
        raise
    sync_path(path.parent)
    try:
        _write_durably(os.open(path, os.O_WRONLY | os.O_TRUNC), new)
    except OSError:
        # The disk may have no room for the new text.
        _write_durably(os.open(path, os.O_WRONLY | os.O_TRUNC), old)
        raise
    finally:
        if path.read_bytes() in (old, new):
            backup.unlink()


def _locate_backup(path: Path) -> Path:
    digest = sha256(os.fsencode(path.name)).hexdigest()[:12]
    return path.with_name(f".xlashard-{digest}.before")


def _write_durably(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
