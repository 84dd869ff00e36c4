"""JSON of the types and shardings of a program's values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import AxisType, UnreducedKind

from xlashard._jax.runtime import executables
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace.tracing import is_extended, physical_aval
from xlashard.errors import SavedProgramError
from xlashard.sharding import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    XLACompatibleSharding,
)

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
        "typed": executables.is_typed_by_mesh(aval),
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
            spec = [list(e) if isinstance(e, tuple) else e for e in sharding.spec.partitions]
            record = {"mesh": self._number(sharding.mesh), "spec": spec, "memory": kind}
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
            spec = [tuple(e) if isinstance(e, list) else e for e in record["spec"]]
            full_spec = PartitionSpec(*spec, **_reductions_of_json(record))
            return NamedSharding(self._meshes[record["mesh"]], full_spec, memory_kind=kind)
        if "tiles" in record:
            return GSPMDSharding(self._devices, record["tiles"], memory_kind=kind)
        (device,) = self._devices
        return SingleDeviceSharding(device, memory_kind=kind)


def _reductions_to_json(spec: PartitionSpec) -> dict[str, Json]:
    """Return the unreduced and reduced axes of a spec; empty for most."""
    axes = {"unreduced": sorted(spec.unreduced), "reduced": sorted(spec.reduced)}
    record: dict[str, Json] = {name: names for name, names in axes.items() if names}
    return record | ({"reduction": spec.unreduced_kind.name} if spec.unreduced_kind else {})


def _reductions_of_json(record: Mapping[str, Json]) -> dict[str, Any]:
    kind = record.get("reduction")
    return {
        "unreduced": set(record.get("unreduced", ())),
        "reduced": set(record.get("reduced", ())),
        "unreduced_kind": None if kind is None else UnreducedKind[kind],
    }


def _mesh(record: Mapping[str, Json], devices: tuple[Device, ...]) -> Mesh:
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    names = [name for name, _ in record["axes"]]
    types = tuple(AxisType[kind] for kind in record["types"])
    return Mesh(grid.reshape(_sizes([size for _, size in record["axes"]])), names, axis_types=types)


def array_to_bytes(value: Any) -> memoryview:
    """Return the elements of an array, row by row."""
    if is_extended(value):
        value = executables.key_data(value)
    flat = np.ascontiguousarray(np.asarray(value)).reshape(-1)
    return memoryview(flat.view(np.uint8))


def array_from_bytes(data: memoryview, aval: Any) -> Any:
    """Return the array of these elements."""
    if is_extended(aval):
        inner = physical_aval(aval)
        return executables.keys_of(np.frombuffer(data, np.uint32).reshape(inner.shape), aval.dtype)
    # A copy, since the caller may overwrite the data.
    return np.frombuffer(data, aval.dtype).reshape(aval.shape).copy()
