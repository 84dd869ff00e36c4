"""The key-value store of JAX's coordination service, for values of any size.

The service takes a few megabytes at a time. A longer value goes in parts, which are written before
the key itself: whoever finds the key finds them all.
"""

import zlib

from xlashard._jax import coordination

ROOT = "xlashard"
"""The folder of all keys of this project."""

_PART = 1 << 20
_WHOLE, _PARTS = b"w", b"p"


def write(key: str, value: bytes, *, overwrite: bool = False) -> bool:
    """Writes a value under a key.

    Args:
        key: Its name, below the folder of this project.
        value: The value, of any size.
        overwrite: Whether to replace what is there. Only for values of less than 1 MB: the parts
            of a longer one can't be replaced at one moment.

    Returns:
        False if there is a value already, which then stays.
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
    """The value of a key, waited for up to some seconds; None if there is none by then."""
    return _unpacked(key, coordination.read(f"{ROOT}/{key}", seconds))


def listed(folder: str) -> dict[str, bytes]:
    """The values of all keys below a folder, by the part of their names past it."""
    found = {
        name: _unpacked(f"{folder}/{name}", value)
        for name, value in coordination.listed(f"{ROOT}/{folder}").items()
    }
    return {name: value for name, value in found.items() if value is not None}


def drop(key: str) -> None:
    """Removes a key and all keys below it."""
    coordination.drop(f"{ROOT}/{key}")
    coordination.drop(f"{ROOT}/parts/{key}")


def _unpacked(key: str, value: bytes | None) -> bytes | None:
    if value is None:
        return None
    if value[:1] == _WHOLE:
        return value[1:]
    parts = [coordination.read(f"{ROOT}/parts/{key}/{n}") for n in range(int(value[1:]))]
    if any(part is None for part in parts):
        return None  # dropped while it was read
    return zlib.decompress(b"".join(part for part in parts if part is not None))
