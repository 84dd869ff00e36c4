"""The mesh of `with mesh:`, which JAX keeps for each thread, to be read and put there by hand."""

from typing import Any

from jax._src import config
from jax._src import mesh as mesh_lib
from jax._src.mesh import Mesh

from xlashard.errors import MeshError

EMPTY_MESH: Mesh = mesh_lib.EMPTY_ENV.physical_mesh
"""The mesh without devices, which stands where none is in force."""


def stacked_meshes() -> tuple[Mesh, ...]:
    """The meshes of the `with` blocks around here, outermost first; the first one may be empty."""
    return tuple(env.physical_mesh for env in mesh_lib.thread_resources.stack)


def put_mesh(mesh: Mesh) -> None:
    """Puts another mesh in force in this thread, until the innermost `with mesh:` block ends.

    Args:
        mesh: The mesh; the empty one for none.
    """
    resources = mesh_lib.thread_resources
    resources.stack[-1] = resources.env = mesh_lib.ResourceEnv(mesh)
    # What JAX's caches tell programs apart by.
    config.mesh_context_manager.set_local(tuple(m for m in stacked_meshes() if not m.empty))


class StrangersMesh(Mesh):
    """A mesh of objects that stand for devices, and may have no hash, which JAX's own must have.

    JAX finds equal meshes by their devices' hashes and makes them one; these are compared instead.
    They are for asking where things would lie, and nothing can be computed on them.

    Args:
        devices: The devices, an array of objects.
        axis_names: One name for each of its dimensions.
    """

    def __new__(cls, devices: Any, axis_names: tuple[str, ...]) -> "StrangersMesh":
        """A mesh past JAX's table of them."""
        held = devices.copy()
        held.flags.writeable = False
        self = object.__new__(cls)
        fields = {
            "devices": held,
            "axis_names": axis_names,
            "axis_types": (mesh_lib.AxisType.Auto,) * len(axis_names),
            "size": held.size,
            "_cached_device_list": None,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        return self

    @property
    def abstract_mesh(self) -> Any:
        """What JAX asks of a mesh before it traces or places anything.

        Raises:
            MeshError: Always.
        """
        raise MeshError(
            f"{self!r} stands on {type(self.devices.flat[0]).__name__}s, which are no devices of "
            "JAX: nothing can be computed on it; build one of jax.devices()"
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Mesh)
            and self.axis_names == other.axis_names
            and self.devices.shape == other.devices.shape
            and all(a == b for a, b in zip(self.devices.flat, other.devices.flat, strict=True))
        )

    def __hash__(self) -> int:
        return hash((self.axis_names, self.devices.shape))

    def __reduce__(self) -> tuple[Any, ...]:
        return StrangersMesh, (self.devices, self.axis_names)

    def __repr__(self) -> str:
        return f"Mesh(axis_sizes={self.devices.shape}, axis_names={self.axis_names!r})"
