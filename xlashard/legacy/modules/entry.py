"""`Entry`: a removed name, its replacement, and today's code."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

type Treatment = Literal["works", "differs", "refused"]


@dataclass(frozen=True)
class Entry:
    """Name that programs of 2022 and 2023 use, and JAX has removed or changed.

    Attributes:
        name: The full name: `jax.experimental.maps.Mesh`.
        gone: The release of JAX that removed or changed it: `0.4.14`.
        treatment: `works`, `differs` (works with differences) or `refused` (raises an error).
        source: The installed object, imported on first access: `module:attribute`, or `module`
            for a whole module.
        today: Today's code.
        note: The difference, or the reason of the refusal; empty if it works unchanged.
    """

    name: str
    gone: str
    treatment: Treatment
    source: str
    today: str
    note: str = ""

    @property
    def stays(self) -> bool:
        """True if a program may keep the name, because today's JAX has it too."""
        parent = self.name.rpartition(".")[0]
        above, _, module = parent.rpartition(".")
        if self.name in _STAYING or _MULTIHOST in (self.name, parent):
            return True
        return self.today in (self.name, f"from {above} import {module}")


_MULTIHOST = "jax.experimental.multihost_utils"
_STAYING = frozenset(
    {
        "jax.config",
        "jax.pmap",
        "jax.sharding.Mesh",
        "jax.experimental.array_serialization.serialization",
    }
)


def members(parent: str, gone: str, source: str, today: Mapping[str, str]) -> Iterator[Entry]:
    """Yield entries of one module that were removed together and work unchanged.

    Args:
        parent: The module.
        gone: The release that removed them.
        source: The module that defines them, under the same names.
        today: Today's code, by name.
    """
    for name, code in today.items():
        yield Entry(f"{parent}.{name}", gone, "works", f"{source}:{name}", code)


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
"""The imported modules of each module of 2022, by its name."""


def imports(module: str) -> dict[str, str]:
    """Map each imported module's short name to the statement that imports it today.

    Args:
        module: The full name of the module.
    """
    return {name: f"import {_TODAY.get(name, _HOMES[name])}" for name in IMPORTED[module]}


def imported_modules(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which imports the modules of `IMPORTED` when they are read.

    While the removed names are installed, they resolve to the installed shims.

    Args:
        module: The full name of the module.

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
