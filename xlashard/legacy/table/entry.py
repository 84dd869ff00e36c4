"""One name of the era, and what is done about it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

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
