"""Pieces with and without dimensions of size 1: what devices hold, and what early JAX showed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from xlashard._jax.shardings import default_memory_kind
from xlashard._jax.transfer import Handle, copy_to, host_view, make_aval, put, split
from xlashard.array.array import Array, wrap
from xlashard.array.holder import check_alive
from xlashard.array.shard import Shard
from xlashard.errors import ArgumentError
from xlashard.geometry import ShardIndex, ShardingSpec
from xlashard.geometry.sharding_spec import at_numbers, without_dims
from xlashard.sharding import PmapSharding, SingleDeviceSharding


def in_shape(handle: Handle, shape: tuple[int, ...]) -> Handle:
    """The elements of a handle on one device in another shape, in memory of their own.

    On a CPU they are copied where they lie. Elsewhere no transfer can change the shape of a
    buffer, and a program on that one device copies them.

    Args:
        handle: On one device.
        shape: With as many elements.
    """
    (device,) = handle.sharding.device_set
    if device.platform == "cpu":
        aval = make_aval(shape, handle.dtype, handle.sharding, handle.weak_type)
        window = host_view(handle)[0].reshape(shape)
        return put(aval, handle.sharding, [window], [device], committed=handle.committed)
    kind, normal = handle.sharding.memory_kind, default_memory_kind(device)
    if kind in (None, normal):
        return _in_shape(handle, shape)
    # Programs work in the device's own memory.
    own = SingleDeviceSharding(device, memory_kind=normal).twin()
    return copy_to(_in_shape(copy_to(handle, own), shape), handle.sharding)


@partial(jax.jit, static_argnums=1)
def _in_shape(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.lax.reshape(x, shape)


class UnstackedShard(Shard):
    """A piece that lacks some dimensions of its array, each of which it has one index of.

    Attributes:
        unstacked: Those dimensions.
    """

    unstacked: tuple[int, ...] = ()

    @property
    def index(self) -> ShardIndex:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A slice per dimension, or a number where the piece lacks it."""
        return at_numbers(super().index, self.unstacked)


def unstacked_shards(x: Array, sharding_spec: ShardingSpec | None = None) -> list[UnstackedShard]:
    """The pieces on this process's devices as early `pmap` showed them.

    Args:
        x: The array.
        sharding_spec: Says which dimensions are `Unstacked`; the array's own, if it has a
            `PmapSharding`.

    Returns:
        As `x.addressable_shards`, but along those dimensions a shard's index has a number and its
        data, a copy, no dimension.

    Raises:
        ArgumentError: No spec is given and the array has none.
        GeometryError: The spec does not fit the shape.
        DeletedError: A deleted array.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import PmapSharding, device_put, unstacked_shards
        >>> spread = PmapSharding.default((1, 3), devices=jax.devices()[:1], unstacked=True)
        >>> (shard,) = unstacked_shards(device_put(np.ones((1, 3)), spread))
        >>> shard.index, shard.data.shape
        ((0, slice(None, None, None)), (3,))
    """
    check_alive(x)
    sharding = x.sharding
    if sharding_spec is None:
        if not isinstance(sharding, PmapSharding):
            raise ArgumentError(
                f"x has a {type(sharding).__name__}, which does not say what is unstacked: write "
                "unstacked_shards(x, sharding_spec), or [s.data for s in x.addressable_shards]"
            )
        sharding_spec = sharding.sharding_spec
    sharding_spec.check_shape(x.shape)
    dims = sharding_spec.unstacked_dims
    pieces = [wrap(without(buffer, dims)) for buffer in split(x.to_jax())]
    shards = UnstackedShard.all_of(sharding, x.shape, pieces)
    for shard in shards:
        shard.unstacked = dims
    return shards


def without(buffer: Handle, dims: Sequence[int]) -> Handle:
    """A handle on one device without some dimensions of size 1; as it is, if there are none."""
    return in_shape(buffer, without_dims(buffer.shape, dims)) if dims else buffer
