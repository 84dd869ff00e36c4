"""`jax.prng`: kinds of random generators, and keys of them."""

from xlashard._jax.era import generators, key_types
from xlashard.legacy.era.keys import KeyArray

PRNGImpl = key_types.PRNGImpl
PRNGKeyArray = KeyArray
rbg_prng_impl = generators.rbg_prng_impl
seed_with_impl = generators.seed_with_impl
threefry2x32_p = generators.threefry2x32_p
threefry_2x32 = generators.threefry_2x32
threefry_prng_impl = generators.threefry_prng_impl
unsafe_rbg_prng_impl = generators.unsafe_rbg_prng_impl
