"""Indices into dimensions that 32-bit integers are too short for.

Without `jax_enable_x64` JAX makes every index one of 32 bits, which wraps around, and an element
elsewhere is read. So the indexing itself runs with 64-bit integers; what it gives is of the
array's dtype as ever.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = 2**31 - 1
"""Largest 32-bit integer."""


def is_long(x: Any) -> bool:
    """Return True if a dimension of an array is longer than a 32-bit integer can count."""
    return x.size > _LARGEST and max(x.shape) > _LARGEST


def wide_integers(x: Any) -> AbstractContextManager[Any]:
    """Return a block in which integers have 64 bits if an array is long, else an empty one."""
    return jax.enable_x64(True) if is_long(x) else nullcontext()


def widened(index: Any) -> Any:
    """Return an index with its arrays of integers as int64; call it in `wide_integers`."""
    if isinstance(index, tuple | list):
        return type(index)(map(widened, index))
    is_array = isinstance(index, jax.Array | np.ndarray | np.generic)
    if is_array and jnp.issubdtype(index.dtype, np.integer):
        return index.astype(np.int64)
    return index
