"""`MappedSharding`: any object that maps devices to slices."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Self

from xlashard._jax.runtime.shardings import Device
from xlashard.core.sharding.base import Index, Shape, Sharding
from xlashard.errors import ShardingError


class MappedSharding(Sharding):
    """Sharding by an object of another class, such as a user's that derives from JAX's `Sharding`.

    Args:
        base: The object. It has `devices_indices_map`, and `device_set` or `_device_assignment`.
    """

    def __init__(self, base: Any) -> None:
        self._base = base

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices in assignment order; by number, where the object has no order."""
        ordered, devices = _read(self._base, "_device_assignment"), _read(self._base, "device_set")
        if ordered is None and devices is None:
            raise self._lacks("device_set")
        return tuple(ordered or sorted(devices, key=attrgetter("id")))

    @property
    def memory_kind(self) -> str | None:
        """Return the memory of the devices that holds the data."""
        return _read(self._base, "memory_kind")

    def with_memory_kind(self, kind: str) -> Self:
        """Return the same placement in another memory of the same devices."""
        return type(self)(self._base.with_memory_kind(kind))

    def devices_indices_map(self, global_shape: Sequence[int]) -> Mapping[Device, Index]:
        """Return the slices that each device holds."""
        shape: Shape = self._checked_shape(global_shape, "devices_indices_map")
        map_devices = _read(self._base, "devices_indices_map")
        try:
            if map_devices is not None:
                return map_devices(shape)
        except NotImplementedError:
            pass  # of JAX's base class
        raise self._lacks("devices_indices_map(shape)")

    def _lacks(self, member: str) -> ShardingError:
        return ShardingError(
            f"a {self._describe()} has no {member}, which places the slices of an array: define "
            "it, derive from xlashard.Sharding, or write NamedSharding(mesh, P('data'))"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MappedSharding) or self.devices != other.devices:
            return False
        return self._base == other._base

    def __hash__(self) -> int:
        return hash((type(self._base), self.devices))  # the object may have no hash

    def __repr__(self) -> str:
        return repr(self._base)

    def _describe(self) -> str:
        return type(self._base).__name__


def _read(base: Any, name: str) -> Any:
    """Return an attribute that JAX's interface leaves to its subclasses; None where it is unset."""
    try:
        return getattr(base, name)
    except (AttributeError, NotImplementedError):
        return None
