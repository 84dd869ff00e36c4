"""JAX's public functions as they are when this package is first used.

A program may put this package's functions in their place, as by `jax.jit = xlashard.jit`. Calls of
JAX's functions from inside this package would then come back to it without an end.
"""

import jax

device_get = jax.device_get
device_put = jax.device_put
jit = jax.jit
live_arrays = jax.live_arrays
make_array_from_single_device_arrays = jax.make_array_from_single_device_arrays
reshard = jax.sharding.reshard
shard_map = jax.shard_map
with_sharding_constraint = jax.lax.with_sharding_constraint
