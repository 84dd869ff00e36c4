"""Bytes or tokens in several pieces, in memory or in files, read only where they are asked for.

A file is mapped, not read: what a process never takes stays on the disk, however long the text is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from xlashard.train.errors import DataError

type Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
type Tokens = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]


@dataclass(frozen=True, eq=False)
class Text:
    """A text, or a part of one.

    Attributes:
        pieces: The pieces that are joined, all of one type: bytes, or numbers of tokens.
        starts: Where each piece begins in the joined text, and at the end where the last one ends.
        begin: Where this part of the joined text begins.
        end: Where it ends.
        below: Every number in it is to be less than this; checked where it is read.
    """

    pieces: tuple[Tokens, ...]
    starts: np.ndarray
    begin: int
    end: int
    below: int = 256

    @classmethod
    def joined(cls, pieces: Sequence[Tokens], below: int = 256) -> Self:
        """The text of all pieces, one after the other; `below` is the size of the vocabulary."""
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
        return cls(tuple(pieces), starts, 0, int(starts[-1]), below)

    def part(self, begin: int, end: int) -> Self:
        """The bytes from one place to another, without reading them."""
        return replace(self, begin=self.begin + begin, end=self.begin + end)

    def __len__(self) -> int:
        return self.end - self.begin

    def windows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Reads windows of the text, and nothing but them.

        Args:
            starts: Where each begins [count], from 0.
            size: Bytes or tokens of each.

        Returns:
            Bytes or tokens [count, size], of the type of the pieces.

        Raises:
            DataError: There is a token in them that the vocabulary has not.
        """
        found = np.empty((len(starts), size), self.pieces[0].dtype)
        places = np.asarray(starts, np.int64) + self.begin
        first = np.searchsorted(self.starts, places, side="right") - 1
        last = np.searchsorted(self.starts, places + size - 1, side="right") - 1
        for number in np.unique(first[first == last]):
            rows = np.flatnonzero((first == number) & (last == number))
            inside = places[rows] - self.starts[number]
            found[rows] = self.pieces[number][inside[:, None] + np.arange(size)]
        for row in np.flatnonzero(first != last):
            found[row] = self._across(int(places[row]), size, int(first[row]), int(last[row]))
        if found.dtype.itemsize > 1 and found.size and found.max() >= self.below:
            raise DataError(
                f"there is a token {found.max()} in the data, and model.vocab = {self.below} has "
                f"those from 0 to {self.below - 1}. Write the vocabulary of the tokeniser:\n"
                f"  [model]\n  vocab = {int(found.max()) + 1}"
            )
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


def tokens_in_file(path: Path, dtype: str) -> Tokens:
    """A piece from a file of tokens; only what is asked of it is read.

    Args:
        path: A `.npy` file of one dimension, or the numbers alone, little end first.
        dtype: The type of its numbers, `uint16` or `uint32`.

    Raises:
        DataError: It is empty, or holds something else.
    """
    if path.suffix == ".npy":
        return _npy(path, dtype)
    wanted, size = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    if not size or size % wanted.itemsize:
        raise DataError(
            f"{path} holds {size:,} bytes, and tokens of type {dtype} take {wanted.itemsize} each. "
            f"Write such a file by: np.asarray(tokens, {dtype!r}).tofile(path)"
        )
    return np.memmap(path, wanted, mode="r")


def _npy(path: Path, dtype: str) -> Tokens:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is no .npy file of numbers: {error}") from None
    if found.dtype == np.dtype(dtype) and found.ndim == 1 and found.size:
        return found
    raise DataError(
        f"{path} holds {found.dtype}{list(found.shape)}, and data.tokens = {dtype!r} takes tokens "
        f"of that type, in one dimension. Write such a file by: "
        f"np.save(path, np.asarray(tokens, {dtype!r}).ravel())"
    )


def in_file(path: Path) -> Bytes:
    """A piece from a file that is not empty; only what is asked of it is read."""
    return np.memmap(path, np.uint8, mode="r")
