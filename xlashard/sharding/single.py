"""`SingleDeviceSharding`: the whole array on one device."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Self

import jax

from xlashard._jax.runtime.shardings import Device, JaxSingleDeviceSharding, with_interface
from xlashard.errors import ShardingError
from xlashard.geometry import Tiling
from xlashard.sharding.base import DeviceNames, XLACompatibleSharding, devices_of, names_of
from xlashard.sharding.checks import check_memory_kind

if TYPE_CHECKING:

    class _SingleDeviceBase(XLACompatibleSharding, JaxSingleDeviceSharding):
        """Both base classes, for type checkers."""

else:
    _SingleDeviceBase = with_interface(XLACompatibleSharding, JaxSingleDeviceSharding)


class SingleDeviceSharding(_SingleDeviceBase):
    """Sharding that places the whole array on one device.

    Args:
        device: The device.
        memory_kind: The memory of it that holds the data, the default one if `None`.

    Raises:
        ShardingError: It is not a device, or lacks the memory.

    Example:
        >>> import jax
        >>> SingleDeviceSharding(jax.devices()[0]).shard_shape((3, 5))
        (3, 5)
    """

    def __init__(self, device: Device, *, memory_kind: str | None = None) -> None:
        if not isinstance(device, jax.Device):
            raise ShardingError(
                f"a SingleDeviceSharding needs a device such as jax.devices()[0], not {device!r}"
            )
        check_memory_kind(device, memory_kind, "SingleDeviceSharding")
        super().__init__(device, memory_kind=memory_kind)

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_single, (names_of(self.devices), self.memory_kind))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the one device."""
        return (self._device,)

    @property
    def memory_kind(self) -> str | None:
        """Return the memory of the device that holds the data."""
        return self._memory_kind

    def with_memory_kind(self, kind: str) -> Self:
        """Return the sharding in another memory of the device."""
        return type(self)(self._device, memory_kind=kind)

    @property
    def is_fully_replicated(self) -> bool:
        """Return True: the one device holds everything."""
        return True

    def rank_tiling(self, ndim: int) -> Tiling:
        """Return one tile, on the one device."""
        return Tiling.replicated(1, ndim)

    @cached_property
    def _jax_sharding(self) -> JaxSingleDeviceSharding:
        return JaxSingleDeviceSharding(self._device, memory_kind=self.memory_kind)

    def jax_sharding(self, shape: Sequence[int] = ()) -> JaxSingleDeviceSharding:
        """Return JAX's own `SingleDeviceSharding` on the same device."""
        return self._jax_sharding


def _unpickle_single(names: DeviceNames, memory_kind: str | None) -> SingleDeviceSharding:
    return SingleDeviceSharding(devices_of(names)[0], memory_kind=memory_kind)
