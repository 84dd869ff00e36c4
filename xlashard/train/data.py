"""Training text as bytes or tokens, windows by step number, and batches on the mesh.

Files are memory-mapped: a process reads only the windows that it needs.
"""

import difflib
import importlib
import importlib.util
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

import xlashard
from xlashard.train.config.settings import DataSettings, Settings
from xlashard.train.errors import DataError

type Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


type Tokens = np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]


@dataclass(frozen=True, eq=False)
class Text:
    """Text, or a part of one.

    Attributes:
        pieces: Concatenated pieces, all of one type: bytes or token ids.
        starts: Offset of each piece in the concatenation, and the total length.
        begin: First offset of this part.
        end: Offset after this part.
        below: Exclusive upper bound of token ids; checked when windows are read.
    """

    pieces: tuple[Tokens, ...]
    starts: np.ndarray
    begin: int
    end: int
    below: int = 256

    @classmethod
    def joined(cls, pieces: Sequence[Tokens], below: int = 256) -> Self:
        """Concatenate pieces; `below` is the size of the vocabulary."""
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
        return cls(tuple(pieces), starts, 0, int(starts[-1]), below)

    def part(self, begin: int, end: int) -> Self:
        """Return the part between two offsets, without reading it."""
        return replace(self, begin=self.begin + begin, end=self.begin + end)

    def __len__(self) -> int:
        return self.end - self.begin

    def windows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Read windows of the text, and nothing else.

        Args:
            starts: Offsets of the windows [count].
            size: Bytes or tokens per window.

        Returns:
            Bytes or tokens [count, size], of the type of the pieces.

        Raises:
            DataError: A token id is not less than the size of the vocabulary.
        """
        windows = np.empty((len(starts), size), self.pieces[0].dtype)
        for window, start in zip(windows, starts, strict=True):
            self._read(self.begin + int(start), window)
        if windows.dtype.itemsize > 1 and windows.size and windows.max() >= self.below:
            raise DataError(
                f"the data has a token {windows.max()}, but model.vocab = {self.below} has tokens "
                f"from 0 to {self.below - 1}. Write the vocabulary of the tokeniser:\n"
                f"  [model]\n  vocab = {int(windows.max()) + 1}"
            )
        return windows

    def tobytes(self) -> bytes:
        """Return the whole text."""
        return self.windows(np.zeros(1, np.int64), len(self)).tobytes()

    def _read(self, place: int, window: np.ndarray) -> None:
        """Fill a window from a place on, with parts of as many pieces as it spans."""
        number = int(np.searchsorted(self.starts, place, side="right")) - 1
        filled = 0
        while filled < len(window):
            begin = place + filled - int(self.starts[number])
            part = self.pieces[number][begin : begin + len(window) - filled]
            window[filled : filled + len(part)] = part
            filled, number = filled + len(part), number + 1


def in_memory(text: bytes) -> Bytes:
    """Return a piece from bytes in memory."""
    return np.frombuffer(text, np.uint8)


def tokens_in_file(path: Path, dtype: str) -> Tokens:
    """Map a file of tokens as a piece.

    Args:
        path: A one-dimensional `.npy` file, or raw little-endian integers.
        dtype: Type of the integers, `uint16` or `uint32`.

    Raises:
        DataError: The file is empty or has other contents.
    """
    if path.suffix == ".npy":
        return _npy(path, dtype)
    element, size = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    if not size or size % element.itemsize:
        raise DataError(
            f"{path} has {size:,} bytes, but tokens of type {dtype} take {element.itemsize} each. "
            f"Write such a file by: np.asarray(tokens, {dtype!r}).tofile(path)"
        )
    return np.memmap(path, element, mode="r")


def _npy(path: Path, dtype: str) -> Tokens:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} is not a numeric .npy file: {error}") from None
    if array.dtype == np.dtype(dtype) and array.ndim == 1 and array.size:
        return array
    raise DataError(
        f"{path} has {array.dtype}{list(array.shape)}, but data.tokens = {dtype!r} requires tokens "
        f"of that type, in one dimension. Write such a file by: "
        f"np.save(path, np.asarray(tokens, {dtype!r}).ravel())"
    )


_SUFFIXES = (".txt", ".md", ".rst")
_TOKEN_SUFFIXES = (".bin", ".npy")
_ADVICE = "Write --data PATH [PATH ...] with text files or folders of them."
_BETWEEN = b"\n\n"

_LOOKED_AT = 1 << 16
"""Bytes at the beginning of a file that are checked for text."""


@dataclass(frozen=True)
class Corpus:
    """Text in two parts.

    Attributes:
        train: Part for training.
        held_out: Part at the end, for evaluation.
        source: Description of the source.
    """

    train: Text
    held_out: Text
    source: str

    @cached_property
    def mark(self) -> str:
        """Return a fingerprint of length and some windows, without reading the whole text."""
        size = min(64, len(self.train), len(self.held_out))
        sum_ = 0
        for text in (self.train, self.held_out):
            starts = np.linspace(0, len(text) - size, 16).astype(np.int64)
            sum_ = zlib.crc32(text.windows(starts, size).tobytes(), sum_)
        return f"{len(self.train)}+{len(self.held_out)} {self.unit}, {sum_:08x}"

    @property
    def unit(self) -> str:
        """Return the unit of the text: `bytes` or `tokens`."""
        return "bytes" if self.train.pieces[0].dtype == np.uint8 else "tokens"


def token_type(settings: Settings) -> Any:
    """Return the dtype of a batch."""
    return np.dtype("uint8" if settings.data.tokens == "bytes" else settings.data.tokens)


def read_corpus(data: DataSettings, length: int, vocab: int = 256) -> Corpus:
    """Find the text and hold out its end for evaluation. Files are mapped, not read.

    Args:
        data: Paths and the fraction for evaluation.
        length: Tokens of context; both parts must have at least one window more.
        vocab: Size of the vocabulary.

    Returns:
        The two parts.

    Raises:
        DataError: A path is missing, empty, unreadable or not text, or the text is too short.
    """
    pieces, source = _pieces(data)
    text = Text.joined(pieces, vocab)
    cut = len(text) - int(len(text) * data.eval_fraction)
    window = length + 1
    if min(cut, len(text) - cut) < window:
        # The smaller part decides how much text is needed.
        unit = "bytes" if data.tokens == "bytes" else "tokens"
        needed = int(window / min(data.eval_fraction, 1 - data.eval_fraction)) + 2
        raise DataError(
            f"{source}: {len(text):,} {unit} of text are not enough. With data.eval_fraction = "
            f"{data.eval_fraction:g}, each part needs model.length + 1 = {window} {unit}, "
            f"which takes about {needed:,} in all. Give more text, or a smaller model.length."
        )
    return Corpus(train=text.part(0, cut), held_out=text.part(cut, len(text)), source=source)


def _pieces(data: DataSettings) -> tuple[Sequence[Tokens], str]:
    """Return the pieces of the text, and a description of their source."""
    if not data.paths and data.tokens == "bytes":
        return [in_memory(_python_prose())], "the language reference that ships with Python"
    if not data.paths:
        raise DataError(
            f"data.tokens = {data.tokens!r} requires files of tokens in data.paths. Write:\n"
            f"  --data PATH [PATH ...]"
        )
    suffixes = _SUFFIXES if data.tokens == "bytes" else _TOKEN_SUFFIXES
    files = [file for path in data.paths for file in _files(Path(path), suffixes)]
    pieces = [_mapped(file, data.tokens) for file in files]
    if data.tokens == "bytes":
        pieces = [piece for text in pieces for piece in (in_memory(_BETWEEN), text)][1:]
    return pieces, str(files[0]) if len(files) == 1 else f"{len(files)} files"


def training_starts(size: int, step: int, count: int, length: int, seed: int) -> np.ndarray:
    """Sample the offsets of the windows of one step, uniformly with replacement.

    The counter of the random generator is the step, so the windows of a step depend neither on
    earlier steps nor on the number of devices or processes.

    Args:
        size: Length of the text.
        step: Number of the step.
        count: Number of windows.
        length: Tokens of context; a window is one longer.
        seed: Seed of the run.

    Returns:
        Offsets in the text [count].
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step]))
    return generator.integers(0, size - length, size=count)


