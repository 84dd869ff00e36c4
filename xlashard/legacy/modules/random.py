"""`jax.random` and `jax.prng`: keys, and the PRNG implementations."""

from typing import Any

import jax

from xlashard._jax.legacy_api import generators, key_types
from xlashard.legacy.modules.entry import EntryTable, moved, works


class _KeyType(type):
    """Metaclass that counts typed and raw key arrays as instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, jax.Array) and _is_key(instance)


def _is_key(x: jax.Array) -> bool:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return True
    return x.dtype == jax.numpy.uint32 and x.ndim > 0 and x.shape[-1] in (2, 4)


class KeyArray(metaclass=_KeyType):
    """Type of PRNG keys, for annotations and `isinstance`.

    Example:
        >>> isinstance(jax.random.PRNGKey(0), KeyArray), isinstance(jax.random.key(0), KeyArray)
        (True, True)
    """

    def __new__(cls, impl: Any, key_data: Any) -> Any:
        """Make a key array from its raw data.

        Args:
            impl: The PRNG implementation.
            key_data: The raw data, `[..., words]`.
        """
        return jax.random.wrap_key_data(key_data, impl=impl)


PRNGImpl = key_types.PRNGImpl
PRNGKeyArray = KeyArray
threefry2x32_p = generators.threefry2x32_p


def threefry2x32_key(seed: Any) -> jax.Array:
    """Return a raw key of this PRNG implementation."""
    return jax.random.PRNGKey(seed, impl="threefry2x32")


def rbg_key(seed: Any) -> jax.Array:
    """Return a raw key of this PRNG implementation."""
    return jax.random.PRNGKey(seed, impl="rbg")


def unsafe_rbg_key(seed: Any) -> jax.Array:
    """Return a raw key of this PRNG implementation."""
    return jax.random.PRNGKey(seed, impl="unsafe_rbg")


def shuffle(key: jax.Array, x: Any, axis: int = 0) -> jax.Array:
    """Shuffle an array along one dimension, each slice independently.

    Args:
        key: The key.
        x: The array.
        axis: The dimension.
    """
    return jax.random.permutation(key, x, axis, independent=True)


def unsafe_raw_array(keys: jax.Array) -> jax.Array:
    """Return the raw data of PRNG keys, uint32 `[..., words]`."""
    return jax.random.key_data(keys)


_API = "xlashard._jax.legacy_api"


ENTRIES: EntryTable = {
    "jax.random": {
        "KeyArray": works("0.4.24", "jax.Array", __name__),
        "PRNGKeyArray": works("0.4.24", "jax.Array", __name__),
        "rbg_key": works("0.4.24", "jax.random.key(seed, impl='rbg')", __name__),
        "shuffle": works("0.4.31", "jax.random.permutation(key, x, independent=True)", __name__),
        "threefry2x32_key": works("0.4.24", "jax.random.key(seed, impl='threefry2x32')", __name__),
        "unsafe_rbg_key": works("0.4.24", "jax.random.key(seed, impl='unsafe_rbg')", __name__),
        "default_prng_impl": works(
            "0.4.24", "jax.random.key_impl(jax.random.key(0))", f"{_API}:random."
        ),
        "threefry_2x32": works("0.4.24", "jax.extend.random.threefry_2x32"),
    },
    "jax._src.random.prng.PRNGKeyArray": {
        "unsafe_raw_array": works("0.4.24", "jax.random.key_data(keys)", __name__)
    },
    "jax.prng": {
        "": works("0.4.24", "import jax.extend.random", __name__),
        "PRNGKeyArray": works("0.4.24", "jax.Array", __name__),
        **moved(
            "0.4.24",
            "jax.extend.random",
            *("rbg_prng_impl", "seed_with_impl", "threefry_2x32", "threefry_prng_impl"),
            "unsafe_rbg_prng_impl",
        ),
    },
}
