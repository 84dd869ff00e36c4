"""`Shard`: the part of an array on one device."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from xlashard._jax.runtime.shardings import Device
from xlashard.core.sharding import Sharding, from_jax
from xlashard.errors import ShardingError, TilingError

type Index = tuple[slice, ...]


class Shard:
    """Part of an array on one device.

    Index and replica number are computed at first use, and kept.

    Args:
        device: The device.
        sharding: Sharding of the array: one of this package, of JAX, or of a class of your own that
            maps devices to slices.
        global_shape: Shape of the array, in elements.
        data: The data on the device; None if the device belongs to another process.

    Attributes:
        device: The device.
        data: The data: an array on that device alone (a key array for a key array).

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
        sharding: Any,
        global_shape: tuple[int, ...],
        data: Any = None,
    ) -> None:
        self.device = device
        self.data = data
        self._whole = _ShardIndices(sharding, tuple(global_shape))

    @classmethod
    def all_of(
        cls, sharding: Sharding, global_shape: tuple[int, ...], data: Sequence[Any]
    ) -> list[Self]:
        """Return the shards of this process, one per item of `data`, in device order."""
        whole = _ShardIndices(sharding, tuple(global_shape))
        shards, devices = [], sharding.devices
        for position, piece in zip(sharding.addressable_positions, data, strict=True):
            shard = cls.__new__(cls)
            shard.device, shard.data, shard._whole = devices[position], piece, whole
            shards.append(shard)
        return shards

    @cached_property
    def index(self) -> Index:
        """Slice of the array that the shard holds, one `slice` per dimension.

        Raises:
            TilingError: The array is unreduced: the shard is a partial result of it.
            ShardingError: The sharding doesn't map devices to slices.
        """
        return self._whole.place(self.device)[0]

    @cached_property
    def replica_id(self) -> int:
        """Replica number: 0 for the first device that holds this slice, and so on."""
        return self._whole.place(self.device)[1]

    def __repr__(self) -> str:
        data = "elsewhere" if self.data is None else repr(self.data)
        try:
            where = f"index={index_text(self.index)}, replica_id={self.replica_id}"
        except TilingError:
            where = "unreduced"
        except ShardingError:
            where = "index unknown"
        return f"Shard(device={self.device}, {where}, data={data})"


class _ShardIndices:
    """Indices of the shards of one array, computed once for all devices of this process."""

    def __init__(self, sharding: Any, shape: tuple[int, ...]) -> None:
        self._given = sharding
        self.shape = shape

    @cached_property
    def sharding(self) -> Sharding:
        """Return the sharding as one of this package."""
        return from_jax(self._given)

    @cached_property
    def _here(self) -> dict[Device, tuple[Index, int]]:
        positions = self.sharding.addressable_positions
        devices = [self.sharding.devices[position] for position in positions]
        return dict(zip(devices, self._places(positions), strict=True))

    def _places(self, positions: Sequence[int]) -> list[tuple[Index, int]]:
        tiling = self.sharding.tiling(self.shape)
        indices = tiling.indices(self.shape, positions)
        return list(zip(indices, tiling.replica_ids(positions).tolist(), strict=True))

    def place(self, device: Device) -> tuple[Index, int]:
        """Return index and replica number of a device."""
        known = self._here.get(device)
        return known or self._places([self.sharding.devices.index(device)])[0]


def index_text(index: Any) -> str:
    """Return an index as source code: `[0:2, :]`."""
    parts = []
    for cut in index:
        if isinstance(cut, int):
            parts.append(str(cut))
        else:
            whole = cut.start is None and cut.stop is None
            parts.append(":" if whole else f"{cut.start or 0}:{cut.stop}")
    return f"[{', '.join(parts)}]" if parts else "[()]"
