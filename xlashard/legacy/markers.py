"""What may stand where a sharding may, and says no placement: `AUTO`, `FROM_GDA`, nothing."""

from typing import Any

from xlashard._jax.shardings import UnspecifiedValue
from xlashard.pjit import AUTO, FROM_GDA

AutoAxisResource = type(AUTO)
FromGdaSingleton = type(FROM_GDA)


class AutoOnMesh(AutoAxisResource):
    """`AUTO`, and what `AUTO(mesh)` gives: the mesh is the one in force at the call."""

    def __call__(self, mesh: Any) -> "AutoOnMesh":
        """Itself."""
        return self


AUTO_ON_MESH = AutoOnMesh()


def is_auto(x: Any) -> bool:
    """Whether it leaves a sharding to the compiler."""
    return isinstance(x, type(AUTO))


def is_unspecified(x: Any) -> bool:
    """Whether it says nothing."""
    return isinstance(x, UnspecifiedValue)


def is_from_gda(x: Any) -> bool:
    """Whether it says to take the argument's sharding."""
    return isinstance(x, type(FROM_GDA))


def is_unspecified_or_from_gda_or_auto(x: Any) -> bool:
    """Whether it is none of those that say a placement."""
    return is_from_gda(x) or is_auto(x) or is_unspecified(x)
