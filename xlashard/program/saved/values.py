"""Types and shardings of a program's values as JSON, and back."""

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
        SavedProgramError: If it is of a dtype that can't be told by its name.
    """
    name = str(aval.dtype)
    try:
        known = executables.dtype_of(name)
    except TypeError:
        known = None
    if known != aval.dtype:
        raise SavedProgramError(  # no-catalogue: needs a user-defined key type
            f"a program of values of the dtype {name} can't be saved, for nothing says where that "
            "comes from: pass jax.random.key_data(key) for keys of your own kind"
        )
    return {
        "shape": list(aval.shape),
        "dtype": name,
        "weak": bool(getattr(aval, "weak_type", False)),
        "typed": executables.is_typed_by_mesh(aval),
    }


def type_from_json(said: Mapping[str, Json], sharding: XLACompatibleSharding | None = None) -> Any:
    """Return the abstract value of such JSON, of an array that lies so."""
    shape = _sizes(said["shape"])
    dtype = executables.dtype_of(said["dtype"])
    twin = sharding.twin(shape) if sharding is not None and said["typed"] else None
    return executables.aval(shape, dtype, weak_type=bool(said["weak"]), sharding=twin)


def _sizes(said: Json) -> tuple[int, ...]:
    sizes = tuple(said)
    if not all(type(size) is int and size >= 0 for size in sizes):
        # no-catalogue: needs an invalid header with a valid checksum
        raise ValueError(f"the sizes {said}")
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
        # A user's own class comes back as the tiles that it says.
        assignment = (
            sharding.tile_assignment
            if isinstance(sharding, GSPMDSharding)
            else sharding.rank_tiling(ndim).to_tile_assignment()
        )
        return {"tiles": assignment.to_text(), "memory": kind}

    def _number(self, mesh: Any) -> int:
        said = {
            "axes": [[str(name), int(size)] for name, size in mesh.shape.items()],
            "types": [kind.name for kind in mesh.axis_types],
        }
        if said not in self.meshes:
            self.meshes.append(said)
        return self.meshes.index(said)


class ShardingReader:
    """Shardings of such JSON.

    Args:
        meshes: What the writer has gathered.
        devices: The devices to deal out to.
    """

    def __init__(self, meshes: Sequence[Json], devices: tuple[Device, ...]) -> None:
        self._devices = devices
        self._meshes = [_mesh(said, devices) for said in meshes]

    def read(self, said: Mapping[str, Json]) -> XLACompatibleSharding:
        """Return the sharding of such JSON."""
        kind = said["memory"]
        if "spec" in said:
            spec = [tuple(e) if isinstance(e, list) else e for e in said["spec"]]
            full_spec = PartitionSpec(*spec, **_reductions_of_json(said))
            return NamedSharding(self._meshes[said["mesh"]], full_spec, memory_kind=kind)
        if "tiles" in said:
            return GSPMDSharding(self._devices, said["tiles"], memory_kind=kind)
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


def _mesh(said: Mapping[str, Json], devices: tuple[Device, ...]) -> Mesh:
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    names = [name for name, _ in said["axes"]]
    types = tuple(AxisType[kind] for kind in said["types"])
    return Mesh(grid.reshape(_sizes([size for _, size in said["axes"]])), names, axis_types=types)


def array_to_bytes(value: Any) -> memoryview:
    """Return the elements of an array, row by row."""
    if is_extended(value):
        value = executables.key_data(value)
    flat = np.ascontiguousarray(np.asarray(value)).reshape(-1)
    return memoryview(flat.view(np.uint8))


def array_from_bytes(data: memoryview, aval: Any) -> Any:
    """Return the array of such elements."""
    if is_extended(aval):
        inner = physical_aval(aval)
        return executables.keys_of(np.frombuffer(data, np.uint32).reshape(inner.shape), aval.dtype)
    # A copy: the caller may write over what was read.
    return np.frombuffer(data, aval.dtype).reshape(aval.shape).copy()
