"""JAX's transfer guards (`jax_transfer_guard*`), as they stand for the thread that asks."""

from enum import Enum
from typing import NamedTuple

from jax._src import config
from jax._src.lib import guard_lib


class Way(Enum):
    """From where to where; the value is how JAX's settings and its texts spell it."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_DEVICE = "device_to_device"
    DEVICE_TO_HOST = "device_to_host"


class Guards(NamedTuple):
    """The level for each way; None where nobody set one."""

    host_to_device: str | None
    device_to_device: str | None
    device_to_host: str | None

    def level(self, way: Way) -> str | None:
        """The level for one way."""
        return getattr(self, way.value)

    def refuse(self, way: Way, *, explicit: bool) -> bool:
        """Whether a transfer is forbidden; an explicit one is what somebody asked for by name."""
        level = self.level(way)
        return level == "disallow_explicit" or (level == "disallow" and not explicit)

    def log(self, way: Way, *, explicit: bool) -> bool:
        """Whether a transfer is to be written down."""
        level = self.level(way)
        return level == "log_explicit" or (level == "log" and not explicit)


_FREE = (None, "allow")
_host_to_device = config.transfer_guard_host_to_device
_device_to_device = config.transfer_guard_device_to_device
_device_to_host = config.transfer_guard_device_to_host


def guards_in_force() -> Guards | None:
    """The guards; None, at once, where all transfers are free."""
    to_device, between, to_host = (
        _host_to_device.value,
        _device_to_device.value,
        _device_to_host.value,
    )
    if to_device in _FREE and between in _FREE and to_host in _FREE:
        return None
    return Guards(to_device, between, to_host)


def inside_device_get() -> bool:
    """Whether this thread is in a call of `jax.device_get`, which asks for a transfer by name."""
    return guard_lib.thread_local_state().explicit_device_get
