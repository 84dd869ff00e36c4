"""Rounds of simultaneous transfers between devices of several processes.

Between processes a piece can only go by a program that the devices of both run: a permutation, in
which each device sends at most one piece and takes at most one, all of one shape.
"""

from collections.abc import Iterable, Sequence
from dataclasses import field

from xlashard.geometry.reshard import Piece
from xlashard.geometry.tiling import Tiling
from xlashard.lazily import dataclass

type Shape = tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """Pieces of one shape that go at the same time.

    Attributes:
        shape: Of each piece.
        by_sender: The piece that each device sends.
        by_receiver: The piece that each device receives.
    """

    shape: Shape
    by_sender: dict[int, Piece] = field(default_factory=dict)
    by_receiver: dict[int, Piece] = field(default_factory=dict)

    def try_add(self, piece: Piece) -> bool:
        """Add a piece, unless its sender or its receiver is busy."""
        if piece.source in self.by_sender or piece.destination in self.by_receiver:
            return False
        self.by_sender[piece.source] = self.by_receiver[piece.destination] = piece
        return True

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the devices that take part, in ascending order."""
        return tuple(sorted({*self.by_sender, *self.by_receiver}))

    def permutation(self) -> list[int]:
        """Return the receiver for each of `devices`, as a permutation.

        A device that sends nothing is paired with one that receives nothing; the block of such a
        transfer is ignored.
        """
        idle = iter([device for device in self.devices if device not in self.by_receiver])
        return [
            self.by_sender[device].destination if device in self.by_sender else next(idle)
            for device in self.devices
        ]


def schedule_rounds(pieces: Iterable[Piece]) -> tuple[Round, ...]:
    """Assign each piece to the first round in which its sender and receiver are idle.

    Args:
        pieces: All pieces, in their order.
    """
    by_shape: dict[Shape, list[Round]] = {}
    order: list[Round] = []
    for piece in pieces:
        shape = tuple(s.stop - s.start for s in piece.source_index)
        rounds = by_shape.setdefault(shape, [])
        if not any(one.try_add(piece) for one in rounds):
            rounds.append(Round(shape))
            rounds[-1].try_add(piece)
            order.append(rounds[-1])
    return tuple(order)


def refine(tiling: Tiling, shape: Sequence[int], num_devices: int) -> Tiling | None:
    """Return a refinement of a tiling in which every device holds another part.

    Args:
        tiling: The tiling to refine; its copies don't count.
        shape: Of the array, in elements, which may be cut only evenly.
        num_devices: Number of devices.

    Returns:
        The tiling, or None where no even cut exists.

    Example:
        >>> refine(Tiling.replicated(2, 2), (8, 6), 4).counts
        (2, 2)
    """
    factor, left = divmod(num_devices, tiling.num_tiles)
    if left or 0 in shape:
        return None
    counts = list(tiling.counts)
    for prime in _primes(factor):
        extents = [n // k for n, k in zip(shape, counts, strict=True)]
        free = [dim for dim, extent in enumerate(extents) if extent % prime == 0]
        if not free:
            return None
        counts[max(free, key=lambda dim: extents[dim])] *= prime
    steps = ((num_devices, 1),) if num_devices > 1 else ()
    return Tiling(tuple(counts), num_devices, steps)


@dataclass(frozen=True)
class TransferLoad:
    """Approximate load of the busiest device in a reshard.

    Attributes:
        rounds: Number of pieces that it sends or receives.
        elements: Number of elements of these pieces.
    """

    rounds: int
    elements: int


def transfer_load(shape: Sequence[int], source: Tiling, target: Tiling) -> TransferLoad:
    """Return the load of the busiest device of a reshard from one tiling to another."""
    taken = sent = elements = 1
    for size, before, after in zip(shape, source.counts, target.counts, strict=True):
        taken *= max(1, -(-before // after))
        sent *= max(1, -(-after // before))
        elements *= size // max(before, after)
    sent *= -(-target.num_replicas // source.num_replicas)
    rounds = max(taken, sent)
    return TransferLoad(rounds, rounds * elements)


def _primes(number: int) -> list[int]:
    """Return the prime factors, largest first."""
    found, factor = [], 2
    while number > 1:
        if number % factor == 0:
            found.append(factor)
            number //= factor
        else:
            factor = factor + 1 if factor * factor <= number else number
    return found[::-1]
