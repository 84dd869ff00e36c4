"""Key-value store of JAX's coordination service, for values of any size.

The service accepts a few megabytes per key. A longer value is split into parts, which are written
before the key itself, so a process that reads the key can also read every part.
"""

import urllib.parse
import zlib

from xlashard._jax.runtime import coordination

ROOT = "xlashard"
"""Prefix of all keys of this package."""

_PART = 1 << 20
_WHOLE, _PARTS = b"w", b"p"


def write(key: str, value: bytes, *, overwrite: bool = False) -> bool:
    """Write a value under a key.

    Args:
        key: Name of the key, below `ROOT`.
        value: The value, of any size.
        overwrite: Whether to replace an existing value. Only for values below 1 MB, because the
            parts of a longer value cannot be replaced atomically.

    Returns:
        False if the key already has a value, which is kept.
    """
    if len(value) < _PART:
        return coordination.write(f"{ROOT}/{key}", _WHOLE + value, overwrite=overwrite)
    packed = zlib.compress(value, 1)
    starts = range(0, len(packed), _PART)
    for number, start in enumerate(starts):
        part = packed[start : start + _PART]
        if not coordination.write(f"{ROOT}/parts/{key}/{number}", part):
            return False
    return coordination.write(f"{ROOT}/{key}", _PARTS + str(len(starts)).encode())


def read(key: str, seconds: float = 0) -> bytes | None:
    """Return the value of a key, or None if the key has no value after `seconds`."""
    return _unpacked(key, coordination.read(f"{ROOT}/{key}", seconds))


def listed(folder: str) -> dict[str, bytes]:
    """Return the values of all keys below a folder, keyed by the rest of their names."""
    values = {
        name: _unpacked(f"{folder}/{name}", value)
        for name, value in coordination.list_values(f"{ROOT}/{folder}").items()
    }
    return {name: value for name, value in values.items() if value is not None}


def drop(key: str) -> None:
    """Remove a key and all keys below it."""
    coordination.delete(f"{ROOT}/{key}")
    coordination.delete(f"{ROOT}/parts/{key}")


def _unpacked(key: str, value: bytes | None) -> bytes | None:
    if value is None:
        return None
    if value[:1] == _WHOLE:
        return value[1:]
    parts = [coordination.read(f"{ROOT}/parts/{key}/{n}") for n in range(int(value[1:]))]
    if any(part is None for part in parts):
        return None  # The key was dropped between two reads.
    return zlib.decompress(b"".join(part for part in parts if part is not None))


def quote_key(name: str) -> str:
    """Escape separators in one part of a key; distinct names stay distinct."""
    return urllib.parse.quote(name, safe="")
