"""Bytes that lie in several pieces, in memory or in files, and are read only where they are asked.

A file is mapped, not read: what a process never takes stays on the disk, however long the text is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

type Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, eq=False)
class Text:
    """A text, or a part of one.

    Attributes:
        pieces: The pieces that are joined.
        starts: Where each piece begins in the joined text, and at the end where the last one ends.
        begin: Where this part of the joined text begins.
        end: Where it ends.
    """

    pieces: tuple[Bytes, ...]
    starts: np.ndarray
    begin: int
    end: int

    @classmethod
    def joined(cls, pieces: Sequence[Bytes]) -> Self:
        """The text of all pieces, one after the other."""
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
        return cls(tuple(pieces), starts, 0, int(starts[-1]))

    def part(self, begin: int, end: int) -> Self:
        """The bytes from one place to another, without reading them."""
        return replace(self, begin=self.begin + begin, end=self.begin + end)

    def __len__(self) -> int:
        return self.end - self.begin

    def windows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Reads windows of the text, and nothing but them.

        Args:
            starts: Where each begins [count], from 0.
            size: Bytes of each.

        Returns:
            Bytes [count, size], uint8.
        """
        found = np.empty((len(starts), size), np.uint8)
        places = np.asarray(starts, np.int64) + self.begin
        first = np.searchsorted(self.starts, places, side="right") - 1
        last = np.searchsorted(self.starts, places + size - 1, side="right") - 1
        for number in np.unique(first[first == last]):
            rows = np.flatnonzero((first == number) & (last == number))
            inside = places[rows] - self.starts[number]
            found[rows] = self.pieces[number][inside[:, None] + np.arange(size)]
        for row in np.flatnonzero(first != last):
            found[row] = self._across(int(places[row]), size, int(first[row]), int(last[row]))
        return found

    def tobytes(self) -> bytes:
        """The whole text, in memory."""
        return self.windows(np.zeros(1, np.int64), len(self)).tobytes()

    def _across(self, place: int, size: int, first: int, last: int) -> np.ndarray:
        """A window that runs over several pieces."""
        parts = []
        for number in range(first, last + 1):
            begin = max(place - int(self.starts[number]), 0)
            end = place + size - int(self.starts[number])
            parts.append(self.pieces[number][begin:end])
        return np.concatenate(parts)


def in_memory(text: bytes) -> Bytes:
    """A piece from bytes that are in memory."""
    return np.frombuffer(text, np.uint8)


def in_file(path: Path) -> Bytes:
    """A piece from a file that is not empty; only what is asked of it is read."""
    return np.memmap(path, np.uint8, mode="r")
