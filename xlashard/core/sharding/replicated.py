"""Devices and memory of shardings: replication before devices are known, memory kinds."""

from typing import Any

from jax.sharding import AbstractMesh

from xlashard._jax.runtime.shardings import default_memory_kind
from xlashard._jax.runtime.transfer import default_device
from xlashard.core.sharding.base import Sharding, XLACompatibleSharding
from xlashard.core.sharding.named import NamedSharding
from xlashard.geometry import Tiling


class _Replicated(XLACompatibleSharding):
    """Replication over the devices of the program, before these are known."""

    def __repr__(self) -> str:
        return "REPLICATED"

    def __reduce__(self) -> str:
        return "REPLICATED"

    @property
    def devices(self) -> tuple[Any, ...]:
        return ()

    def rank_tiling(self, ndim: int) -> Tiling:
        return Tiling((1,) * ndim, 1, ((1, 0),))


REPLICATED = _Replicated()
"""`None` as a resource of `pjit`, before the devices of its program are known."""


def names_devices(sharding: Sharding) -> bool:
    """Return False for `REPLICATED` and for shardings on an abstract mesh."""
    if sharding is REPLICATED:
        return False
    return not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh))


def custom_memory_kind(sharding: Sharding) -> str | None:
    """Return the memory kind of a sharding; None for the default one of its devices."""
    kind = sharding.memory_kind
    if kind is None:
        return None
    device = sharding.devices[0] if names_devices(sharding) else default_device()
    return None if kind == default_memory_kind(device) else kind
