"""The pieces of an array without the dimensions that early `pmap` did not show."""

from collections.abc import Sequence

from xlashard._jax.tracebacks import short_tracebacks
from xlashard._jax.transfer import Handle, split
from xlashard.array.array import Array, wrap
from xlashard.array.buffer_shape import in_shape
from xlashard.array.holder import check_alive
from xlashard.array.shard import Shard
from xlashard.errors import ArgumentError
from xlashard.geometry import ShardIndex, ShardingSpec
from xlashard.geometry.sharding_spec import at_numbers, without_dims
from xlashard.sharding import PmapSharding


class UnstackedShard(Shard):
    """A piece that lacks some dimensions of its array, each of which it has one index of.

    Attributes:
        unstacked: Those dimensions.
    """

    unstacked: tuple[int, ...] = ()

    @property
    def index(self) -> ShardIndex:
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
        ArgumentError: It is no Array, or no spec is given and the array has none.
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
    with short_tracebacks:
        if not isinstance(x, Array):
            raise ArgumentError(
                f"unstacked_shards takes an Array of xlashard, not {type(x).__name__}: write "
                "unstacked_shards(device_put(x, sharding))"
            )
        check_alive(x)
        sharding = x.sharding
        if sharding_spec is None:
            if not isinstance(sharding, PmapSharding):
                raise ArgumentError(
                    f"x has a {type(sharding).__name__}, which does not say what is unstacked: "
                    "write unstacked_shards(x, sharding_spec), or [s.data for s in "
                    "x.addressable_shards]"
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
