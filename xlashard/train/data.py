"""Text as bytes, windows of it by step number, and their way onto the mesh."""

import difflib
import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import xlashard
from xlashard.train.errors import DataError
from xlashard.train.settings import DataSettings

_SUFFIXES = (".txt", ".md", ".rst")
_ADVICE = "Write --data PATH [PATH ...] with text files or folders of them."

type Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Corpus:
    """A text in two parts.

    Attributes:
        train: The bytes to learn from.
        held_out: The bytes at the end, kept for evaluation.
        source: Where they come from, in words.
    """

    train: Bytes
    held_out: Bytes
    source: str


def read_corpus(data: DataSettings, length: int) -> Corpus:
    """Reads the text and keeps its end for evaluation.

    Args:
        data: Paths and the part for evaluation.
        length: Bytes of context; both parts must hold one window more than that.

    Returns:
        The two parts.

    Raises:
        DataError: A path is missing, empty, unreadable or no text, or all texts together are too
            short.
    """
    if data.paths:
        files = [file for path in data.paths for file in _files(Path(path))]
        text = b"\n\n".join(_text(file) for file in files)
        source = str(files[0]) if len(files) == 1 else f"{len(files)} files"
    else:
        text, source = _python_prose(), "the language reference that ships with Python"
    cut = len(text) - int(len(text) * data.eval_fraction)
    window = length + 1
    if min(cut, len(text) - cut) < window:
        # The smaller part decides how much text is needed.
        needed = int(window / min(data.eval_fraction, 1 - data.eval_fraction)) + 2
        raise DataError(
            f"{source}: {len(text):,} bytes of text are too few. Split with data.eval_fraction = "
            f"{data.eval_fraction:g}, each part must hold model.length + 1 = {window} bytes, which "
            f"takes about {needed:,} in all. Give more text, or a smaller model.length."
        )
    array = np.frombuffer(text, np.uint8)
    return Corpus(train=array[:cut], held_out=array[cut:], source=source)


def training_windows(text: Bytes, step: int, count: int, length: int, seed: int) -> np.ndarray:
    """Windows of the text for one step, drawn evenly with replacement.

    A counter-based generator takes the step as its counter. So a step's windows depend on nothing
    that happened before, nor on how many devices or processes there are.

    Args:
        text: The bytes to draw from.
        step: Number of the step.
        count: Windows to draw.
        length: Bytes of context.
        seed: Seed of the run.

    Returns:
        Bytes [count, length + 1], uint8.
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step]))
    starts = generator.integers(0, len(text) - length, size=count)
    return text[starts[:, None] + np.arange(length + 1)]


def held_out_windows(text: Bytes, batch: int, count: int, length: int) -> np.ndarray:
    """Windows at even distances over the whole text, the same at every evaluation.

    Args:
        text: The bytes to take them from.
        batch: Which batch of windows, from 0.
        count: Windows of one batch.
        length: Bytes of context.

    Returns:
        Bytes [count, length + 1], uint8.
    """
    last = len(text) - length - 1
    # The golden ratio's multiples cover an interval evenly, however many are taken.
    places = np.arange(batch * count, (batch + 1) * count) * 0.6180339887498949 % 1.0
    starts = (places * (last + 1)).astype(np.int64)
    return text[starts[:, None] + np.arange(length + 1)]


def put_batch(windows: np.ndarray, parts: int, sharding: Any) -> Any:
    """Lays a batch over the mesh, each process giving only the rows of its own devices.

    Args:
        windows: Bytes of the whole batch [count, length + 1].
        parts: Parts of the batch that are computed one after the other.
        sharding: Of the result.

    Returns:
        An Array [parts, count / parts, length + 1], uint8.
    """
    whole = windows.reshape(parts, -1, windows.shape[-1])
    indices = sharding.addressable_devices_indices_map(whole.shape).values()
    spans = {index[1].indices(whole.shape[1])[:2] for index in indices}
    rows = np.concatenate([np.arange(*span) for span in sorted(spans)])
    local = whole if len(rows) == whole.shape[1] else whole[:, rows]
    return xlashard.make_array_from_process_local_data(
        sharding, np.ascontiguousarray(local), whole.shape
    )


def _python_prose() -> bytes:
    """The chapters of Python's reference, joined in the order of their names."""
    name = "pydoc_data.topics"
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise DataError(f"this Python comes without {name}, the default text. {_ADVICE}")
    topics: dict[str, str] = importlib.import_module(name).topics
    return "\n\n".join(topics[key].strip() for key in sorted(topics)).encode()


def _files(path: Path) -> Sequence[Path]:
    if not path.exists():
        raise DataError(f"there is no file or folder {path}{_similar(path)}. {_ADVICE}")
    if not path.is_dir():
        return [path]
    found = sorted(x for x in path.rglob("*") if x.suffix in _SUFFIXES and x.is_file())
    if not found:
        raise DataError(f"the folder {path} holds no {', '.join(_SUFFIXES)} file. {_ADVICE}")
    return found


def _similar(path: Path) -> str:
    """Names beside a missing path that it may have meant."""
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=2)
    return f" (did you mean {' or '.join(str(path.parent / x) for x in close)}?)" if close else ""


def _text(path: Path) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {_ADVICE}") from None
    if not text.strip():
        raise DataError(f"{path} is empty. {_ADVICE}")
    zero = text.find(b"\0")
    if zero >= 0:
        raise DataError(f"{path} is no text: byte {zero:,} is zero. {_ADVICE}")
    return text
