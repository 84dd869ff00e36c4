"""Of what class the arrays are that are read."""

from xlashard import Array
from xlashard.errors import ArgumentError
from xlashard.legacy.gda import GlobalDeviceArray
from xlashard.legacy.serialization.forms import Wanted
from xlashard.legacy.worlds import World
from xlashard.sharding import NamedSharding


def check_place(wanted: Wanted, world: World) -> None:
    """Refuses a place that an array of a world can't have, before anything is read.

    Raises:
        ArgumentError: Without `jax_array`, a place that is not named by a mesh.
    """
    if not world.jax_array and not isinstance(wanted.sharding, NamedSharding):
        raise ArgumentError(
            f"the array at {wanted.stored_at!r} is to go to {wanted.sharding}, but without "
            "jax_array it becomes a GlobalDeviceArray, which is placed by a mesh and axes: give "
            "NamedSharding(mesh, P(...))"
        )


def in_world(x: Array, world: World) -> Array:
    """An Array as what a world reads, over the same buffers."""
    return x if world.jax_array else GlobalDeviceArray.from_array(x)
