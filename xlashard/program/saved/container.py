"""The file format of saved programs: bytes in named sections behind a header, under a checksum.

All integers are little-endian.

| offset | bytes | contents |
|---|---|---|
| 0 | 8 | `89 58 4C 53 48 52 44 0A`, the signature of the format |
| 8 | 4 | the version of the format |
| 12 | 4 | zero |
| 16 | 8 | the length of the header |
| 24 | 8 | the length of the whole file |
| 32 | 32 | SHA-256 of all other bytes |
| 64 | | the header, JSON in UTF-8 |
| | | the sections, one after the other, as the header's `sections` lists them with their lengths |

The checksum detects damage. It does not authenticate a file: it can be computed by any writer.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xlashard.documents import parse_json
from xlashard.errors import ArgumentError, SavedProgramError

FORMAT = 2
"""The version of the format that this release writes and reads."""

_MAGIC = b"\x89XLSHRD\n"
_START = struct.Struct("<8sIIQQ")
_CHECKSUM_SIZE = 32
_HEADER_AT = _START.size + _CHECKSUM_SIZE


@dataclass(frozen=True)
class Contents:
    """Contents of a file.

    Attributes:
        header: The header of `pack`; any JSON.
        sections: The sections by name; they share the file's memory.
    """

    header: dict[str, Any]
    sections: dict[str, memoryview]


def pack(header: Mapping[str, Any], sections: Mapping[str, bytes | memoryview]) -> bytes:
    """Return the bytes of a file with a header and sections.

    Args:
        header: JSON values.
        sections: Their bytes, by name.
    """
    parts = [memoryview(section).cast("B") for section in sections.values()]
    listed = [[name, part.nbytes] for name, part in zip(sections, parts, strict=True)]
    text = json.dumps({**header, "sections": listed}, separators=(",", ":")).encode()
    total = _HEADER_AT + len(text) + sum(part.nbytes for part in parts)
    start = _START.pack(_MAGIC, FORMAT, 0, len(text), total)
    return b"".join([start, _checksum(start, text, *parts), text, *parts])


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def unpack(data: bytes | bytearray | memoryview) -> Contents:
    """Return header and sections of an undamaged file.

    Raises:
        ArgumentError: The value is not bytes.
        SavedProgramError: The file has another format or version, is truncated or damaged.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ArgumentError(
            f"a saved program must be bytes, not {type(data).__name__}: for a file write "
            "deserialize(Path(...).read_bytes())"
        )
    file = memoryview(data).cast("B")
    header_size = _checked_start(file)
    header = _read_header(file[_HEADER_AT : _HEADER_AT + header_size])
    sections, at = {}, _HEADER_AT + header_size
    with reading():
        for name, size in header.pop("sections"):
            if type(size) is not int or size < 0 or at + size > file.nbytes:
                # no-catalogue: needs an invalid header with a valid checksum
                raise ValueError(f"a section {name} of {size} bytes")
            sections[str(name)] = file[at : at + size]
            at += size
    return Contents(header, sections)


def _checked_start(file: memoryview) -> int:
    """Return the length of the header of a whole file."""
    if bytes(file[: len(_MAGIC)]) != _MAGIC[: file.nbytes] or not file.nbytes:
        raise SavedProgramError(
            f"the bytes are not a saved program: they begin with {bytes(file[:8])!r}, not with "
            f"{_MAGIC!r}; "
            "pass the result of serialize() to deserialize()"
        )
    if file.nbytes < _HEADER_AT:
        raise SavedProgramError(
            f"the saved program is cut off after {file.nbytes} bytes: copy the file again"
        )
    _, version, _, header_size, total = _START.unpack_from(file)
    if version != FORMAT:
        raise SavedProgramError(
            f"the saved program is of format {version}, and this xlashard reads format {FORMAT}: "
            "compile and serialize() it again with this release"
        )
    if total > file.nbytes:
        raise SavedProgramError(
            f"the saved program is cut off: {file.nbytes:,} of its {total:,} bytes are there; copy "
            "the file again"
        )
    checksum = bytes(file[_START.size : _HEADER_AT])
    sizes_fit = total == file.nbytes and header_size <= total - _HEADER_AT
    if not sizes_fit or _checksum(file[: _START.size], file[_HEADER_AT:]) != checksum:
        raise SavedProgramError(
            "the saved program is damaged: its bytes do not give its checksum; copy the file again"
        )
    return header_size


def _read_header(text: memoryview) -> dict[str, Any]:
    with reading():
        header = parse_json(bytes(text))
        if not isinstance(header, dict):
            # no-catalogue: needs an invalid header with a valid checksum
            raise TypeError("no object")
        return header


# Errors of the reader itself, and of its caller.
_OWN = (SavedProgramError, ArgumentError)


class reading:
    """Context in which Python's errors of an invalid header become a `SavedProgramError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        wrong = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)
        if isinstance(error, wrong) and not isinstance(error, _OWN):
            raise SavedProgramError(
                f"the saved program's header is invalid ({error!r}): compile and "
                "serialize() it again"
            ) from None
