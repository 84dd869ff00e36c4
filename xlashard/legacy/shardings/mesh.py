"""The era's `Mesh` and `mesh`, and its sums over the part of a mesh that one process has."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np

from xlashard._jax.mesh_stack import EMPTY_MESH, StrangersMesh, put_mesh, stacked_meshes
from xlashard._jax.tracing import mesh_in_force
from xlashard.errors import ArgumentError, MeshError
from xlashard.geometry import Box, MeshGrid
from xlashard.legacy.shardings.parsed_specs import array_mapping_to_axis_resources
from xlashard.multihost.host_local.host_mesh import host_mesh
from xlashard.sharding import Mesh
from xlashard.sharding import Mesh as TodaysMesh

if TYPE_CHECKING:
    Mesh = TodaysMesh
else:

    class _MeshType(type(TodaysMesh)):
        """Makes meshes of today, which are its instances, and of fake devices others."""

        def __call__(cls, devices: Any, axis_names: Any, **options: Any) -> TodaysMesh:
            names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
            if not isinstance(devices, np.ndarray):
                devices = np.asarray(devices, dtype=object)
            # An empty mesh holds None.
            if devices.ndim and devices.ndim == len(names) and _is_fake(devices):
                return _FakeMesh(devices, names)
            return TodaysMesh(devices, names, **options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, TodaysMesh)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, TodaysMesh)

    class Mesh(TodaysMesh, metaclass=_MeshType):
        """Devices in a grid with named axes: what it makes is a `jax.sharding.Mesh`.

        Unlike that class it also takes what only stands for devices, with a hash or without, such
        as the dataclasses of tests; what asks only for places works on a mesh of those.

        Args:
            devices: An array, or nested lists, of devices.
            axis_names: One name for each of its dimensions; a single one may stand alone.

        Example:
            >>> with Mesh(jax.devices()[:1], "data") as mesh:
            ...     mesh.shape["data"], mesh is jax.sharding.Mesh(jax.devices()[:1], "data")
            (1, True)
        """


def mesh(devices: Any, axis_names: Sequence[str]) -> TodaysMesh:
    """A mesh for a `with` block or as a decorator.

    Args:
        devices: An array, or nested lists, of devices.
        axis_names: One name for each of its dimensions.

    Example:
        >>> with mesh([jax.devices()[:1]], ("x", "y")) as made:
        ...     dict(made.shape)
        {'x': 1, 'y': 1}
    """
    return Mesh(np.asarray(devices, dtype=object), axis_names)


def _is_fake(devices: Any) -> bool:
    """Whether what stands there is none of JAX's devices; the first one tells."""
    return devices.size > 0 and not isinstance(devices.flat[0], jax.Device)


class _FakeMesh(StrangersMesh):
    """A mesh of devices that JAX knows nothing of but what they have as attributes."""

    @property
    def local_devices(self) -> list[Any]:
        """The devices whose `process_index` is this process's."""
        return [d for d in self.devices.flat if d.process_index == jax.process_index()]

    @property
    def local_mesh(self) -> TodaysMesh:
        """The mesh of those, which must be a contiguous part of it.

        Raises:
            MeshError: If there are none.
            BoxError: If they leave a gap.
        """
        return self._local_mesh(jax.process_index())

    def _local_mesh(self, process_index: int) -> TodaysMesh:
        grid = MeshGrid(self.axis_names, self.devices.shape)
        positions = [
            n for n, device in enumerate(self.devices.flat) if device.process_index == process_index
        ]
        if not positions:
            raise MeshError(
                f"{self} has no device of process {process_index}: ask for its local mesh in "
                f"process {self.devices.flat[0].process_index}"
            )
        box: Box = grid.local_box(positions)
        window = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
        return _FakeMesh(self.devices[window], self.axis_names)


def local_to_global(mesh: TodaysMesh, axes: Mapping[str, int], aval: Any) -> Any:
    """The type of the whole array of which each process has a part.

    Args:
        mesh: The mesh of all processes; this one's devices must be a contiguous part of it.
        axes: From mesh axes to the dimensions that they cut, as `get_array_mapping` gives it.
        aval: The type of the part of this process: a `ShapedArray` or `ShapeDtypeStruct`.

    Raises:
        GeometryError: If the part can't be dealt out over this process's devices.
    """
    spec = array_mapping_to_axis_resources(axes)
    return aval.update(shape=host_mesh(mesh).global_shape(spec, aval.shape))


def global_to_local(mesh: TodaysMesh, axes: Mapping[str, int], aval: Any) -> Any:
    """The type of the part of an array that this process has; see `local_to_global`."""
    spec = array_mapping_to_axis_resources(axes)
    return aval.update(shape=host_mesh(mesh).local_shape(spec, aval.shape))


class Loop(NamedTuple):
    """A loop over which `xmap` could map an axis."""

    name: str
    length: int


class ResourceEnv(NamedTuple):
    """What `with` blocks have put in force.

    Attributes:
        physical_mesh: The mesh, the empty one if there is none.
        loops: Those of `xmap`; always `()`, for there is no `xmap` any more.

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
        """All names."""
        return self.physical_resource_axes | self.loop_resource_axes

    @property
    def shape(self) -> OrderedDict[str, int]:
        """Name to size, in order."""
        return OrderedDict(self.physical_mesh.shape) | dict(self.loops)

    @property
    def local_shape(self) -> OrderedDict[str, int]:
        """Name to size within this process's part of the mesh."""
        return OrderedDict(self.physical_mesh.local_mesh.shape) | dict(self.loops)

    def with_mesh(self, mesh: TodaysMesh) -> Self:
        """The same with another mesh.

        Raises:
            MeshError: If a loop has the name of one of its axes.
        """
        taken = sorted(self.loop_resource_axes.intersection(mesh.axis_names))
        if taken:
            raise MeshError(f"a loop is called {taken[0]!r} already: give the mesh's axis another")
        return self._replace(physical_mesh=mesh)

    def __repr__(self) -> str:
        return f"ResourceEnv({self.physical_mesh!r}, {self.loops!r})"


EMPTY_ENV = ResourceEnv(EMPTY_MESH, ())
"""No mesh."""


class ThreadResources:
    """`env`, which is the mesh in force of each thread, for JAX and for this package alike."""

    @property
    def env(self) -> ResourceEnv:
        """What is in force, also by `jax.set_mesh`. Assign another to put its mesh in force.

        It stays until the `with mesh:` block ends in which it was assigned; outside of all, for
        good.

        Raises:
            ArgumentError: When something else is assigned, or loops.
        """
        return ResourceEnv(mesh_in_force() or EMPTY_MESH)

    @env.setter
    def env(self, env: Any) -> None:
        mesh = getattr(env, "physical_mesh", None)
        if not isinstance(mesh, TodaysMesh):
            raise ArgumentError(
                f"thread_resources.env must be a ResourceEnv, not {type(env).__name__}: write "
                "ResourceEnv(Mesh(devices, axis_names), ())"
            )
        if getattr(env, "loops", ()):
            raise ArgumentError(
                f"thread_resources.env has the loops {env.loops}, which only xmap could run over: "
                "write ResourceEnv(mesh, ())"
            )
        put_mesh(mesh)

    @property
    def stack(self) -> list[ResourceEnv]:
        """What the `with mesh:` blocks around here have put in force, outermost first."""
        return [ResourceEnv(mesh) for mesh in stacked_meshes()]


thread_resources = ThreadResources()
"""That of every thread."""
