"""Shards of global arrays: their indices and replica ids, and arrays that are made of shards."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from inspect import unwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from xlashard._jax.runtime.shardings import AbstractMesh
from xlashard._jax.runtime.transfer import with_sharding
from xlashard.core.array import Array
from xlashard.core.array.array_class.array import wrap
from xlashard.core.array.array_class.base import type_text
from xlashard.core.array.array_class.protocols import sharding_text
from xlashard.core.array.constructors import array_of_pieces
from xlashard.core.array.device_buffers import (
    Caller,
    assemble_arrays,
    read_buffers,
)
from xlashard.core.array.placement.target import ResolvedSharding, parse_shape, resolve_sharding
from xlashard.core.array.reshard.execute import with_device_order
from xlashard.core.pjit.shardings.resolve import named as named_sharding
from xlashard.core.sharding import Mesh
from xlashard.errors import ArgumentError, GeometryError, PlacementError, counted
from xlashard.geometry import MeshGrid, Spec, Tiling, parse_spec, validate_spec
from xlashard.legacy.historic_errors import GdaBufferError
from xlashard.legacy.shardings.partition_spec import PartitionSpec
from xlashard.support.tracebacks import shorten, shortened

if TYPE_CHECKING:
    from xlashard._jax.runtime.shardings import Device
else:
    Device = jax.Device
Shape = tuple[int, ...]
Index = tuple[slice, ...]
MeshAxes = PartitionSpec

# Enough for the distinct shapes of a large parameter tree; each mapping has one entry per device.
_MAPPINGS_KEPT = 128
_SHAPES_KEPT = 4096
_MESHES_KEPT = 256


@dataclass(frozen=True)
class Shard:
    """Shard of a global array on one device.

    Shards are equal if their device, index and replica id are; the data is not compared.

    Attributes:
        device: The device.
        index: The index of the shard in the global array: one slice per dimension.
        replica_id: The number of the replica: 0 on the first device that holds the index.
        data: The data on the device; None if the device belongs to another process.

    Example:
        >>> Shard("device 3", (slice(0, 2), slice(None)), 0).data is None
        True
    """

    device: Device
    index: Index
    replica_id: int
    data: Any = field(default=None, compare=False)


def _cached[**P, R](size: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache the results of a function for hashable arguments."""

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
    """Return the index of the shard on each device of a mesh.

    Args:
        global_shape: The shape of the global array.
        global_mesh: A mesh, also of fake devices. Devices of an `AbstractMesh` are represented by
            their positions, from 0.
        mesh_axes: A `PartitionSpec`, or a tuple with None, an axis name or a tuple of axis names
            for each dimension.

    Returns:
        The index of each device, in the order of the mesh: one slice per dimension, `slice(None)`
        if the dimension is not sharded. The mapping is cached and immutable; copy it with `dict`.

    Raises:
        GeometryError: The axes do not fit the mesh, or do not divide the shape.
        ArgumentError: `global_mesh` is not a mesh.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
        >>> get_shard_indices((8, 2), mesh, ("y",))[1]
        (slice(4, 8, None), slice(None, None, None))
    """
    tiled = _tiled_mesh(global_mesh, mesh_axes, len(global_shape))
    return tiled.by_device(tiled.indices(global_shape))


@_cached(_MAPPINGS_KEPT)
def get_shard_indices_replica_ids(
    global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any
) -> Mapping[Device, tuple[Index, int]]:
    """Return the index and the replica id of the shard on each device of a mesh.

    Args:
        global_shape: The shape of the global array.
        global_mesh: As for `get_shard_indices`.
        mesh_axes: As for `get_shard_indices`.

    Returns:
        An immutable mapping from each device to index and replica id, in the order of the mesh.

    Raises:
        GeometryError: The axes do not fit the mesh, or do not divide the shape.
        ArgumentError: `global_mesh` is not a mesh.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2, 2), ("x", "y"))
        >>> get_shard_indices_replica_ids((4,), mesh, ("y",))[2]
        ((slice(0, 2, None),), 1)
    """
    tiled = _tiled_mesh(global_mesh, mesh_axes, len(global_shape))
    return tiled.by_device(zip(tiled.indices(global_shape), tiled.copies, strict=True))


