"""Resharding: plans, and their execution by program, by copies or within host memory."""

import math
from typing import Any, NamedTuple

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.transfer import Handle
from xlashard.core.array.placement.target import ResolvedSharding
from xlashard.geometry import Tiling

type TilingOnDevices = tuple[Tiling, tuple[Device, ...]]
"""A tiling and the devices that hold its tiles."""


class ReshardTask(NamedTuple):
    """One step of the reshard of an array.

    Attributes:
        handle: The array; without buffers in a process that has none of its devices.
        source: Its sharding.
        target: Sharding of the result.
        donate: Whether the result may reuse the memory of the source, or free it early. The source
            may be deleted afterwards; if not, it shares no buffer with the result.
        fresh: Whether buffers that are in place are copied; otherwise they are shared.
    """

    handle: Handle
    source: ResolvedSharding
    target: ResolvedSharding
    donate: bool = False
    fresh: bool = False

    @property
    def ends(self) -> tuple[TilingOnDevices, TilingOnDevices]:
        """Tilings of source and target, with their devices."""
        source, target = self.source, self.target
        return (
            (source.tiling, source.sharding.devices),
            (target.tiling, target.sharding.devices),
        )

    @property
    def room(self) -> int:
        """Bytes of the larger shard on a device, which limit those in transit."""
        sizes = math.prod(self.source.shard_shape), math.prod(self.target.shard_shape)
        return max(sizes) * self.handle.itemsize

    @property
    def aval(self) -> Any:
        """Abstract value of the result."""
        return self.target.aval(self.handle.dtype, self.handle.weak_type)
