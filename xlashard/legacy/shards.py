"""Which part of a global array each device of a mesh holds, in the era's words."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

import jax

from xlashard._jax.shardings import AbstractMesh
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError
from xlashard.geometry import MeshGrid, Spec, Tiling, parse_spec, validate_spec
from xlashard.legacy.specs import PartitionSpec

Device = jax.Device
Shape = tuple[int, ...]
Index = tuple[slice, ...]
MeshAxes = PartitionSpec

# The distinct shapes of a large parameter tree; each entry may be as long as a pod has devices.
_MAPPINGS_KEPT = 1024
_SHAPES_KEPT = 4096


@dataclass(frozen=True)
class Shard:
    """The piece of a global array on one device.

    Two of them are equal if they are the same place, whatever is there.

    Attributes:
        device: The device.
        index: Which part of the global array it is: one slice per dimension.
        replica_id: Which copy of that part: 0 for the first device that holds it, and so on.
        data: The piece, on its device; None where the device belongs to another process.

    Example:
        >>> Shard("device 3", (slice(0, 2), slice(None)), 0).data is None
        True
    """

    device: Device
    index: Index
    replica_id: int
    data: Any = field(default=None, compare=False)


def get_shard_indices(
    global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any
) -> dict[Device, Index]:
    """The part of an array that each device of a mesh holds.

    Args:
        global_shape: Of the whole array, in elements.
        global_mesh: A mesh; its devices may be anything that can be a key of a dict. Those of an
            `AbstractMesh` are called by their positions, from 0.
        mesh_axes: For each dimension None, the name of a mesh axis or a tuple of names: a
            `PartitionSpec` or a plain tuple.

    Returns:
        One slice per dimension for every device, in the order of the mesh. A dimension that is not
        cut is `slice(None)`.

    Raises:
        GeometryError: The axes don't fit the mesh, or don't divide the shape.
        ArgumentError: There is no mesh, or its devices can't be keys.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
        >>> get_shard_indices((8, 2), mesh, ("y",))[1]
        (slice(4, 8, None), slice(None, None, None))
    """
    with short_tracebacks:
        return dict(_indices(global_shape, global_mesh, mesh_axes))


def get_shard_indices_replica_ids(
    global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any
) -> dict[Device, tuple[Index, int]]:
    """The part of an array that each device of a mesh holds, and which copy of it.

    Args:
        global_shape: Of the whole array, in elements.
        global_mesh: As for `get_shard_indices`.
        mesh_axes: As for `get_shard_indices`.

    Returns:
        By device the index and the replica id, in the order of the mesh.

    Raises:
        GeometryError: The axes don't fit the mesh, or don't divide the shape.
        ArgumentError: There is no mesh, or its devices can't be keys.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
        >>> get_shard_indices_replica_ids((4,), mesh, ("y",))[2]
        ((slice(0, 2, None),), 1)
    """
    with short_tracebacks:
        return dict(_indices_replica_ids(global_shape, global_mesh, mesh_axes))


def get_shard_shape(global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any) -> Shape:
    """The shape of the piece on one device.

    Args:
        global_shape: Of the whole array, in elements.
        global_mesh: As for `get_shard_indices`; what its devices are is not asked.
        mesh_axes: As for `get_shard_indices`.

    Raises:
        GeometryError: The axes don't fit the mesh, or don't divide the shape.

    Example:
        >>> import jax
        >>> get_shard_shape((8, 2), jax.sharding.AbstractMesh((2, 2), ("x", "y")), ("x", "y"))
        (4, 1)
    """
    with short_tracebacks:
        return _shard_shape(global_shape, global_mesh, mesh_axes)


def get_shard_indices_replica_ids_uncached(
    global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any
) -> dict[Device, tuple[Index, int]]:
    """`get_shard_indices_replica_ids`, worked out anew."""
    tiling = _tiling(global_shape, global_mesh, mesh_axes)
    places = zip(tiling.indices(global_shape), tiling.replica_ids().tolist(), strict=True)
    return _by_device(global_mesh, places)


def _indices_uncached(shape: Sequence[int], mesh: Any, mesh_axes: Any) -> dict[Device, Index]:
    return _by_device(mesh, _tiling(shape, mesh, mesh_axes).indices(shape))


def _shard_shape_uncached(shape: Sequence[int], mesh: Any, mesh_axes: Any) -> Shape:
    return _tiling(shape, mesh, mesh_axes).shard_shape(shape)


def _kept[T](size: int, work_out: Callable[[Any, Any, Any], T]) -> Callable[[Any, Any, Any], T]:
    """A function of a shape, a mesh and axes that remembers its answers, where it can."""
    remembered = lru_cache(maxsize=size)(work_out)

    @wraps(work_out)
    def answer(shape: Any, mesh: Any, mesh_axes: Any) -> T:
        with suppress(TypeError):  # a list, or a mesh of devices without a hash
            return remembered(shape, mesh, mesh_axes)
        return work_out(tuple(shape), mesh, mesh_axes)

    return answer


_indices = _kept(_MAPPINGS_KEPT, _indices_uncached)
_indices_replica_ids = _kept(_MAPPINGS_KEPT, get_shard_indices_replica_ids_uncached)
_shard_shape = _kept(_SHAPES_KEPT, _shard_shape_uncached)


def read_axes(mesh_axes: Any) -> Spec:
    """What a caller wrote for `mesh_axes`, in normal form.

    Raises:
        SpecEntryError: An entry is no axis name.
        ArgumentError: It is no sequence of entries.
    """
    if mesh_axes is None:
        return Spec()
    if not isinstance(mesh_axes, Iterable):
        raise ArgumentError(
            "mesh_axes must be a PartitionSpec or a tuple with one entry per dimension, not "
            f"{mesh_axes!r}: write P('x')"
        )
    return parse_spec(mesh_axes, unconstrained=PartitionSpec.UNCONSTRAINED)


def _tiling(shape: Sequence[int], mesh: Any, mesh_axes: Any) -> Tiling:
    grid, spec = _grid(mesh), read_axes(mesh_axes)
    validate_spec(spec, grid, tuple(shape))
    return Tiling.from_spec(grid, spec, len(shape))


def _grid(mesh: Any) -> MeshGrid:
    """Names and sizes of anything with the face of a mesh."""
    if isinstance(mesh, AbstractMesh):
        return MeshGrid(tuple(mesh.axis_names), tuple(mesh.axis_sizes))
    try:
        return MeshGrid(tuple(mesh.axis_names), mesh.devices.shape)
    except (AttributeError, TypeError):
        raise ArgumentError(
            f"global_mesh must be a Mesh, not {type(mesh).__name__}: write "
            "Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))"
        ) from None


def _by_device(mesh: Any, places: Iterable[Any]) -> dict[Device, Any]:
    if isinstance(mesh, AbstractMesh):
        return dict(enumerate(places))
    try:
        return dict(zip(mesh.devices.ravel().tolist(), places, strict=True))
    except TypeError:
        kind = type(mesh.devices.flat[0]).__name__
        raise ArgumentError(
            f"the devices of the mesh, of type {kind}, have no hash and can't be the keys of a "
            "dict: give their class a __hash__, or ask for an AbstractMesh of the same axes, whose "
            "devices are called by their positions"
        ) from None
