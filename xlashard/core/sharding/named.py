"""`NamedSharding`, by the mesh axes that cut each dimension, and `SingleDeviceSharding`."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from xlashard._jax.runtime.shardings import (
    AbstractMesh,
    Device,
    JaxNamedSharding,
    JaxSingleDeviceSharding,
    Mesh,
    read_reduction,
    reduction_arguments,
    with_interface,
)
from xlashard.core.sharding.base import ValueSharding, check_memory_kind
from xlashard.errors import RankError, ShardingError, counted
from xlashard.geometry import DimAxes, MeshGrid, Spec, Tiling, parse_spec, validate_spec
from xlashard.geometry.spec import checked_rank
from xlashard.support.tracebacks import shorten

# Meshes of one program are few; specs times ranks are not many more.
_TILINGS_KEPT = 4096


@lru_cache(maxsize=256)
def grid_of(mesh: Mesh | AbstractMesh) -> MeshGrid:
    """Return the names and sizes of a mesh, without its devices."""
    return MeshGrid(tuple(map(str, mesh.axis_names)), tuple(mesh.axis_sizes))


def spec_of(spec: PartitionSpec | None) -> Spec:
    """Return a JAX partition spec in normal form; None is the replicated spec.

    Raises:
        SpecEntryError: If an entry is no axis name.
    """
    if spec is None:
        return Spec()
    if isinstance(spec, tuple) or not (spec.unreduced or spec.reduced):
        return parse_spec(tuple(spec), unconstrained=PartitionSpec.UNCONSTRAINED)
    dims = parse_spec(spec.partitions, unconstrained=PartitionSpec.UNCONSTRAINED).dims
    return Spec(dims, spec.unreduced, spec.reduced, read_reduction(spec))


def spec_entries(dims: Iterable[DimAxes]) -> list[Any]:
    """Return the shortest entries of a partition spec of JAX, one for each dimension."""
    return [
        PartitionSpec.UNCONSTRAINED if d is None else (d[0] if len(d) == 1 else d) or None
        for d in dims
    ]


def partition_spec(spec: Spec) -> PartitionSpec:
    """Return the shortest JAX partition spec of a normal form."""
    return PartitionSpec(
        *spec_entries(spec.dims),
        **reduction_arguments(spec.unreduced, spec.reduced, spec.reduction),
    )


def _not_explicit(spec: Spec, mesh: Mesh | AbstractMesh) -> str:
    """Return why a spec's reductions are not over axes of an array's type; empty if they are."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name, axes in (("unreduced", spec.unreduced), ("reduced", spec.reduced)):
        for axis in sorted(axes):
            if types[axis] != AxisType.Explicit:
                return (
                    f"{name}={{{axis!r}}} of {spec.describe()} is invalid: {axis!r} is an axis of "
                    f"type {types[axis].name}, and only Explicit axes can be {name}; write "
                    "Mesh(devices, axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * "
                    f"{len(types)})"
                )
    return ""


@lru_cache(maxsize=_TILINGS_KEPT)
def named_tiling(grid: MeshGrid, spec: Spec, ndim: int) -> Tiling:
    """Return the tiling of a spec on a grid, shared by all equivalent shardings."""
    return Tiling.from_spec(grid, spec, ndim)


if TYPE_CHECKING:

    class _NamedBase(ValueSharding, JaxNamedSharding):
        """Both base classes, for type checkers."""

else:
    _NamedBase = with_interface(ValueSharding, JaxNamedSharding)


class MeshSharding(_NamedBase):
    """Base class of the shardings that derive from JAX's `NamedSharding`."""

    @cached_property
    def _jax_sharding(self) -> JaxNamedSharding:
        return JaxNamedSharding(self.mesh, self.spec, memory_kind=self.memory_kind)

    def jax_sharding(self, shape: Sequence[int] = ()) -> JaxNamedSharding:
        """Return JAX's own `NamedSharding` with the same devices and tiles."""
        return self._jax_sharding


_initialize = JaxNamedSharding.__init__  # super() is a tenth of the time of a known sharding


