"""What `jax.random` had besides today's names: the type of keys, and makers of keys of one kind."""

from typing import Any

import jax

from xlashard._jax.era import generators, random
from xlashard.legacy.modules.entry import Entry, members


class _KeyType(type):
    """Arrays of keys count as instances, and so do arrays of the words that keys consist of."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, jax.Array) and _is_key(instance)


def _is_key(x: jax.Array) -> bool:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return True
    return x.dtype == jax.numpy.uint32 and x.ndim > 0 and x.shape[-1] in (2, 4)


class KeyArray(metaclass=_KeyType):
    """The type of random keys: for annotations and `isinstance`, which JAX's own keys pass.

    Example:
        >>> isinstance(jax.random.PRNGKey(0), KeyArray), isinstance(jax.random.key(0), KeyArray)
        (True, True)
    """

    def __new__(cls, impl: Any, key_data: Any) -> Any:
        """An array of keys of their words.

        Args:
            impl: The kind of generator.
            key_data: The words, `[..., words]`.
        """
        return jax.random.wrap_key_data(key_data, impl=impl)


PRNGKeyArray = KeyArray
default_prng_impl = random.default_prng_impl
threefry_2x32 = generators.threefry_2x32


def threefry2x32_key(seed: Any) -> jax.Array:
    """A key for the generator of this name, as words."""
    return jax.random.PRNGKey(seed, impl="threefry2x32")


def rbg_key(seed: Any) -> jax.Array:
    """A key for the generator of this name, as words."""
    return jax.random.PRNGKey(seed, impl="rbg")


def unsafe_rbg_key(seed: Any) -> jax.Array:
    """A key for the generator of this name, as words."""
    return jax.random.PRNGKey(seed, impl="unsafe_rbg")


def shuffle(key: jax.Array, x: Any, axis: int = 0) -> jax.Array:
    """The elements of an array in a random order along one dimension, each line by itself.

    Args:
        key: The key.
        x: The array.
        axis: The dimension.
    """
    return jax.random.permutation(key, x, axis, independent=True)


def unsafe_raw_array(keys: jax.Array) -> jax.Array:
    """Return the words of random keys as numbers of type uint32, `[..., words]`."""
    return jax.random.key_data(keys)


ENTRIES: tuple[Entry, ...] = (
    *members(
        "jax.random",
        "0.4.24",
        __name__,
        {
            "KeyArray": "jax.Array",
            "PRNGKeyArray": "jax.Array",
            "default_prng_impl": "jax.random.key_impl(jax.random.key(0))",
            "rbg_key": "jax.random.key(seed, impl='rbg')",
            "threefry2x32_key": "jax.random.key(seed, impl='threefry2x32')",
            "threefry_2x32": "jax.extend.random.threefry_2x32",
            "unsafe_rbg_key": "jax.random.key(seed, impl='unsafe_rbg')",
        },
    ),
    *members(
        "jax.random",
        "0.4.31",
        __name__,
        {"shuffle": "jax.random.permutation(key, x, independent=True)"},
    ),
    Entry(
        "jax._src.random.prng.PRNGKeyArray.unsafe_raw_array",
        "0.4.24",
        "works",
        f"{__name__}:unsafe_raw_array",
        "jax.random.key_data(keys)",
    ),
)
