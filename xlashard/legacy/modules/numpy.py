"""`jax.numpy`, `jax.lax`, `jax.nn`, `jax.ops` and `jax.scipy`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard.legacy.modules.entry import EntryTable, refused, works

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


ENTRIES: EntryTable = {
    "jax.numpy": {
        "msort": works("0.4.9", "jax.numpy.sort(a, axis=0)", __name__),
        "alltrue": works("0.4.16", "jax.numpy.all"),
        "cumproduct": works("0.4.16", "jax.numpy.cumprod"),
        "product": works("0.4.16", "jax.numpy.prod"),
        "sometrue": works("0.4.16", "jax.numpy.any"),
        "NINF": works("0.4.24", "-jax.numpy.inf", __name__),
        "NZERO": works("0.4.24", "-0.0", __name__),
        "PZERO": works("0.4.24", "0.0", __name__),
        "in1d": works("0.4.24", "jax.numpy.isin", __name__),
        "issubsctype": works("0.4.24", "jax.numpy.issubdtype"),
        "row_stack": works("0.4.24", "jax.numpy.vstack"),
        "trapz": works("0.4.24", "jax.numpy.trapezoid"),
        "isscalar": works("0.4.32", "numpy.isscalar(x)", __name__),
        "round_": works("0.5.0", "jax.numpy.round"),
        "fix": works("0.10.0", "jax.numpy.trunc"),
    },
    "jax.lax": {
        "tie_in": works("0.4.30", "y", __name__),
        "zeros_like_array": works("0.9.0", "jax.numpy.zeros_like"),
        "xeinsum": refused(
            "0.4.31", "jax.numpy.einsum", "subscripts with named axes were removed with xmap"
        ),
    },
    "jax.nn": {"normalize": works("0.4.30", "jax.nn.standardize")},
    "jax.ops": {
        "index": works("0.3.2", "numpy.index_exp", __name__),
        "index_add": works("0.3.2", "x.at[idx].add(y)", __name__),
        "index_max": works("0.3.2", "x.at[idx].max(y)", __name__),
        "index_min": works("0.3.2", "x.at[idx].min(y)", __name__),
        "index_mul": works("0.3.2", "x.at[idx].multiply(y)", __name__),
        "index_update": works("0.3.2", "x.at[idx].set(y)", __name__),
    },
    "jax.scipy.linalg": {
        "tril": works("0.4.24", "jax.numpy.tril"),
        "triu": works("0.4.24", "jax.numpy.triu"),
    },
}
