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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from xlashard._jax.runtime import executables
from xlashard._jax.runtime.shardings import Device, read_reduction, reduction_arguments
from xlashard._jax.trace.tracing import is_extended, physical_aval
from xlashard.core.sharding import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    XLACompatibleSharding,
)
from xlashard.errors import ArgumentError, SavedProgramError
from xlashard.support.documents import parse_json

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


@contextmanager
def reading() -> Iterator[None]:
    """Raise a `SavedProgramError` for any error of an invalid header within a block."""
    try:
        yield
    except (SavedProgramError, ArgumentError):
        raise
    except Exception as error:
        # JAX has classes of its own, such as that of a spec with an axis twice.
        raise SavedProgramError(
            f"the saved program's header is invalid ({error!r}): compile and serialize() it again"
        ) from None


type Json = Any


def type_to_json(aval: Any) -> dict[str, Json]:
    """Return an abstract value as JSON.

    Raises:
        SavedProgramError: Its dtype is not determined by its name.
    """
    name = str(aval.dtype)
    try:
        known = executables.dtype_of(name)
    except TypeError:
        known = None
    if known != aval.dtype:
        raise SavedProgramError(  # no-catalogue: needs a user-defined key type
            f"a program with values of the dtype {name} can't be saved, since its name does not "
            "determine it: pass jax.random.key_data(key) for user-defined keys"
        )
    return {
        "shape": list(aval.shape),
        "dtype": name,
        "weak": bool(getattr(aval, "weak_type", False)),
        "typed": not aval.sharding.mesh.empty,
    }


def type_from_json(
    record: Mapping[str, Json], sharding: XLACompatibleSharding | None = None
) -> Any:
    """Parse an abstract value, of an array with a sharding."""
    shape = _sizes(record["shape"])
    dtype = executables.dtype_of(record["dtype"])
    jax_sharding = (
        sharding.jax_sharding(shape) if sharding is not None and record["typed"] else None
    )
    return executables.aval(shape, dtype, weak_type=bool(record["weak"]), sharding=jax_sharding)


def _sizes(values: Json) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and size >= 0 for size in sizes):
        # no-catalogue: needs an invalid header with a valid checksum
        raise ValueError(f"the sizes {values}")
    return sizes


_UNCONSTRAINED = {"unconstrained": True}
"""Entry of a spec in JSON; the others are names, lists of names, and null."""


def entries_to_json(spec: PartitionSpec) -> list[Json]:
    """Return the entries of a spec as JSON; its reductions are left out."""
    return list(map(_entry_to_json, spec.partitions))


def _entry_to_json(entry: Any) -> Json:
    if entry is PartitionSpec.UNCONSTRAINED:
        return _UNCONSTRAINED
    return list(entry) if isinstance(entry, tuple) else entry


def spec_from_json(entries: Sequence[Json], **reductions: Any) -> PartitionSpec:
    """Parse the entries of a spec.

    Args:
        entries: The entries.
        reductions: Its unreduced and reduced axes.
    """
    return PartitionSpec(*map(_entry_of_json, entries), **reductions)


def _entry_of_json(entry: Json) -> Any:
    if entry == _UNCONSTRAINED:
        return PartitionSpec.UNCONSTRAINED
    return tuple(entry) if isinstance(entry, list) else entry


@dataclass
class ShardingWriter:
    """Shardings over one list of devices as JSON, with each mesh written once.

    Attributes:
        meshes: The meshes written so far.
    """

    meshes: list[Json] = field(default_factory=list)

    def write(self, sharding: XLACompatibleSharding, ndim: int) -> dict[str, Json]:
        """Return a sharding of values of a rank as JSON."""
        kind = sharding.memory_kind
        if isinstance(sharding, NamedSharding):
            entries = entries_to_json(sharding.spec)
            record = {"mesh": self._number(sharding.mesh), "spec": entries, "memory": kind}
            return record | _reductions_to_json(sharding.spec)
        if isinstance(sharding, SingleDeviceSharding):
            return {"memory": kind}
        # A user-defined class is restored as its tiles.
        assignment = (
            sharding.tile_assignment
            if isinstance(sharding, GSPMDSharding)
            else sharding.rank_tiling(ndim).to_tile_assignment()
        )
        return {"tiles": assignment.to_text(), "memory": kind}

    def _number(self, mesh: Any) -> int:
        record = {
            "axes": [[str(name), int(size)] for name, size in mesh.shape.items()],
            "types": [kind.name for kind in mesh.axis_types],
        }
        if record not in self.meshes:
            self.meshes.append(record)
        return self.meshes.index(record)


class ShardingReader:
    """Parser of shardings.

    Args:
        meshes: The meshes of the writer.
        devices: The devices of the shardings.
    """

    def __init__(self, meshes: Sequence[Json], devices: tuple[Device, ...]) -> None:
        self._devices = devices
        self._meshes = [_mesh(mesh, devices) for mesh in meshes]

    def read(self, record: Mapping[str, Json]) -> XLACompatibleSharding:
        """Parse a sharding."""
        kind = record["memory"]
        if "spec" in record:
            spec = spec_from_json(record["spec"], **_reductions_of_json(record))
            return NamedSharding(self._meshes[record["mesh"]], spec, memory_kind=kind)
        if "tiles" in record:
            return GSPMDSharding(self._devices, record["tiles"], memory_kind=kind)
        (device,) = self._devices
        return SingleDeviceSharding(device, memory_kind=kind)


def _reductions_to_json(spec: PartitionSpec) -> dict[str, Json]:
    """Return the unreduced and reduced axes of a spec; empty for most."""
    axes = {"unreduced": sorted(spec.unreduced), "reduced": sorted(spec.reduced)}
    record: dict[str, Json] = {name: names for name, names in axes.items() if names}
    reduction = read_reduction(spec)
    return record | ({"reduction": reduction} if reduction else {})


def _reductions_of_json(record: Mapping[str, Json]) -> dict[str, Any]:
    return reduction_arguments(
        record.get("unreduced", ()), record.get("reduced", ()), record.get("reduction", "")
    )


def _mesh(record: Mapping[str, Json], devices: tuple[Device, ...]) -> Mesh:
    grid = np.array(devices, dtype=object)
    names = [name for name, _ in record["axes"]]
    types = tuple(AxisType[kind] for kind in record["types"])
    return Mesh(grid.reshape(_sizes([size for _, size in record["axes"]])), names, axis_types=types)


def array_to_bytes(value: Any) -> memoryview:
    """Return the elements of an array, row by row."""
    if is_extended(value):
        value = jax.random.key_data(value)
    flat = np.ascontiguousarray(np.asarray(value)).reshape(-1)
    return memoryview(flat.view(np.uint8))


def array_from_bytes(data: memoryview, aval: Any) -> Any:
    """Return the array of these elements."""
    if is_extended(aval):
        inner = physical_aval(aval)
        return executables.keys_of(np.frombuffer(data, np.uint32).reshape(inner.shape), aval.dtype)
    # A copy, since the caller may overwrite the data.
    return np.frombuffer(data, aval.dtype).reshape(aval.shape).copy()