def _check_spec(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str | None
) -> PartitionSpec:
    """Check the arguments of a `NamedSharding`, and return the spec as one of JAX."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ShardingError(
            f"the mesh of a NamedSharding must be a Mesh, not {type(mesh).__name__}: write "
            "NamedSharding(Mesh(devices, axis_names), P(...))"
        )
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(
            f"the spec of a NamedSharding must be a PartitionSpec, not "
            f"{type(spec).__name__}: write P{_as_call(spec)}",
            also=TypeError,
        )
    if isinstance(spec, tuple):
        # A spec of `legacy.shardings.partition_spec` is a tuple too; JAX's spec is compared.
        spec = PartitionSpec(*spec)
    normal = spec_of(spec)
    if not mesh.empty:
        validate_spec(normal, grid_of(mesh))
        if problem := _not_explicit(normal, mesh):
            raise ShardingError(problem)
    device = mesh._flat_devices_tuple[0] if isinstance(mesh, Mesh) and not mesh.empty else None
    check_memory_kind(device, memory_kind, "NamedSharding")
    if mesh.empty and memory_kind is not None:
        # JAX's class ends the process.
        raise ShardingError(
            f"NamedSharding: memory_kind={memory_kind!r} needs a mesh with devices, and the "
            "mesh is empty: write NamedSharding(Mesh(devices, axis_names), P(...))"
        )
    return spec


@lru_cache(maxsize=_TILINGS_KEPT)
def _check_once(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> None:
    _check_spec(mesh, spec, None)


class NamedSharding(MeshSharding):
    """Sharding of each dimension of an array over named axes of a mesh.

    Args:
        mesh: The mesh; its devices in row-major order are the device assignment.
        spec: For each dimension `None`, the name of a mesh axis or a tuple of names (major to
            minor); dimensions past its end are not cut. Over the Explicit axes of
            `P(..., unreduced={...})` each device holds a partial result of a sum (or, by
            `unreduced_kind`, of a maximum or minimum) that is still to be reduced.
        memory_kind: The memory of each device that holds the data, the default one if `None`.

    Raises:
        UnknownAxisError: If the spec names an axis that the mesh does not have.
        DuplicateAxisError: If the spec uses an axis twice.
        ShardingError: If the mesh is not a mesh, its devices have no such memory, or an axis of
            `unreduced` or `reduced` is not Explicit.

    Example:
        >>> import jax, numpy as np
        >>> mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
        >>> NamedSharding(mesh, PartitionSpec("data", "model")).shard_shape((8, 16))
        (8, 16)
    """

    memory_kind = JaxNamedSharding.memory_kind  # read often in a first call

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        spec: PartitionSpec,
        *,
        memory_kind: str | None = None,
    ) -> None:
        try:
            if memory_kind is None and type(spec) is PartitionSpec:
                try:
                    _check_once(mesh, spec)
                except TypeError:
                    pass  # a mesh without a hash is no mesh: refused below
                else:
                    _initialize(self, mesh, spec)
                    return
            spec = _check_spec(mesh, spec, memory_kind)
        except BaseException as error:
            shorten(error)
            raise
        _initialize(self, mesh, spec, memory_kind=memory_kind)

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_named, (reduce_mesh(self.mesh), self.spec, self.memory_kind))

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices of the mesh in row-major order."""
        if isinstance(self.mesh, AbstractMesh):
            raise ShardingError(
                f"{self} stands on an AbstractMesh, which has no devices: use a Mesh of devices"
            )
        if self.mesh.empty:
            raise ShardingError(
                f"{self} stands on an empty mesh, which has no devices: write "
                "NamedSharding(Mesh(jax.devices(), ('x',)), P(...))"
            )
        return self.mesh._flat_devices_tuple

    @cached_property
    def normal_spec(self) -> Spec:
        """Return the spec in normal form, which is equal for equivalent specs."""
        return spec_of(self.spec)

    @property
    def num_devices(self) -> int:
        """Return the number of devices of the mesh."""
        return self.mesh.size

    def with_memory_kind(self, kind: str) -> Self:
        """Return the same placement in another memory of the same devices."""
        return type(self)(self.mesh, self.spec, memory_kind=kind)

    def with_spec(self, spec: PartitionSpec) -> Self:
        """Return the sharding with another spec on the same mesh and memory."""
        return type(self)(self.mesh, spec, memory_kind=self.memory_kind)

    @cached_property
    def is_fully_replicated(self) -> bool:
        """Return True if every device holds the whole array, and no partial result of it."""
        sizes, spec = grid_of(self.mesh).shape, self.normal_spec
        return all(sizes[axis] == 1 for axis in (*spec.axes, *spec.unreduced))

    @cached_property
    def is_unreduced(self) -> bool:
        """Return True if the devices hold partial results that are still to be reduced."""
        unreduced = self.normal_spec.unreduced
        return bool(unreduced) and any(self.mesh.shape[axis] > 1 for axis in unreduced)

    @property
    def reduced_sharding(self) -> Self:
        """Return the sharding of the array with its unreduced axes reduced; itself without any."""
        spec = self.normal_spec
        return self.with_spec(partition_spec(spec.whole)) if spec.unreduced else self

    def rank_tiling(self, ndim: int) -> Tiling:
        """Return the tiling for arrays of a rank."""
        return named_tiling(grid_of(self.mesh), self.normal_spec, checked_rank(ndim))

    def is_compatible_aval(self, aval_shape: tuple[int, ...]) -> None:
        """Check the rank and the sizes of a shape.

        Raises:
            RankError: The spec has more entries than the shape, even if they are None.
            DivisibilityError: If a dimension can't be cut evenly.
        """
        check_fits(self, self._checked_shape(aval_shape, "is_compatible_aval"))

    def check_compatible_aval(self, aval_shape: tuple[int, ...]) -> None:
        """Check the rank of a shape."""
        entries = len(self.spec)
        ndim = len(self._checked_shape(aval_shape, "check_compatible_aval"))
        if entries > ndim:
            self.normal_spec.for_rank(ndim)
            raise RankError(
                f"the spec {self.spec} has {counted(entries, 'entry', 'entries')}, the array has "
                f"{counted(ndim, 'dimension')}: write {self.normal_spec.describe()}",
                ndim=ndim,
                needed=entries,
            )

    def _find_shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        validate_spec(self.normal_spec, grid_of(self.mesh), shape)
        return self.rank_tiling(len(shape)).shard_shape(shape)


