"""Caches of ours that `jax.clear_caches()` empties with its own."""

from collections.abc import Callable
from typing import Any, Protocol

from jax._src import util


class Clearable(Protocol):
    """Anything that can forget: an instance of a cache, or a function under `lru_cache`."""

    def cache_clear(self) -> None:
        """Forgets everything."""


def kept_by_jaxpr[T](function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a function of a jaxpr that computes each result once, and drops it with the jaxpr.

    A function that calls itself for the jaxprs inside one is linear in their depth by this: each
    level of nested calls is visited once, and not again by all levels around it.
    """
    return util.weakref_lru_cache(function, trace_context_in_key=False)


def cleared_with_jax[C: Clearable](cache: C) -> C:
    """Lets `jax.clear_caches()` empty a cache too, while it lives. Also a decorator."""
    util.register_cache(cache, f"xlashard: {cache!r}")
    return cache
