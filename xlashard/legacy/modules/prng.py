"""`jax.prng`: PRNG implementations and key arrays."""

from xlashard._jax.compat.legacy_api import generators, key_types
from xlashard.legacy.modules.entry import Entry, members
from xlashard.legacy.modules.random import KeyArray

PRNGImpl = key_types.PRNGImpl
PRNGKeyArray = KeyArray
rbg_prng_impl = generators.rbg_prng_impl
seed_with_impl = generators.seed_with_impl
threefry2x32_p = generators.threefry2x32_p
threefry_2x32 = generators.threefry_2x32
threefry_prng_impl = generators.threefry_prng_impl
unsafe_rbg_prng_impl = generators.unsafe_rbg_prng_impl

ENTRIES: tuple[Entry, ...] = (
    Entry("jax.prng", "0.4.24", "works", __name__, "import jax.extend.random"),
    *members(
        "jax.prng",
        "0.4.24",
        __name__,
        {
            "PRNGKeyArray": "jax.Array",
            "rbg_prng_impl": "jax.extend.random.rbg_prng_impl",
            "seed_with_impl": "jax.extend.random.seed_with_impl",
            "threefry_2x32": "jax.extend.random.threefry_2x32",
            "threefry_prng_impl": "jax.extend.random.threefry_prng_impl",
            "unsafe_rbg_prng_impl": "jax.extend.random.unsafe_rbg_prng_impl",
        },
    ),
)
