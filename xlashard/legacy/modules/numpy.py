"""`jax.numpy`, `jax.lax`, `jax.nn`, `jax.ops` and `jax.scipy`; keys of `jax.random`, `jax.prng`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax.legacy_api import generators, key_types

NINF = -jnp.inf
NZERO = -0.0
PZERO = 0.0
ScalarMeta = type(jnp.float32)
"""Class of the types of elements, such as `jax.numpy.float32`, in annotations."""


def in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False) -> jax.Array:
    """Test each element of a flattened array for membership in another array.

    Args:
        ar1: The elements.
        ar2: The other array.
        assume_unique: True if neither array has duplicates.
        invert: True to invert the result.
    """
    return jnp.isin(jnp.ravel(ar1), ar2, assume_unique=assume_unique, invert=invert)


def isscalar(element: Any) -> bool:
    """Return True for a scalar of Python or NumPy, or a traced Python scalar.

    An array of rank 0 with a dtype of its own is not one, as in `numpy.isscalar`.

    Args:
        element: The value.
    """
    if isinstance(element, jax.Array):
        return element.ndim == 0 and element.weak_type
    return np.isscalar(element)


def msort(a: Any) -> jax.Array:
    """Return the elements sorted along the first dimension."""
    return jnp.sort(a, axis=0)


def pvary(x: Any, axis_name: Any) -> Any:
    """Return values as values that differ along mesh axes, inside `jax.shard_map`.

    Args:
        x: A pytree of arrays.
        axis_name: The axis, or a tuple of axes.
    """
    if not axis_name:
        return x
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axis_name, to="varying"), x)


def all_gather_invariant(x: Any, axis_name: Any, *, axis: int = 0, tiled: bool = False) -> Any:
    """Gather an array along mesh axes, as a value that is equal along them.

    Args:
        x: The array of this device.
        axis_name: The axis, or a tuple of axes.
        axis: The dimension of the result along which the pieces lie.
        tiled: True to concatenate the pieces, False to stack them.
    """
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=tiled, to="invarying")


def sph_harm(m: Any, n: Any, theta: Any, phi: Any, n_max: int | None = None) -> jax.Array:
    """Return spherical harmonics.

    Args:
        m: The orders.
        n: The degrees.
        theta: The azimuthal angles.
        phi: The polar angles.
        n_max: The maximum degree, if `n` is traced.
    """
    return jax.scipy.special.sph_harm_y(n, m, phi, theta, n_max=n_max)


def tie_in(x: Any, y: Any) -> Any:
    """Return the second argument: under today's tracing nothing has to be tied to an argument."""
    return y


index = np.s_
"""Object whose indexing returns the index."""


def index_update(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """Return an array with other values at an index."""
    return jnp.asarray(x).at[idx].set(y, **options)


def index_add(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """Return an array with values added at an index."""
    return jnp.asarray(x).at[idx].add(y, **options)


def index_mul(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """Return an array multiplied at an index."""
    return jnp.asarray(x).at[idx].multiply(y, **options)


def index_min(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """Return an array with the smaller of its values and others at an index."""
    return jnp.asarray(x).at[idx].min(y, **options)


def index_max(x: Any, idx: Any, y: Any, **options: Any) -> jax.Array:
    """Return an array with the larger of its values and others at an index."""
    return jnp.asarray(x).at[idx].max(y, **options)


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
