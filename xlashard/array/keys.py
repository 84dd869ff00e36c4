"""Key arrays (`jax.random.key`): JAX's own objects, over handles that this package places.

Constructors return a key array of JAX for keys, never an `Array`: NumPy cannot hold its elements,
and all operations on keys are in `jax.random`. Its data is an array of integers with trailing
dimensions, which is placed like any array.
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
    """Return True for an array of typed keys."""
    return isinstance(x, jax.Array) and is_key_dtype(x.dtype)


def is_key_dtype(dtype: Any) -> bool:
    """Return True for a dtype of keys."""
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_handle(keys: Any) -> Handle:
    """Return the handle of a key array's data, with the key's own dimensions last."""
    return jax.random.key_data(keys)


def keys_over(handle: Handle, like: Any) -> Any:
    """Return the key array over data, with the generator of another key array."""
    return jax.random.wrap_key_data(handle, impl=jax.random.key_impl(like))


def key_shards(keys: Any) -> list[Shard]:
    """Return the shards of a key array on the devices of this process.

    Args:
        keys: A key array of JAX.

    Returns:
        A `Shard` per device, in the order of the device assignment, whose data are keys.

    Raises:
        ArgumentError: The value is no array of keys.

    Example:
        >>> keys = jax.random.split(jax.random.key(0), 4)
        >>> [shard.data.shape for shard in key_shards(keys)]
        [(4,)]
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
    """Resolve the sharding of a key array for its data.

    Args:
        logical: The resolved sharding of the key array.
        extra: Dimensions of one key.
    """
    sharding: Sharding = logical.sharding
    if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
        tiling = replace(logical.tiling, counts=(*logical.tiling.counts, *(1 for _ in extra)))
        sharding = GSPMDSharding(
            sharding.devices, tiling.to_tile_assignment(), memory_kind=sharding.memory_kind
        )
    return resolve_sharding((*logical.shape, *extra), sharding)
