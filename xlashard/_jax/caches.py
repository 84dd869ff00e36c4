"""Caches of ours that `jax.clear_caches()` empties with its own."""

from typing import Protocol

from jax._src import util


class Clearable(Protocol):
    """Anything that can forget: an instance of a cache, or a function under `lru_cache`."""

    def cache_clear(self) -> None:
        """Forgets everything."""


def cleared_with_jax[C: Clearable](cache: C) -> C:
    """Lets `jax.clear_caches()` empty a cache too, while it lives. Also a decorator."""
    util.register_cache(cache, f"xlashard: {cache!r}")
    return cache
