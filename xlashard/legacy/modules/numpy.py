"""`jax.numpy`, `jax.lax`, `jax.nn`, `jax.ops` and `jax.scipy`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard.legacy.modules.entry import Entry, refused, works

NINF = -jnp.inf
NZERO = -0.0
PZERO = 0.0


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


def tie_in(x: Any, y: Any) -> Any:
    """Return the second argument: under today's tracing nothing has to be tied to an argument."""
    return y


class _Index:
    """Object whose indexing returns the index."""

    def __getitem__(self, index: Any) -> Any:
        return index


index = _Index()


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


ENTRIES: tuple[Entry, ...] = (
    *works("jax.numpy", "0.4.9", __name__, msort="jax.numpy.sort(a, axis=0)"),
    *works(
        "jax.numpy",
        "0.4.16",
        alltrue="jax.numpy.all",
        cumproduct="jax.numpy.cumprod",
        product="jax.numpy.prod",
        sometrue="jax.numpy.any",
    ),
    *works("jax.numpy", "0.4.24", __name__, NINF="-jax.numpy.inf", NZERO="-0.0", PZERO="0.0"),
    *works("jax.numpy", "0.4.24", __name__, in1d="jax.numpy.isin"),
    *works(
        "jax.numpy",
        "0.4.24",
        issubsctype="jax.numpy.issubdtype",
        row_stack="jax.numpy.vstack",
        trapz="jax.numpy.trapezoid",
    ),
    *works("jax.numpy", "0.4.32", __name__, isscalar="numpy.isscalar(x)"),
    *works("jax.numpy", "0.5.0", round_="jax.numpy.round"),
    *works("jax.numpy", "0.10.0", fix="jax.numpy.trunc"),
    *works("jax.lax", "0.4.30", __name__, tie_in="y"),
    *works("jax.lax", "0.9.0", zeros_like_array="jax.numpy.zeros_like"),
    *refused(
        "jax.lax",
        "0.4.31",
        "jax.numpy.einsum",
        "subscripts with named axes were removed with xmap",
        "xeinsum",
    ),
    *works("jax.nn", "0.4.30", normalize="jax.nn.standardize"),
    *works(
        "jax.ops",
        "0.3.2",
        __name__,
        index="numpy.index_exp",
        index_add="x.at[idx].add(y)",
        index_max="x.at[idx].max(y)",
        index_min="x.at[idx].min(y)",
        index_mul="x.at[idx].multiply(y)",
        index_update="x.at[idx].set(y)",
    ),
    *works("jax.scipy.linalg", "0.4.24", tril="jax.numpy.tril", triu="jax.numpy.triu"),
)
