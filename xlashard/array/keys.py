"""Key arrays (`jax.random.key`): JAX's own objects, over handles that this package placed.

Every constructor that is given keys gives a key array of JAX back, never an `Array`: its elements
have no value that NumPy could hold, and all that one does with keys is in `jax.random`. Below it
is an array of numbers with trailing dimensions, and that is what is placed.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax.runtime.transfer import Handle
from xlashard.array.core.shard import Shard
from xlashard.array.placement.target import ResolvedSharding, resolve_sharding
from xlashard.errors import ArgumentError
from xlashard.sharding import (
    GSPMDSharding,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    from_jax,
)


def is_key_array(x: Any) -> bool:
    """Whether it is an array of typed keys."""
    return isinstance(x, jax.Array) and is_key_dtype(x.dtype)


def is_key_dtype(dtype: Any) -> bool:
    """Whether it is a dtype of keys."""
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_handle(keys: Any) -> Handle:
    """The handle of numbers under a key array, with the key's own dimensions last."""
    return jax.random.key_data(keys)


def keys_over(handle: Handle, like: Any) -> Any:
    """The key array over numbers, of the same kind of generator as another key array."""
    return jax.random.wrap_key_data(handle, impl=jax.random.key_impl(like))


def key_shards(keys: Any) -> list[Shard]:
    """The pieces of a key array on this process's devices.

    Args:
        keys: A key array of JAX.

    Returns:
        Per device, in the order of the device assignment, a `Shard` whose data are keys.

    Raises:
        ArgumentError: It is no array of keys.
    """
    if not is_key_array(keys):
        raise ArgumentError(
            f"key_shards takes an array of keys such as jax.random.key(0), not "
            f"{type(keys).__name__}"
        )
    sharding = from_jax(keys.sharding)
    count = len(sharding.addressable_positions)
    return Shard.all_of(sharding, keys.shape, [keys.addressable_data(n) for n in range(count)])


def resolve_key_data(logical: ResolvedSharding, extra: tuple[int, ...]) -> ResolvedSharding:
    """Where the numbers of keys go whose key array goes to some places.

    Args:
        logical: The places of the key array.
        extra: The dimensions of one key.
    """
    sharding: Sharding = logical.sharding
    if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
        tiling = replace(logical.tiling, counts=(*logical.tiling.counts, *(1 for _ in extra)))
        sharding = GSPMDSharding(
            sharding.devices, tiling.to_tile_assignment(), memory_kind=sharding.memory_kind
        )
    return resolve_sharding((*logical.shape, *extra), sharding)
