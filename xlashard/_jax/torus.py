"""What PJRT says of the topology that a device is part of, and which libtpu that is."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from jaxlib import _jax as jaxlib_module

from xlashard._jax.shardings import Device
from xlashard._jax.topologies import libtpu_version

# The place of the wraps in libtpu's description of a topology: fields of nested messages.
_WRAPS = (9, 2, 1, 7)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def libtpu_in_use() -> str | None:
    """The version of libtpu; None where the library is not that of an installed package."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    package = find_spec("libtpu")
    if path and (package is None or Path(path).parent != Path(package.origin or "").parent):
        return None
    return libtpu_version()


def stated_wraps(device: Device) -> tuple[bool, ...]:
    """For each dimension of a device's torus, whether its links close to a ring.

    Empty where the topology was not told so when it was made: then its shape decides.
    """
    try:
        said = jaxlib_module.get_topology_for_devices([device]).serialize()
        for field in _WRAPS:
            said = _bytes_of(said, field)
        stated = {number for number, value in _fields(said) if value == 1}
    except (RuntimeError, NotImplementedError, ValueError):  # not every PJRT plugin says it
        return ()
    return tuple(number in stated for number in (1, 2, 3)) if said else ()


def _bytes_of(message: bytes, field: int) -> bytes:
    found = [value for number, value in _fields(message) if number == field]
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise ValueError(f"no field {field}")  # no-catalogue: caught: the topology lacks the field
    return found[0]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind not in (_FIXED64, _BYTES, _FIXED32):
            # no-catalogue: caught: the topology lacks the field
            raise ValueError(f"a field of kind {kind}")
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind, 0)
        if kind == _BYTES:
            size, at = _varint(message, at)
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
        if byte < 128:
            return value, at
    # no-catalogue: caught: the topology lacks the field
    raise ValueError("a number that is cut off")