@lru_cache(maxsize=_TILINGS_KEPT)
def check_fits(sharding: NamedSharding, shape: tuple[int, ...]) -> None:
    """Check the rank and the sizes of the shape of a value of a program.

    Raises:
        RankError: If the spec has more entries than the shape.
        DivisibilityError: If a dimension can't be cut evenly.
    """
    sharding.check_compatible_aval(shape)
    validate_spec(sharding.normal_spec, grid_of(sharding.mesh), shape)


type DeviceNames = tuple[tuple[str, int], ...]


def names_of(devices: Sequence[Device]) -> DeviceNames:
    """Return names that identify devices in every process of a program."""
    return tuple((d.platform, d.id) for d in devices)


def devices_of(names: DeviceNames) -> tuple[Device, ...]:
    """Return the devices with these names.

    Raises:
        ShardingError: This process lacks one of them.
    """
    known: dict[tuple[str, int], Device] = {}
    for platform in {platform for platform, _ in names}:
        with suppress(RuntimeError):
            known |= {(d.platform, d.id): d for d in jax.devices(platform)}
    missing = [
        f"{platform}:{number}" for platform, number in names if (platform, number) not in known
    ]
    if missing:
        raise ShardingError(
            f"the pickled sharding is for {counted(len(names), 'device')}, and this process lacks "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}: make a sharding of "
            "its spec on a mesh of this process"
        )
    return tuple(known[name] for name in names)


def reduce_mesh(mesh: Any) -> tuple[Any, ...]:
    """Return a mesh as plain values; an abstract mesh is returned unchanged."""
    if not isinstance(mesh, Mesh):
        return (mesh,)
    names = names_of(tuple(mesh.devices.flat))
    return names, mesh.devices.shape, mesh.axis_names, mesh.axis_types


def restore_mesh(parts: tuple[Any, ...]) -> Any:
    """Return the mesh of the values of `reduce_mesh`."""
    if len(parts) == 1:
        return parts[0]
    names, shape, axis_names, axis_types = parts
    devices = np.empty(len(names), dtype=object)
    devices[:] = devices_of(names)
    return Mesh(devices.reshape(shape), axis_names, axis_types=axis_types)


def _unpickle_named(
    mesh: tuple[Any, ...], spec: PartitionSpec, memory_kind: str | None
) -> NamedSharding:
    return NamedSharding(restore_mesh(mesh), spec, memory_kind=memory_kind)


def _as_call(spec: object) -> str:
    if isinstance(spec, list | tuple):
        return "(" + ", ".join(map(repr, spec)) + ")"
    if spec is None:
        return "()"
    return f"({spec!r})" if isinstance(spec, str) else "(...)"


if TYPE_CHECKING:

    class _SingleDeviceBase(ValueSharding, JaxSingleDeviceSharding):
        """Both base classes, for type checkers."""

else:
    _SingleDeviceBase = with_interface(ValueSharding, JaxSingleDeviceSharding)


class SingleDeviceSharding(_SingleDeviceBase):
    """Sharding that places the whole array on one device.

    Args:
        device: The device.
        memory_kind: The memory of it that holds the data, the default one if `None`.

    Raises:
        ShardingError: It is not a device, or lacks the memory.

    Example:
        >>> import jax
        >>> SingleDeviceSharding(jax.devices()[0]).shard_shape((3, 5))
        (3, 5)
    """

    def __init__(self, device: Device, *, memory_kind: str | None = None) -> None:
        if not isinstance(device, jax.Device):
            raise ShardingError(
                f"a SingleDeviceSharding needs a device such as jax.devices()[0], not {device!r}"
            )
        check_memory_kind(device, memory_kind, "SingleDeviceSharding")
        super().__init__(device, memory_kind=memory_kind)

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_single, (names_of(self.devices), self.memory_kind))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the one device."""
        return (self._device,)

    def with_memory_kind(self, kind: str) -> Self:
        """Return the sharding in another memory of the device."""
        return type(self)(self._device, memory_kind=kind)

    @property
    def is_fully_replicated(self) -> bool:
        """Return True: the one device holds everything."""
        return True

    def rank_tiling(self, ndim: int) -> Tiling:
        """Return one tile, on the one device."""
        return Tiling.replicated(1, ndim)

    @cached_property
    def _jax_sharding(self) -> JaxSingleDeviceSharding:
        return JaxSingleDeviceSharding(self._device, memory_kind=self.memory_kind)

    def jax_sharding(self, shape: Sequence[int] = ()) -> JaxSingleDeviceSharding:
        """Return JAX's own `SingleDeviceSharding` on the same device."""
        return self._jax_sharding


def _unpickle_single(names: DeviceNames, memory_kind: str | None) -> SingleDeviceSharding:
    return SingleDeviceSharding(devices_of(names)[0], memory_kind=memory_kind)
