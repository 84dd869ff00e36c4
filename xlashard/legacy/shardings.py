"""Shardings by the names of the era, and what programs asked of them."""

from typing import Any

from xlashard import NamedSharding, OpShardingSharding
from xlashard._jax.shardings import JaxSharding, OpSharding, jax_hlo_sharding
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


def op_sharding_of(sharding: Any, ndim: int) -> Any:
    """XLA's `OpSharding` of a placement of arrays of a rank: the era's `_to_xla_op_sharding`.

    Args:
        sharding: A sharding of this package or of JAX.
        ndim: The rank.
    """
    return jax_hlo_sharding(sharding, ndim).to_proto()


@property
def op_sharding(self: Any) -> Any:
    """XLA's `OpSharding` of bare tiles: the era's `_op_sharding`."""
    return self._hlo_sharding.to_proto()


@property
def parsed_pspec(self: Any) -> Any:
    """The parsed spec of a sharding on a mesh: the era's `_parsed_pspec`."""
    return ParsedPartitionSpec.from_user_input(self.spec, "spec", allow_unconstrained_dims=True)


__all__ = [
    "NamedSharding",
    "OpSharding",
    "OpShardingSharding",
    "XLACompatibleSharding",
    "op_sharding",
    "op_sharding_of",
    "parsed_pspec",
]
