"""`Shard`: the piece of an array that one device holds."""

from functools import cached_property
from typing import Any

from xlashard._jax.shardings import Device
from xlashard.array.text import index_text
from xlashard.sharding import Sharding

type Index = tuple[slice, ...]


class Shard:
    """The piece of an array on one device.

    Index and replica number are worked out when they are asked for.

    Args:
        device: The device.
        sharding: Of the array.
        global_shape: Of the array, in elements.
        data: The piece on its device; None where the device belongs to another process.

    Attributes:
        device: The device.
        data: The piece: an array on that device alone (a key array for a key array).

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import device_put
        >>> x = device_put(np.arange(4), jax.devices()[0])
        >>> (shard,) = x.addressable_shards
        >>> shard.index, shard.replica_id, shard.data.shape
        ((slice(None, None, None),), 0, (4,))
    """

    def __init__(
        self,
        device: Device,
        sharding: Sharding,
        global_shape: tuple[int, ...],
        data: Any = None,
    ) -> None:
        self.device = device
        self.data = data
        self._sharding = sharding
        self._global_shape = tuple(global_shape)

    @cached_property
    def _position(self) -> int:
        return self._sharding.devices.index(self.device)

    @cached_property
    def index(self) -> Index:
        """One slice per dimension: which part of the whole array this is."""
        tiling = self._sharding.tiling(self._global_shape)
        return tiling.indices(self._global_shape, [self._position])[0]

    @cached_property
    def replica_id(self) -> int:
        """Which copy of this part it is: 0 for the first device that holds it, and so on."""
        tiling = self._sharding.tiling(self._global_shape)
        return int(tiling.replica_ids([self._position])[0])

    def __repr__(self) -> str:
        data = "elsewhere" if self.data is None else repr(self.data)
        return (
            f"Shard(device={self.device}, index={index_text(self.index)}, "
            f"replica_id={self.replica_id}, data={data})"
        )
