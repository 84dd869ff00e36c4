"""Modules that JAX has removed, as programs get them while the era's names are installed."""

from typing import Any

from xlashard.legacy.module_shims import resolve_source
from xlashard.legacy.modules import entries


class RemovedModule:
    """Module whose attributes are the objects of its entries, with nothing installed.

    Args:
        name: The full name of the module.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        try:
            entry = entries()[f"{self.name}.{name}"]
        except KeyError:
            raise AttributeError(f"no entry for {self.name}.{name}") from None
        return resolve_source(entry.source)


core = RemovedModule("jax.core")
maps = RemovedModule("jax.experimental.maps")
multihost_utils = RemovedModule("jax.experimental.multihost_utils")
pjit = RemovedModule("jax.experimental.pjit")
pxla = RemovedModule("jax.interpreters.pxla")
sharded_jit = RemovedModule("jax.interpreters.sharded_jit")
xla = RemovedModule("jax.interpreters.xla")
global_device_array = RemovedModule("jax.experimental.global_device_array")
