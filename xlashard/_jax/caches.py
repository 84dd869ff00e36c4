"""Caches of ours that `jax.clear_caches()` empties with its own."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from jax._src import util


class Clearable(Protocol):
    """Anything that can forget: an instance of a cache, or a function under `lru_cache`."""

    def cache_clear(self) -> None:
        """Forgets everything."""


class BoundedCache:
    """Cache of values by hashable keys; it is emptied when it is full.

    Args:
        size: The number of values that it holds.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, made where the cache has none."""
        value = self._values.get(key)
        if value is None:
            value = make()
            if len(self._values) >= self._size:
                self._values = {}
            self._values[key] = value
        return value

    def cache_clear(self) -> None:
        """Forget every value."""
        self._values = {}


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
