"""`jax.experimental.compilation_cache.compilation_cache`."""

import jax

from xlashard._jax.compat.legacy_api import compilation_cache
from xlashard.legacy.modules.entry import Entry, members


def initialize_cache(path: str) -> None:
    """Set the folder of the persistent compilation cache.

    Args:
        path: The folder.
    """
    compilation_cache.set_cache_dir(path)


def is_initialized() -> bool:
    """Return whether the persistent compilation cache has a folder and is enabled."""
    if not jax.config.jax_enable_compilation_cache:
        return False
    return bool(jax.config.jax_compilation_cache_dir)


ENTRIES: tuple[Entry, ...] = (
    *members(
        "jax.experimental.compilation_cache.compilation_cache",
        "0.4.26",
        __name__,
        {
            "initialize_cache": "jax.config.update('jax_compilation_cache_dir', path)",
            "is_initialized": "jax.config.jax_compilation_cache_dir is not None",
        },
    ),
)
