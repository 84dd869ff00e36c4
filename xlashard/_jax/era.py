"""JAX as programs of 2022 and 2023 reach into it, and what it has today instead."""

from typing import Any

# What imports only when asked is imported here, so that the era's modules can stand in place of
# these without a module of JAX being loaded by it.
import jax.experimental.multihost_utils
import jax.experimental.pjit  # noqa: F401
from jax._src.array import ArrayImpl


def concrete_class(abstract: Any) -> type:
    """The class whose instances JAX gives out for one that it shows: of arrays, that of handles."""
    return {jax.Array: ArrayImpl}.get(abstract, abstract)