get_shard_indices_replica_ids_uncached = unwrap(get_shard_indices_replica_ids)
"""`get_shard_indices_replica_ids` without its cache."""


@_cached(_SHAPES_KEPT)
def get_shard_shape(global_shape: Sequence[int], global_mesh: Any, mesh_axes: Any) -> Shape:
    """Return the shape of a shard.

    Args:
        global_shape: The shape of the global array.
        global_mesh: As for `get_shard_indices`.
        mesh_axes: As for `get_shard_indices`.

    Raises:
        GeometryError: The axes do not fit the mesh, or do not divide the shape.

    Example:
        >>> import jax
        >>> get_shard_shape((8, 2), jax.sharding.AbstractMesh((2, 2), ("x", "y")), ("x", "y"))
        (4, 1)
    """
    grid, spec = _grid(global_mesh), read_axes(mesh_axes)
    validate_spec(spec, grid, global_shape)
    return Tiling.from_spec(grid, spec, len(global_shape)).shard_shape(global_shape)


@dataclass(frozen=True, eq=False)
class _TiledMesh:
    """Tiling of arrays of one rank by mesh axes, for every shape."""

    devices: Sequence[Device]
    grid: MeshGrid
    spec: Spec
    tiling: Tiling

    @cached_property
    def copies(self) -> list[int]:
        """The replica id of each device."""
        return self.tiling.replica_ids().tolist()

    def indices(self, shape: Sequence[int]) -> list[Index]:
        """Return the index of each device."""
        try:
            return self.tiling.indices(shape)
        except GeometryError:
            validate_spec(self.spec, self.grid, shape)  # names the axes in its error
            raise

    @cached_property
    def _have_hashes(self) -> bool:
        try:
            set(self.devices)
        except TypeError:
            return False
        return True

    def by_device(self, values: Iterable[Any]) -> Mapping[Device, Any]:
        """Return an immutable mapping from each device to its value, which callers share."""
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
    """Return `mesh_axes` as a `Spec`.

    Raises:
        SpecEntryError: An entry is not an axis name.
        ArgumentError: `mesh_axes` is not a sequence.
    """
    if mesh_axes is None:
        return Spec()
    if not isinstance(mesh_axes, Iterable):
        raise ArgumentError(
            f"mesh_axes={mesh_axes!r} is invalid: expected a PartitionSpec or a tuple with one "
            "entry per dimension, such as P('x')"
        )
    return parse_spec(mesh_axes, unconstrained=PartitionSpec.UNCONSTRAINED)


def _grid(mesh: Any) -> MeshGrid:
    """Return the axis names and sizes of a mesh, or of an object with a mesh's attributes."""
    if isinstance(mesh, AbstractMesh):
        return MeshGrid(tuple(mesh.axis_names), tuple(mesh.axis_sizes))
    try:
        return MeshGrid(tuple(mesh.axis_names), mesh.devices.shape)
    except (AttributeError, TypeError):
        raise _no_mesh(mesh) from None


def _no_mesh(mesh: object) -> ArgumentError:
    return ArgumentError(
        f"global_mesh of type {type(mesh).__name__} is invalid: expected a Mesh, such as "
        "Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))"
    )


class _ByIdentity(Mapping[Device, Any]):
    """Mapping from unhashable fake devices, compared by identity."""

    def __init__(self, pairs: Iterable[tuple[Device, Any]]) -> None:
        self._pairs = {id(device): (device, value) for device, value in pairs}

    def __getitem__(self, device: Device) -> Any:
        return self._pairs[id(device)][1]

    def __iter__(self) -> Iterator[Device]:
        return (device for device, _ in self._pairs.values())

    def __len__(self) -> int:
        return len(self._pairs)


type Where = tuple[Sequence[int], Mesh, Any]
"""Arguments `global_shape`, `global_mesh` and `mesh_axes`."""

_BUFFERS = Caller("GlobalDeviceArray", "device_buffers")
_MADE = Caller("GlobalDeviceArray.from_batched_callback_with_devices", "data_callback's array ")