def held_out_starts(size: int, batch: int, count: int, length: int) -> np.ndarray:
    """Return the offsets of evenly spaced windows, the same at every evaluation.

    Args:
        size: Length of the text.
        batch: Number of the batch, from 0.
        count: Windows per batch.
        length: Tokens of context; a window is one longer.

    Returns:
        Offsets in the text [count].
    """
    last = size - length - 1
    # Multiples of the golden ratio cover an interval evenly for any count.
    places = np.arange(batch * count, (batch + 1) * count) * 0.6180339887498949 % 1.0
    return (places * (last + 1)).astype(np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """Sharding of a batch, and the sequences that this process reads.

    Attributes:
        shape: Shape of the global batch: parts, sequences of a part, tokens of a window.
        sharding: Sharding of the global batch.
        rows: Sequences of a part on the addressable devices.
    """

    shape: tuple[int, int, int]
    sharding: Any
    rows: np.ndarray

    def read(self, text: Text, starts: np.ndarray) -> np.ndarray:
        """Read the windows of this process's devices.

        Args:
            text: The text.
            starts: Offsets of the windows of the global batch [parts · sequences].

        Returns:
            Bytes or tokens [parts, own sequences of a part, window].
        """
        parts, _, window = self.shape
        own = starts.reshape(self.shape[:2])[:, self.rows]
        return text.windows(own.reshape(-1), window).reshape(parts, len(self.rows), window)

    def put(self, text: Text, starts: np.ndarray) -> Any:
        """Put windows of a text on the mesh; see `read`."""
        local = self.read(text, starts)
        return xlashard.make_array_from_process_local_data(self.sharding, local, self.shape)


@dataclass
class TrainingWindows:
    """Iterator of the windows that this process reads, for one step after the other.

    Attributes:
        corpus: The text.
        plan: Plan of a batch.
        seed: Seed of the run.
        step: Number of the next step.
    """

    corpus: Corpus
    plan: BatchPlan
    seed: int
    step: int = 0

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> np.ndarray:
        """Return the windows of the next step."""
        text, (parts, rows, window) = self.corpus.train, self.plan.shape
        starts = training_starts(len(text), self.step, parts * rows, window - 1, self.seed)
        self.step += 1
        return self.plan.read(text, starts)

    def get_state(self) -> dict[str, Any]:
        """Return the number of steps that were read, and what their windows depend on."""
        return {"step": self.step, "seed": self.seed, "text": self.corpus.mark}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of a state, which may be of another seed or text."""
        self.step = state["step"]


def plan_batch(sharding: Any, count: int, parts: int, length: int) -> BatchPlan:
    """Return the plan of a batch in this process.

    Args:
        sharding: Sharding of a batch [parts, count / parts, length + 1].
        count: Sequences of the global batch.
        parts: Parts of the batch, computed one after the other.
        length: Tokens of context; a window is one longer.
    """
    shape = (parts, count // parts, length + 1)
    indices = sharding.addressable_devices_indices_map(shape).values()
    spans = sorted({index[1].indices(shape[1])[:2] for index in indices})
    return BatchPlan(shape, sharding, np.concatenate([np.arange(*span) for span in spans]))


def _python_prose() -> bytes:
    """Return the topics of Python's documentation, in the order of their names."""
    name = "pydoc_data.topics"
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise DataError(f"this Python lacks {name}, the default text. {_ADVICE}")
    topics: dict[str, str] = importlib.import_module(name).topics
    return "\n\n".join(topics[key].strip() for key in sorted(topics)).encode()


def _files(path: Path, suffixes: Sequence[str]) -> Sequence[Path]:
    if not path.exists():
        raise DataError(f"{path} does not exist{_similar(path)}. {_ADVICE}")
    if not path.is_dir():
        return [path]
    files = sorted(x for x in path.rglob("*") if x.suffix in suffixes and x.is_file())
    if not files:
        raise DataError(f"the folder {path} has no {', '.join(suffixes)} file. {_ADVICE}")
    return files


def _similar(path: Path) -> str:
    """Suggest existing names that resemble a missing path."""
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=2)
    return f" (did you mean {' or '.join(str(path.parent / x) for x in close)}?)" if close else ""


def _mapped(path: Path, tokens: str) -> Tokens:
    """Map a file as a piece, after a check of its contents."""
    try:
        return _text(path) if tokens == "bytes" else tokens_in_file(path, tokens)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {_ADVICE}") from None


def _text(path: Path) -> Bytes:
    """Map a text file, after a check of its first bytes."""
    with path.open("rb") as file:
        head = file.read(_LOOKED_AT)
        size = file.seek(0, os.SEEK_END)
    if not size or (size <= _LOOKED_AT and not head.strip()):
        raise DataError(f"{path} is empty. {_ADVICE}")
    zero = head.find(b"\0")
    if zero >= 0:
        raise DataError(f"{path} is not text: byte {zero:,} is zero. {_ADVICE}")
    return np.memmap(path, np.uint8, mode="r")
