"""Public names of `xlashard.preflights`, under the path that they had before GPUs."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a name of `xlashard.preflights`, which imports the compilers."""
    if name.startswith("__"):
        raise AttributeError(name)  # no-catalogue: Python probes modules for such names
    return getattr(import_module("xlashard.preflights"), name)
