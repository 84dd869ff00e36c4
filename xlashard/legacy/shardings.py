"""Shardings by the names of the era, and what programs asked of them."""

from typing import Any

from xlashard import NamedSharding
from xlashard._jax.shardings import JaxSharding, Mesh, jax_hlo_sharding
from xlashard._jax.shardings import op_sharding as _proto
from xlashard.legacy.parsed import ParsedPartitionSpec
from xlashard.sharding import Sharding
from xlashard.sharding import XLACompatibleSharding as _Own


class _CompatibleType(type(_Own)):
    """Every sharding that XLA can be told of counts as one, those of JAX too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, Sharding):
            return isinstance(instance, _Own)
        return isinstance(instance, JaxSharding)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls in subclass.__mro__:
            return True
        return issubclass(subclass, _Own if issubclass(subclass, Sharding) else JaxSharding)


class XLACompatibleSharding(_Own, metaclass=_CompatibleType):
    """Shardings whose tiles depend on the rank alone; those of JAX are all of that kind.

    Example:
        >>> import jax
        >>> isinstance(jax.numpy.zeros(3).sharding, XLACompatibleSharding)
        True
    """


def on_mesh(mesh: Mesh, pspec: Any, parsed_pspec: Any = None) -> NamedSharding:
    """A sharding on a mesh.

    Args:
        mesh: The mesh.
        pspec: The spec, or None for the replicated one.
        parsed_pspec: The same spec parsed, which says nothing more.
    """
    return NamedSharding(mesh, pspec)


def op_sharding_of(sharding: Any, ndim: int) -> Any:
    """XLA's `OpSharding` of a placement of arrays of a rank: the era's `_to_xla_op_sharding`.

    Args:
        sharding: A sharding of this package or of JAX.
        ndim: The rank.
    """
    return _proto(jax_hlo_sharding(sharding, ndim))


@property
def op_sharding(self: Any) -> Any:
    """XLA's `OpSharding` of bare tiles: the era's `_op_sharding`."""
    return _proto(self._hlo_sharding)


@property
def parsed_pspec(self: Any) -> Any:
    """The parsed spec of a sharding on a mesh: the era's `_parsed_pspec`."""
    return ParsedPartitionSpec.from_user_input(self.spec, "spec", allow_unconstrained_dims=True)
