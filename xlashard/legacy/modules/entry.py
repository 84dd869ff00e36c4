"""One name of the era, and what is done about it."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

type Treatment = Literal["works", "differs", "refused"]


@dataclass(frozen=True)
class Entry:
    """A name that programs of the era import or reach for.

    Attributes:
        name: Where they find it: `jax.experimental.maps.Mesh`.
        gone: The release of JAX since which it is gone, or is something else: `0.4.14`.
        treatment: Whether it works as it did, works with differences, or refuses to be used and
            says what to do instead.
        source: What is put there, imported when first asked for: `module:attribute`, or `module`
            for a whole module.
        today: What to write today, as code.
        note: How it differs, or why it is refused; empty where it works as it did.
    """

    name: str
    gone: str
    treatment: Treatment
    source: str
    today: str
    note: str = ""

    @property
    def stays(self) -> bool:
        """Whether a program may keep the name: today's JAX has it, for the same purpose."""
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
    """Entries of names of one module that went together and work as they did.

    Args:
        parent: The module.
        gone: The release since which they are gone.
        source: The module that they are taken from, where they have the same names.
        today: What to write today, by name.
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
