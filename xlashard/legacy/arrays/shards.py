"""Which part of a global array each device of a mesh holds, in the era's words."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.shardings import AbstractMesh
from xlashard._jax.tracebacks import shorten, shortened
from xlashard.errors import ArgumentError, GeometryError
from xlashard.geometry import MeshGrid, Spec, Tiling, parse_spec, validate_spec
from xlashard.legacy.shardings.partition_spec import PartitionSpec

if TYPE_CHECKING:
    from xlashard._jax.shardings import Device
else:
    Device = jax.Device
Shape = tuple[int, ...]
Index = tuple[slice, ...]
MeshAxes = PartitionSpec

# Of the distinct shapes of a large parameter tree; each may be as long as a pod has devices.
_MAPPINGS_KEPT = 128
_SHAPES_KEPT = 4096
_MESHES_KEPT = 256


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


def _cached[**P, R](size: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function remember its latest answers, where its arguments have a hash."""

    def decorate(work_out: Callable[P, R]) -> Callable[P, R]:
        remembered: Any = lru_cache(maxsize=size)(work_out)

        # Made in this module, so that doctest finds the examples of what it wraps.
        @wraps(work_out)
        def answer(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return remembered(*args, **kwargs)
            except TypeError:  # a list, or a mesh of devices without a hash
                pass
            except BaseException as error:
                shorten(error)
                raise
            return shortened(work_out)(*args, **kwargs)

        return answer

    return decorate


@_cached(_MAPPINGS_KEPT)
def get_shard_indices(
    global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any
) -> Mapping[Device, Index]:
    """The part of an array that each device of a mesh holds.

    Args:
        global_shape: Of the whole array, in elements.
        global_mesh: A mesh; its devices may be made up. Those of an `AbstractMesh` are called by
            their positions, from 0.
        mesh_axes: For each dimension None, an axis of the mesh by its name, or several in a tuple:
            a `PartitionSpec` or a plain tuple.

    Returns:
        One slice per dimension for every device, in the order of the mesh. A dimension that is not
        cut is `slice(None)`. The mapping is kept and can't be changed: `dict(found)` is one of your
        own.

    Raises:
        GeometryError: The axes don't fit the mesh, or don't divide the shape.
        ArgumentError: There is no mesh.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
        >>> get_shard_indices((8, 2), mesh, ("y",))[1]
        (slice(4, 8, None), slice(None, None, None))
    """
    dealt = _tiled_mesh(global_mesh, mesh_axes, len(global_shape))
    return dealt.by_device(dealt.indices(global_shape))


@_cached(_MAPPINGS_KEPT)
def get_shard_indices_replica_ids(
    global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any
) -> Mapping[Device, tuple[Index, int]]:
    """The part of an array that each device of a mesh holds, and which copy of it.

    Args:
        global_shape: Of the whole array, in elements.
        global_mesh: As for `get_shard_indices`.
        mesh_axes: As for `get_shard_indices`.

    Returns:
        By device the index and the replica id, in the order of the mesh, not to be changed either.

    Raises:
        GeometryError: The axes don't fit the mesh, or don't divide the shape.
        ArgumentError: There is no mesh.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
        >>> get_shard_indices_replica_ids((4,), mesh, ("y",))[2]
        ((slice(0, 2, None),), 1)
    """
    return get_shard_indices_replica_ids_uncached(global_shape, global_mesh, mesh_axes)


@_cached(_SHAPES_KEPT)
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
    grid, spec = _grid(global_mesh), read_axes(mesh_axes)
    validate_spec(spec, grid, global_shape)
    return Tiling.from_spec(grid, spec, len(global_shape)).shard_shape(global_shape)


def get_shard_indices_replica_ids_uncached(
    global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any
) -> Mapping[Device, tuple[Index, int]]:
    """`get_shard_indices_replica_ids`, worked out anew for this shape.

    Args:
        global_shape: Of the whole array, in elements.
        global_mesh: As for `get_shard_indices`.
        mesh_axes: As for `get_shard_indices`.
    """
    dealt = _tiled_mesh(global_mesh, mesh_axes, len(global_shape))
    return dealt.by_device(zip(dealt.indices(global_shape), dealt.copies, strict=True))


@dataclass(frozen=True, eq=False)
class _TiledMesh:
    """What axes mean on a mesh for arrays of one rank, whatever their shape."""

    devices: Sequence[Device]
    grid: MeshGrid
    spec: Spec
    tiling: Tiling

    @cached_property
    def copies(self) -> list[int]:
        """The replica id of each device."""
        return self.tiling.replica_ids().tolist()

    def indices(self, shape: Sequence[int]) -> list[Index]:
        """The index of each device."""
        try:
            return self.tiling.indices(shape)
        except GeometryError:
            validate_spec(self.spec, self.grid, shape)  # knows the axes by name
            raise

    @cached_property
    def _have_hashes(self) -> bool:
        try:
            set(self.devices)
        except TypeError:
            return False
        return True

    def by_device(self, values: Iterable[Any]) -> Mapping[Device, Any]:
        """One value for each device, not to be changed: all who ask are given the same mapping."""
        pairs = zip(self.devices, values, strict=True)
        return MappingProxyType(dict(pairs)) if self._have_hashes else _ByIdentity(pairs)


@_cached(_MESHES_KEPT)
def _tiled_mesh(mesh: Any, mesh_axes: Any, ndim: int) -> _TiledMesh:
    grid, spec = _grid(mesh), read_axes(mesh_axes)
    tiling = Tiling.from_spec(grid, spec, ndim)
    if isinstance(mesh, AbstractMesh):
        return _TiledMesh(range(grid.size), grid, spec, tiling)
    return _TiledMesh(mesh.devices.ravel().tolist(), grid, spec, tiling)


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


class _ByIdentity(Mapping[Device, Any]):
    """What belongs to made-up devices without a hash: each is found as the very object it is."""

    def __init__(self, pairs: Iterable[tuple[Device, Any]]) -> None:
        self._pairs = {id(device): (device, value) for device, value in pairs}

    def __getitem__(self, device: Device) -> Any:
        return self._pairs[id(device)][1]

    def __iter__(self) -> Iterator[Device]:
        return (device for device, _ in self._pairs.values())

    def __len__(self) -> int:
        return len(self._pairs)
