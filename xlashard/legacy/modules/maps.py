"""`jax.experimental.maps`: meshes, `thread_resources` and `xmap`."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np

from xlashard._jax.legacy_api import (
    EMPTY_MESH,
    PlaceholderMesh,
    set_context_mesh,
    stacked_meshes,
)
from xlashard._jax.trace.tracing import mesh_in_force
from xlashard.core.sharding import Mesh
from xlashard.core.sharding import Mesh as TodaysMesh
from xlashard.errors import ArgumentError, MeshError
from xlashard.geometry import Box, MeshGrid
from xlashard.legacy.shardings.parsed_specs import array_mapping_to_axis_resources
from xlashard.pods.multihost.host_mesh import host_mesh

type AxisName = Hashable
type ResourceAxisName = Hashable
type MeshAxisName = Any

if TYPE_CHECKING:
    Mesh = TodaysMesh
else:

    class _MeshType(type(TodaysMesh)):
        """Metaclass that makes today's meshes, or `_FakeMesh`es of fake devices."""

        def __call__(cls, devices: Any, axis_names: Any, **options: Any) -> TodaysMesh:
            names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
            if not isinstance(devices, np.ndarray):
                devices = np.asarray(devices, dtype=object)
            # The array of an empty mesh contains None.
            if devices.ndim and devices.ndim == len(names) and _is_fake(devices):
                return _FakeMesh(devices, names)
            return TodaysMesh(devices, names, **options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, TodaysMesh)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, TodaysMesh)

    class Mesh(TodaysMesh, metaclass=_MeshType):
        """Mesh of devices with named axes: instances are `jax.sharding.Mesh`es.

        It also takes fake devices, hashable or not, such as dataclasses in tests. Functions that
        only compute indices work on such a mesh.

        Args:
            devices: An array, or nested lists, of devices.
            axis_names: A name for each dimension, or one name.

        Example:
            >>> with Mesh(jax.devices()[:1], "data") as mesh:
            ...     mesh.shape["data"], mesh is jax.sharding.Mesh(jax.devices()[:1], "data")
            (1, True)
        """


def mesh(devices: Any, axis_names: Sequence[str]) -> TodaysMesh:
    """Return a mesh, for a `with` block or as a decorator.

    Args:
        devices: An array, or nested lists, of devices.
        axis_names: A name for each dimension.

    Example:
        >>> with mesh([jax.devices()[:1]], ("x", "y")) as made:
        ...     dict(made.shape)
        {'x': 1, 'y': 1}
    """
    return Mesh(np.asarray(devices, dtype=object), axis_names)


def _is_fake(devices: Any) -> bool:
    """Return True if the first device is not a `jax.Device`."""
    return devices.size > 0 and not isinstance(devices.flat[0], jax.Device)


class _FakeMesh(PlaceholderMesh):
    """Mesh of fake devices, which have only attributes."""

    @property
    def local_devices(self) -> list[Any]:
        """The devices of this process, by their `process_index`."""
        return [d for d in self.devices.flat if d.process_index == jax.process_index()]

    @property
    def local_mesh(self) -> TodaysMesh:
        """The mesh of this process's devices, which must be contiguous.

        Raises:
            MeshError: This process has no device of the mesh.
            BoxError: This process's devices are not contiguous.
        """
        return self._local_mesh(jax.process_index())

    def _local_mesh(self, process_index: int) -> TodaysMesh:
        grid = MeshGrid(self.axis_names, self.devices.shape)
        positions = [
            n for n, device in enumerate(self.devices.flat) if device.process_index == process_index
        ]
        if not positions:
            raise MeshError(
                f"{self} has no device of process {process_index}: read local_mesh in process "
                f"{self.devices.flat[0].process_index}"
            )
        box: Box = grid.local_box(positions)
        window = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        return _FakeMesh(self.devices[window], self.axis_names)


def local_to_global(mesh: TodaysMesh, axes: Mapping[str, int], aval: Any) -> Any:
    """Return the global type of a host-local array.

    Args:
        mesh: The mesh of all processes; this process's devices must be contiguous in it.
        axes: Mesh axis to sharded dimension, as `get_array_mapping` returns it.
        aval: The host-local type: a `ShapedArray` or `ShapeDtypeStruct`.

    Raises:
        GeometryError: The shape cannot be sharded over this process's devices.
    """
    spec = array_mapping_to_axis_resources(axes)
    return aval.update(shape=host_mesh(mesh).global_shape(spec, aval.shape))


