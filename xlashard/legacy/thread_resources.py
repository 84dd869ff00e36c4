"""The era's `thread_resources`: the mesh in force, to be read and to be assigned."""

from collections import OrderedDict
from typing import Any, NamedTuple, Self

from xlashard._jax.mesh_stack import EMPTY_MESH, put_mesh, stacked_meshes
from xlashard._jax.tracing import mesh_in_force
from xlashard.errors import ArgumentError, MeshError
from xlashard.sharding import Mesh


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

    physical_mesh: Mesh
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

    def with_mesh(self, mesh: Mesh) -> Self:
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
        if not isinstance(mesh, Mesh):
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
