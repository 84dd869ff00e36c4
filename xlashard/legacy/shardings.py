"""Shardings by the names of the era, and what programs asked of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from xlashard import NamedSharding, P, ShardingSpec
from xlashard import PmapSharding as TodaysPmapSharding
from xlashard._jax.shardings import Device, JaxSharding, Mesh, jax_hlo_sharding
from xlashard._jax.shardings import op_sharding as _proto
from xlashard.legacy.parsed import ParsedPartitionSpec
from xlashard.sharding import Sharding, from_jax
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


class DeviceRow(tuple[Device, ...]):
    """Devices in a row: a tuple that also answers as the NumPy array that it was once.

    Example:
        >>> import jax
        >>> row = DeviceRow(jax.devices()[:1])
        >>> row.shape, len(row), row == tuple(row.flat)
        ((1,), 1, True)
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            return super().__getattribute__(name)  # which says that there is none
        return getattr(np.array(list(self), dtype=object), name)


class _MadePmapSharding(TodaysPmapSharding):
    """One whose `devices` also answer as a NumPy array."""

    @property
    def devices(self) -> Any:
        """The devices of the grid in row-major order."""
        return DeviceRow(super().devices)


# Not the class above itself: its metaclass is one of jaxlib's, which can't be derived from.
class _PmapType(type):
    """Makes shardings of the class above, and counts all of today as its instances."""

    def __call__(cls, devices: Any, sharding_spec: ShardingSpec) -> TodaysPmapSharding:
        return _MadePmapSharding(devices, sharding_spec)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, TodaysPmapSharding)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, TodaysPmapSharding)


class PmapSharding(metaclass=_PmapType):
    """`pmap`'s shardings: the `devices` of those that it makes also answer as a NumPy array.

    Args:
        devices: The devices, in the order of the spec's grid: an array of any shape, or a list.
        sharding_spec: How arrays are cut and dealt to them.

    Example:
        >>> import jax
        >>> made = PmapSharding.default((1, 4), devices=jax.devices()[:1])
        >>> isinstance(made, PmapSharding), made.devices.shape
        (True, (1,))
    """

    default = _MadePmapSharding.default


def on_mesh(mesh: Mesh, pspec: Any, parsed_pspec: Any = None) -> NamedSharding:
    """A sharding on a mesh.

    Args:
        mesh: The mesh.
        pspec: The spec, or None for the replicated one.
        parsed_pspec: The same spec parsed, which says nothing more.
    """
    return NamedSharding(mesh, P() if pspec is None else pspec)


def op_sharding_of(sharding: Any, ndim: int) -> Any:
    """XLA's `OpSharding` of a placement of arrays of a rank: the era's `_to_xla_op_sharding`.

    Args:
        sharding: A sharding of this package or of JAX.
        ndim: The rank.
    """
    return _proto(jax_hlo_sharding(sharding, ndim))


def is_compatible_aval(self: Any, aval_shape: Sequence[int]) -> None:
    """Check that arrays of a rank can be placed so: a method of the era's shardings.

    Args:
        self: A sharding of JAX.
        aval_shape: The shape of the array; the rank is checked.

    Raises:
        GeometryError: The rank is too low.
    """
    from_jax(self).check_compatible_aval(tuple(aval_shape))


@property
def op_sharding(self: Any) -> Any:
    """XLA's `OpSharding` of bare tiles: the era's `_op_sharding`."""
    return _proto(self._hlo_sharding)


@property
def parsed_pspec(self: Any) -> Any:
    """The parsed spec of a sharding on a mesh: the era's `_parsed_pspec`."""
    return ParsedPartitionSpec.from_user_input(self.spec, "spec", allow_unconstrained_dims=True)
