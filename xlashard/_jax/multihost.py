"""Functions of `jax.experimental.multihost_utils` that know one class of arrays only.

They ask for JAX's own class, and take any other array for a NumPy array of this process alone:
one that spans processes can't be read then, or is gathered as if it were many.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils

# By these names they are looked up at each call, so that who imported `process_allgather` earlier
# comes through here as well.
_NAMES = ("_handle_array_process_allgather", "assert_equal")


def hand_over_handles(array_type: type, handle_of: Callable[[Any], Any]) -> None:
    """Makes those functions see the handle of every array of a type, or of one derived from it."""

    def bare(x: Any) -> Any:
        return handle_of(x) if isinstance(x, array_type) else x

    def on_handles(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(in_tree: Any, *args: Any, **kwargs: Any) -> Any:
            return function(jax.tree.map(bare, in_tree), *args, **kwargs)

        return call

    for name in _NAMES:
        setattr(multihost_utils, name, on_handles(getattr(multihost_utils, name)))
