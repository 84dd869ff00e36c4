"""Block of a mesh that belongs to this process, and values on it as parts of global arrays."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.global_state import (
    Transfer,
    active_guards,
    allow_transfers,
    check_transfer,
    cleared_with_jax,
    guarded,
)
from xlashard._jax.runtime.transfer import Handle, HandleType, assemble, split
from xlashard.core.array import Array
from xlashard.core.array.array_class.array import wrap
from xlashard.core.array.array_class.base import check_alive, type_text
from xlashard.core.array.array_class.handles import is_key_array, key_handle, keys_over
from xlashard.core.array.placement.put import as_host_value, host_value, put_value
from xlashard.core.array.placement.read import read_value
from xlashard.core.array.placement.target import ResolvedSharding, resolve_sharding
from xlashard.core.array.reshard.execute import reshard
from xlashard.core.array.reshard.plan import same_shards
from xlashard.core.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    from_jax,
    grid_of,
    spec_of,
)
from xlashard.errors import ArgumentError, BoxError, counted
from xlashard.geometry import MeshGrid, Spec, validate_spec
from xlashard.support.formatting import format_processes
from xlashard.support.lazily import dataclass

# Largest mesh that an error message draws, in devices.
_DRAWN = 64


# Enough for the distinct shapes of a few batches and states.
_KEPT = 1024


@dataclass(frozen=True, eq=False)
class HostMesh:
    """A mesh and the block of it that belongs to this process.

    Attributes:
        whole: The mesh.
        local: Mesh of this process's devices, with the same axis names and possibly smaller axes.
        offsets: Start of the block along each axis.
        processes: Processes that own a block.
    """

    whole: Mesh
    local: Mesh
    offsets: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def is_all_here(self) -> bool:
        """True if every device of the mesh belongs to this process."""
        return self.whole.size == self.local.size

    def global_sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of a global array."""
        return _named(self.whole, spec)

    def global_shape(self, spec: PartitionSpec, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the global array composed of local parts of the given shape.

        Raises:
            GeometryError: The local shape is not divisible over this process's devices.
        """
        return _rescaled(spec_of(spec), shape, grid_of(self.local), grid_of(self.whole))

    def local_shape(self, spec: PartitionSpec, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of this process's part of a global array.

        Raises:
            GeometryError: The global shape is not divisible over all devices.
        """
        return _rescaled(spec_of(spec), shape, grid_of(self.whole), grid_of(self.local))

    def block(self, spec: Spec) -> str:
        """Return a name of this process's block of arrays; equal names mean equal blocks."""
        at = zip(self.whole.axis_names, self.offsets, strict=True)
        return ",".join(f"{axis}={offset}" for axis, offset in at if axis in spec.axes)

    def is_shared(self, spec: Spec) -> bool:
        """Return whether other processes hold the same block of arrays."""
        local, whole = self.local.shape, self.whole.shape
        return any(local[axis] < whole[axis] for axis in whole if axis not in spec.axes)

    def describe(self) -> str:
        """Describe the mesh and this process's part of it."""
        whole, local = grid_of(self.whole).describe(), grid_of(self.local).describe()
        if self.is_all_here:
            return f"the mesh {whole}"
        return f"this process's part ({local}) of the mesh {whole}"


_named = lru_cache(maxsize=4096)(NamedSharding)


def _rescaled(
    spec: Spec, shape: Sequence[int], source: MeshGrid, target: MeshGrid
) -> tuple[int, ...]:
    """Return the shape of the array with the same tiles on another grid."""
    shape = tuple(shape)
    validate_spec(spec, source, shape)
    return tuple(
        size // _tiles(axes, source) * _tiles(axes, target)
        for size, axes in zip(shape, spec.for_rank(len(shape)), strict=True)
    )


def _tiles(axes: tuple[str, ...] | None, grid: MeshGrid) -> int:
    return math.prod(grid.shape[axis] for axis in axes or ())


@lru_cache(maxsize=64)
def _host_mesh(mesh: Mesh) -> HostMesh:
    owners = [device.process_index for device in mesh.devices.flat]
    grid, me = grid_of(mesh), jax.process_index()
    boxes = grid.boxes_of(owners)
    for process, box in boxes.items():
        if box is None:
            # no-catalogue: needs several processes
            raise BoxError(_gap_text(grid, owners, process))
    own_box = boxes.get(me)
    if own_box is None:
        raise BoxError(  # no-catalogue: needs several processes
            f"global_mesh has no device of this process, {me}; its {counted(mesh.size, 'device')} "
            f"belong to {format_processes(tuple(boxes))}: call the function only in processes that "
            f"own a device of the mesh, under `if jax.process_index() in {list(boxes)}:`"
        )
    window = tuple(slice(at, at + n) for at, n in zip(own_box.offsets, own_box.sizes, strict=True))
    local = Mesh(mesh.devices[window], mesh.axis_names, axis_types=mesh.axis_types)
    local = mesh if local.size == mesh.size else local
    return HostMesh(mesh, local, own_box.offsets, tuple(boxes))


def host_mesh(mesh: Any) -> HostMesh:
    """Return this process's block of a mesh, in which every process must own a contiguous box.

    Raises:
        ArgumentError: The value is not a mesh of devices.
        BoxError: The devices of some process are not a contiguous box; raised alike in all
            processes.
    """
    if isinstance(mesh, AbstractMesh) or not isinstance(mesh, Mesh) or mesh.empty:
        raise ArgumentError(
            f"global_mesh must be a mesh of devices, not {_kind(mesh)}: write "
            "Mesh(np.array(jax.devices()), ('data',))"
        )
    return _host_mesh(mesh)


def _kind(mesh: Any) -> str:
    if isinstance(mesh, Mesh):
        return "an empty one"
    return f"{'an' if isinstance(mesh, AbstractMesh) else 'a'} {type(mesh).__name__}"


def _gap_text(grid: MeshGrid, owners: Sequence[int], process: int) -> str:
    """Explain which devices break the box, and how to fix the mesh."""
    positions = [i for i, owner in enumerate(owners) if owner == process]
    try:
        reason = f"{grid.local_box(positions)}"
    except BoxError as error:
        reason = str(error)
    drawn = f", by process:\n{_picture(grid, owners)}\n" if len(owners) <= _DRAWN else ". "
    return (
        f"the devices of process {process} are not a contiguous box of global_mesh "
        f"({grid.describe()}): {reason}. A host-local array is one block of the "
        f"mesh{drawn}{_reordered(grid, owners)}, or keep this mesh and write "
        "make_array_from_process_local_data(NamedSharding(global_mesh, P(...)), local, "
        "global_shape=(...)), which accepts any mesh"
    )


def _reordered(grid: MeshGrid, owners: Sequence[int]) -> str:
    """Suggest a mesh of the same shape in which each process owns a box."""
    if None in grid.boxes_of(sorted(owners)).values():
        return "Choose axes that the devices of a process divide"
    names = ", ".join(map(repr, grid.axis_names))
    shape = ", ".join(map(str, grid.axis_sizes))
    return (
        "Put the devices of a process next to each other: Mesh(np.array(sorted("
        f"global_mesh.devices.flat, key=lambda d: (d.process_index, d.id))).reshape({shape}), "
        f"({names},)), on TPU mesh_utils.create_device_mesh(({shape},), contiguous_submeshes=True)"
    )


def _picture(grid: MeshGrid, owners: Sequence[int]) -> str:
    """Draw the process of each device: last axis across, second to last axis down."""
    table = np.array(owners).reshape(grid.axis_sizes)
    width = max(len(str(owner)) for owner in owners)
    lines = []
    for outer in np.ndindex(table.shape[:-2]):
        rows = np.atleast_2d(table[outer])
        at = ", ".join(f"{n!r}={i}" for n, i in zip(grid.axis_names, outer, strict=False))
        lines += [f"  at {at}:"] if at else []
        lines += ["    " + " ".join(str(owner).rjust(width) for owner in row) for row in rows]
    return "\n".join(lines)


def as_global(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    """Return the global array of which a concrete value is this process's part."""
    return _converted(x, host, spec, to_global=True)


def as_host_local(x: Any, host: HostMesh, spec: PartitionSpec) -> Any:
    """Return this process's part of a concrete global value."""
    return _converted(x, host, spec, to_global=False)


@cleared_with_jax
@lru_cache(maxsize=_KEPT)
def _boundary(
    host: HostMesh, spec: PartitionSpec, shape: tuple[int, ...], to_global: bool
) -> tuple[ResolvedSharding, ResolvedSharding]:
    """Return the required placement of a value, and the placement of its converted view."""
    local, whole = _named(host.local, spec), host.global_sharding(spec)
    if to_global:
        global_shape = host.global_shape(spec, shape)
        return resolve_sharding(shape, local), resolve_sharding(global_shape, whole)
    local_shape = host.local_shape(spec, shape)
    return resolve_sharding(shape, whole), resolve_sharding(local_shape, local)


def _converted(x: Any, host: HostMesh, spec: PartitionSpec, to_global: bool) -> Any:
    if is_key_array(x):
        # The rank of the keys matters, not the rank of the key data.
        _boundary(host, spec, x.shape, to_global)
        return keys_over(_converted(key_handle(x), host, spec, to_global)._handle, x)
    source, target = _boundary(host, spec, _shape_of(x), to_global)
    if isinstance(x, np.ndarray) and x.dtype == jax.dtypes.float0:
        return np.zeros(target.shape, x.dtype)
    return _viewed(_put(x, source), target)


def _shape_of(x: Any) -> tuple[int, ...]:
    if isinstance(x, jax.Array) or getattr(x, "dtype", None) == jax.dtypes.float0:
        return x.shape
    return as_host_value(x, lambda: "it").value.shape


def _put(x: Any, target: ResolvedSharding) -> Handle:
    """Transfer a concrete value to its placement; a value already there keeps its buffers."""
    guards = active_guards()
    if isinstance(x, Array | HandleType):
        check_alive(x)
        array = x if isinstance(x, Array) else Array.from_jax(x)
        if array.is_fully_addressable == target.sharding.is_fully_addressable:
            handle = array._handle
            if guards is not None and not same_shards(
                resolve_sharding(handle.shape, from_jax(handle.sharding)), target
            ):
                check_transfer(guards, Transfer.DEVICE_TO_DEVICE, f"the array {type_text(array)}")
            with allow_transfers():
                return reshard(handle, target)
        # Each process has the whole value and transfers its own part.
        return put_value(read_value(array), target, weak_type=array.weak_type)
    value, weak_type = host_value(x, lambda: "it")
    with guarded(guards, Transfer.HOST_TO_DEVICE, f"the {type(x).__name__}"):
        return put_value(value, target, weak_type=weak_type)


def _viewed(handle: Handle, target: ResolvedSharding) -> Array:
    """Return an array with the same shards under another shape and sharding."""
    if handle.shape == target.shape and handle.sharding == target.jax_sharding and handle.committed:
        return wrap(handle, target.sharding)
    aval = target.aval(handle.dtype, handle.weak_type)
    return wrap(assemble(aval, target.jax_sharding, split(handle)), target.sharding)
