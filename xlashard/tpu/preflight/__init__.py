"""Public names of `xlashard.preflights`, under the path that they had before GPUs."""

from typing import Any

from xlashard.lazily import deferred

_preflights = deferred("xlashard.preflights")


def __getattr__(name: str) -> Any:
    """Return a name of `xlashard.preflights`, which imports the compilers."""
    return getattr(_preflights, name)