def target_of(where: Where) -> ResolvedSharding:
    """Return the placement of an array by its shape, mesh and mesh axes.

    Raises:
        GeometryError: The axes do not fit the mesh, or do not divide the shape.
        ArgumentError: `global_mesh` or `mesh_axes` is invalid.
    """
    shape, mesh, mesh_axes = where
    if not isinstance(mesh, Mesh):
        raise _no_mesh(mesh)
    if not isinstance(mesh_axes, PartitionSpec):
        read_axes(mesh_axes)
    spec = PartitionSpec(*(mesh_axes or ()))
    return resolve_sharding(parse_shape(shape, "global_shape"), named_sharding(mesh, spec.today))


@contextmanager
def _as_gda_errors() -> Iterator[None]:
    """Raise errors about shapes and dtypes of shards in the class that handlers of 2022 catch."""
    try:
        yield
    except PlacementError as error:
        raise GdaBufferError(str(error)) from None


def from_buffers(where: Where, device_buffers: Any) -> Array:
    """Return the Array over one buffer per local device, in the order of the mesh."""
    target = target_of(where)
    if isinstance(device_buffers, jax.Array) and device_buffers.ndim == len(target.shape):
        # One handle over all buffers, as the runtime returned it.
        return named(Array.from_jax(device_buffers), where[1], where[2])
    singles = read_buffers(device_buffers, _BUFFERS)
    with _as_gda_errors():
        joint = _array(assemble_arrays(singles, target, None, _BUFFERS))
    for number, (single, device) in enumerate(zip(singles, target.devices, strict=True)):
        if single.device != device:
            raise PlacementError(
                f"{single.name} is on {single.device}, but global_mesh.local_devices[{number}] "
                f"is {device}: order the buffers by global_mesh.local_devices, not by "
                "jax.local_devices(), as in [device_put(shards[d], d) for d in "
                "global_mesh.local_devices]"
            )
    return joint


def from_callback_pieces(where: Where, data_callback: Callable[[Index], Any]) -> Array:
    """Return the Array of shards from one call of the callback per local device."""
    target = target_of(where)
    with _as_gda_errors():
        return _array(array_of_pieces(target, _each_device(target), data_callback))


def from_batched_callback_pieces(
    where: Where, data_callback: Callable[[Sequence[Index]], Iterable[Any]]
) -> Array:
    """Return the Array of shards from one call, in the order of the local devices."""
    target = target_of(where)
    pieces = list(data_callback(list(target.indices)))
    count = len(target.devices)
    if len(pieces) != count:
        raise PlacementError(
            f"data_callback returned {counted(len(pieces), 'shard')} for "
            f"{counted(count, 'index', 'indices')}: return one per index, such as "
            "[value[index] for index in indices]"
        )
    shards = iter(pieces)
    with _as_gda_errors():
        return _array(array_of_pieces(target, _each_device(target), lambda _: next(shards)))


def from_device_pieces(where: Where, data_callback: Callable[[Any], Any]) -> Array:
    """Return the Array of shards that a callback places on the devices of each distinct index."""
    target = target_of(where)
    requests = [
        (target.indices[numbers[0]], tuple(target.devices[n] for n in numbers))
        for numbers in target.holders
    ]
    singles = read_buffers(list(data_callback(requests)), _MADE)
    with _as_gda_errors():
        return _array(assemble_arrays(singles, target, None, _MADE))


def named(array: Array, mesh: Mesh, mesh_axes: Any) -> Array:
    """Return an Array with a `NamedSharding` on a mesh, over the same buffers.

    Raises:
        PlacementError: The array has another sharding.
    """
    target = target_of((array.shape, mesh, mesh_axes))
    if not target.sharding.is_equivalent_to(array.sharding, array.ndim):
        raise PlacementError(
            f"from_array does not move data, but the Array {type_text(array)} has "
            f"{sharding_text(array.sharding)}, not {sharding_text(target.sharding)}: first write "
            "device_put(array, NamedSharding(global_mesh, mesh_axes))"
        )
    handle = with_device_order(array._handle, target.sharding.devices)
    return wrap(with_sharding(handle, target.jax_sharding, committed=True), target.sharding)


def _each_device(target: ResolvedSharding) -> list[list[int]]:
    return [[number] for number in range(len(target.devices))]


def _array(value: Any) -> Array:
    if isinstance(value, Array):
        return value
    raise ArgumentError(
        "a GlobalDeviceArray cannot contain PRNG keys of jax.random.key: pass "
        "jax.random.key_data(keys), and call jax.random.wrap_key_data where the keys are used"
    )
