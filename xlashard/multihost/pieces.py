"""Pieces of arrays that several processes hold, which must be the same in all of them."""

from collections.abc import Mapping

from xlashard.lazily import dataclass
from xlashard.processes import named_processes, odd_ones

type Held = dict[str, dict[str, str]]
"""By path of a value, the digests of the pieces of it that a process holds, by any name."""


@dataclass(frozen=True)
class UnlikePiece:
    """A piece that the processes which hold it do not hold alike.

    Attributes:
        name: The piece's.
        holders: The processes that hold it.
        odd: Those of them that hold something else than most.
    """

    name: str
    holders: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def text(self) -> str:
        """Whom it concerns, in words."""
        return f"is not the same in {named_processes(self.holders)}"


def unlike_pieces(by_process: Mapping[int, Held], path: str) -> list[UnlikePiece]:
    """The pieces of one value that are not the same everywhere.

    Args:
        by_process: What each process holds.
        path: The path of the value.
    """
    holders: dict[str, dict[int, str]] = {}
    for process, held in by_process.items():
        for name, digest in held.get(path, {}).items():
            holders.setdefault(name, {})[process] = digest
    return [
        UnlikePiece(name, tuple(held), odd_ones(held))
        for name, held in holders.items()
        if len(set(held.values())) > 1
    ]
