"""Modules that the era's modules imported, and that programs reach through them: `pjit.pxla`."""

import importlib
from collections.abc import Callable
from typing import Any

_HOMES = {
    "ad": "jax.interpreters.ad",
    "batching": "jax.interpreters.batching",
    "core": "jax.core",
    "lu": "jax.linear_util",
    "maps": "jax.experimental.maps",
    "mlir": "jax.interpreters.mlir",
    "np": "numpy",
    "pe": "jax.interpreters.partial_eval",
    "pxla": "jax.interpreters.pxla",
    "xb": "jax.lib.xla_bridge",
    "xla": "jax.interpreters.xla",
}

_TODAY = {
    "lu": "jax.extend.linear_util",
    "maps": "jax.sharding",
    "pxla": "jax.sharding",
    "xb": "jax.extend.backend",
}

IMPORTED = {
    "jax.experimental.maps": ("ad", "batching", "core", "lu", "mlir", "np", "pe", "pxla", "xla"),
    "jax.experimental.pjit": (
        *("ad", "batching", "core", "lu", "maps", "mlir", "np", "pe", "pxla", "xb", "xla"),
    ),
    "jax.interpreters.pxla": ("ad", "batching", "lu", "mlir", "np", "pe", "xb", "xla"),
    "jax.interpreters.xla": ("ad", "lu", "np", "pe", "xb"),
}
"""The attributes that each module of the era had, by the name of that module."""


def imports(module: str) -> dict[str, str]:
    """Map each imported module's short name to the statement that imports it today.

    Args:
        module: The name of the era's module.
    """
    return {name: f"import {_TODAY.get(name, _HOMES[name])}" for name in IMPORTED[module]}


def imported_modules(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which imports the modules of `IMPORTED` when they are read.

    While the era's names are installed these are the modules that the installer put in place.

    Args:
        module: The name of the era's module.

    Example:
        >>> imported_modules("jax.experimental.pjit")("np").__name__
        'numpy'
    """

    def attribute(name: str) -> Any:
        if name not in IMPORTED[module]:
            # no-catalogue: Python's own message for a missing attribute
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        return importlib.import_module(_HOMES[name])

    return attribute