def global_to_local(mesh: TodaysMesh, axes: Mapping[str, int], aval: Any) -> Any:
    """Return the host-local type of a global array; see `local_to_global`."""
    spec = array_mapping_to_axis_resources(axes)
    return aval.update(shape=host_mesh(mesh).local_shape(spec, aval.shape))


class Loop(NamedTuple):
    """Loop over which `xmap` could map an axis."""

    name: str
    length: int


class ResourceEnv(NamedTuple):
    """Resources in force: the mesh of the innermost `with` block.

    Attributes:
        physical_mesh: The mesh; the empty mesh outside of all blocks.
        loops: Loops of `xmap`; always `()`, because `xmap` was removed.

    Example:
        >>> ResourceEnv(EMPTY_MESH, ()).physical_mesh.empty
        True
    """

    physical_mesh: TodaysMesh
    loops: tuple[Loop, ...] = ()

    @property
    def physical_resource_axes(self) -> set[str]:
        """The names of the mesh's axes."""
        return set(self.physical_mesh.axis_names)

    @property
    def loop_resource_axes(self) -> set[str]:
        """The names of the loops."""
        return {loop.name for loop in self.loops}

    @property
    def resource_axes(self) -> set[str]:
        """The names of the mesh's axes and of the loops."""
        return self.physical_resource_axes | self.loop_resource_axes

    @property
    def shape(self) -> OrderedDict[str, int]:
        """Size of each axis and loop, in order."""
        return OrderedDict(self.physical_mesh.shape) | dict(self.loops)

    @property
    def local_shape(self) -> OrderedDict[str, int]:
        """Size of each axis in this process's local mesh, and of each loop."""
        return OrderedDict(self.physical_mesh.local_mesh.shape) | dict(self.loops)

    def with_mesh(self, mesh: TodaysMesh) -> Self:
        """Return the same resources with another mesh.

        Raises:
            MeshError: A loop has the name of an axis of the mesh.
        """
        shared = sorted(self.loop_resource_axes.intersection(mesh.axis_names))
        if shared:
            raise MeshError(f"{shared[0]!r} is the name of a loop: rename the axis of the mesh")
        return self._replace(physical_mesh=mesh)

    def __repr__(self) -> str:
        return f"ResourceEnv({self.physical_mesh!r}, {self.loops!r})"


EMPTY_ENV = ResourceEnv(EMPTY_MESH, ())
"""Resources without a mesh."""


class ThreadResources:
    """Thread-local resources: `env` is the mesh in force, for JAX and for this package."""

    @property
    def env(self) -> ResourceEnv:
        """Resources in force, also by `jax.set_mesh`; assign a `ResourceEnv` to set the mesh.

        An assigned mesh stays until the enclosing `with mesh:` block ends; outside of all blocks,
        until the next assignment.

        Raises:
            ArgumentError: The assigned value is not a `ResourceEnv`, or has loops.
        """
        return ResourceEnv(mesh_in_force() or EMPTY_MESH)

    @env.setter
    def env(self, env: Any) -> None:
        mesh = getattr(env, "physical_mesh", None)
        if not isinstance(mesh, TodaysMesh):
            raise ArgumentError(
                f"thread_resources.env of type {type(env).__name__} is invalid: expected a "
                "ResourceEnv, such as ResourceEnv(Mesh(devices, axis_names), ())"
            )
        if getattr(env, "loops", ()):
            raise ArgumentError(
                f"thread_resources.env.loops={env.loops} is invalid, because xmap was removed: "
                "write ResourceEnv(mesh, ())"
            )
        set_context_mesh(mesh)

    @property
    def stack(self) -> list[ResourceEnv]:
        """Resources of the enclosing `with mesh:` blocks, outermost first."""
        return [ResourceEnv(mesh) for mesh in stacked_meshes()]


thread_resources = ThreadResources()
"""Resources of the current thread."""


class FrozenDict(Mapping[Any, Any]):
    """Immutable, hashable dict.

    Example:
        >>> axes = FrozenDict({"x": 0}, y=1)
        >>> axes["y"], axes == {"x": 0, "y": 1}, hash(axes) == hash(FrozenDict(y=1, x=0))
        (1, True, True)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._items = dict(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._items})"
