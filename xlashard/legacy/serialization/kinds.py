"""Of what class the arrays are that are read."""

from dataclasses import dataclass

from xlashard import Array
from xlashard.errors import ArgumentError
from xlashard.legacy.serialization.forms import Wanted
from xlashard.legacy.worlds import World
from xlashard.sharding import NamedSharding


@dataclass(frozen=True)
class Kind:
    """Arrays, or GlobalDeviceArrays.

    Attributes:
        is_gda: Whether they are GlobalDeviceArrays.
    """

    is_gda: bool

    def check(self, wanted: Wanted) -> None:
        """Refuses a place that arrays of this kind can't have, before anything is read."""
        if self.is_gda and not isinstance(wanted.sharding, NamedSharding):
            raise ArgumentError(
                "without jax_array, what is read is a GlobalDeviceArray, which is placed by a mesh "
                f"and axes, and the array at {wanted.stored_at!r} is to go to "
                f"{wanted.sharding}: give NamedSharding(mesh, P(...))"
            )

    def made_of(self, x: Array) -> Array:
        """An Array as one of this kind, over the same buffers."""
        return x


def kind_in(world: World) -> Kind:
    """The kind of arrays that functions give in a world."""
    return Kind(is_gda=not world.jax_array)
