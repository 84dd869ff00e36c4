"""Files of safetensors: a header of JSON after its length, then the arrays, row by row.

An array is read in parts, each by its bytes. Several files with an index, as of large models, are
read as one.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from xlashard.errors import ArgumentError, counted
from xlashard.support.lazily import dataclass

type Box = tuple[tuple[int, int], ...]
"""Start and end of a part of an array, along each dimension."""

_DTYPES = {
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(bool),
    "C64": np.dtype("c8"),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The length of the header, before it.
_PREFIX = 8
_LONGEST_HEADER = 100_000_000
# Bytes between two rows of a part that are read with them: storage reads whole pages.
_GAP = 4096
_READ_AT_ONCE = 2**20
INDEX_ENDING = ".safetensors.index.json"
ENDING = ".safetensors"


@dataclass(frozen=True)
class StoredArray:
    """An array in a file.

    Attributes:
        file: The file.
        offset: Position of its first byte.
        shape: Its shape.
        dtype: Its dtype.
    """

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, box: Box) -> np.ndarray:
        """Return a part of the array, read by its bytes.

        Args:
            box: The part.
        """
        part = np.empty([end - start for start, end in box], self.dtype)
        with open(self.file, "rb", buffering=0) as file:
            for offset, piece in self._find_runs(box, part):
                _read_at(file.fileno(), self.offset + offset, piece)
        return part

    def write(self, box: Box, part: np.ndarray) -> None:
        """Write a part of the array into its file, which exists.

        Args:
            box: The part.
            part: Its elements.
        """
        with open(self.file, "r+b", buffering=0) as file:
            for offset, piece in self._find_runs(box, np.ascontiguousarray(part), may_join=False):
                left = memoryview(piece.reshape(-1).view(np.uint8))
                file.seek(self.offset + offset)
                while left:
                    left = left[file.write(left) :]

    def _find_runs(
        self, box: Box, part: np.ndarray, *, may_join: bool = True
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield offset and elements of pieces of a part that are contiguous in the file.

        Rows with small gaps between them are yielded together, as a piece of its own, from which
        the part is copied after each step.
        """
        if 0 in part.shape:
            return
        dims = range(len(self.shape))
        cut = [dim for dim in dims if box[dim] != (0, self.shape[dim])]
        last = cut[-1] if cut else 0
        strides = [math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize for dim in dims]
        outer, inner = box[:last], box[last:]
        if not outer:
            yield (inner[0][0] * strides[0] if inner else 0), part
            return
        (start, end), row = inner[0], strides[last - 1]
        first = sum(low * stride for (low, _), stride in zip(outer, strides, strict=False))
        first += start * strides[last]
        gap = row - (end - start) * strides[last]
        step = max(1, _READ_AT_ONCE // row) if may_join and gap <= _GAP else 1
        *around, rows = part.shape[:last]
        for place in np.ndindex(*around):
            offset = first + sum(n * stride for n, stride in zip(place, strides, strict=False))
            for begin in range(0, rows, step):
                target = part[place][begin : begin + step]
                if step == 1:
                    yield offset + begin * row, target[0]
                    continue
                # From the first element of the first row to the last one of the last row.
                size = (len(target) - 1) * row + (end - start) * strides[last]
                joined = np.empty(len(target) * row, np.uint8)
                yield offset + begin * row, joined[:size]
                rows_of = joined.reshape(len(target), row)[:, : row - gap]
                target[...] = np.ascontiguousarray(rows_of).view(self.dtype).reshape(target.shape)


def _read_at(descriptor: int, offset: int, piece: np.ndarray) -> None:
    left = memoryview(piece.reshape(-1).view(np.uint8))
    while left:
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise ArgumentError(  # no-catalogue: needs a file that shrinks while it is read
                f"a file of safetensors ended {counted(len(left), 'byte')} early: it was "
                "truncated while it was read, so copy it again"
            )
        left, offset = left[count:], offset + count


@dataclass(frozen=True)
class SafetensorsFiles:
    """Arrays of one file, or of several with an index.

    Attributes:
        arrays: The arrays, by name.
        metadata: Texts that the first file has beside them.
    """

    arrays: Mapping[str, StoredArray]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: str | os.PathLike[str], what: str) -> Self:
        """Read the headers.

        Args:
            path: A file, an index, or a folder with an index or files.
            what: The argument, for errors.

        Raises:
            ArgumentError: Files are missing, or a header is invalid.
        """
        arrays: dict[str, StoredArray] = {}
        metadata: dict[str, str] = {}
        for file in _list_files(Path(path), what):
            stored, texts = _read_header(file, what)
            if twice := sorted(arrays.keys() & stored.keys()):
                raise ArgumentError(
                    f"{what} has the array {twice[0]!r} in {arrays[twice[0]].file} and in {file}: "
                    "pass the index (*.safetensors.index.json), or one of the files"
                )
            arrays |= stored
            metadata = metadata or texts
        return cls(arrays, metadata)


def _list_files(path: Path, what: str) -> list[Path]:
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX_ENDING}"))
        if len(indices) == 1:
            path = indices[0]
        elif files := sorted(path.glob(f"*{ENDING}")):
            return files
        else:
            raise ArgumentError(
                f"{what} is the folder {path}, which has no file *.safetensors: write the path of "
                "a file, or of a folder with some"
            )
    if not path.is_file():
        raise ArgumentError(f"{what} is {path}, which does not exist: write the path of a file")
    if not path.name.endswith(INDEX_ENDING):
        return [path]
    try:
        names = {str(name) for name in json.loads(path.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ArgumentError(
            f"{what} is {path}, which is no index: expected JSON with the file of each array under "
            "weight_map. Pass the folder's *.safetensors files without it"
        ) from None
    files = [path.parent / name for name in sorted(names)]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise ArgumentError(
            f"{what} is {path}, which names {counted(len(missing), 'file')} that "
            f"{'is' if len(missing) == 1 else 'are'} missing, such as {missing[0]}: download it"
        )
    return files


def _read_header(file: Path, what: str) -> tuple[dict[str, StoredArray], dict[str, str]]:
    """Return the arrays of a file and its metadata; the file may be a stranger's."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(_PREFIX), "little")
        text = opened.read(length) if length <= min(size, _LONGEST_HEADER) else b""
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        arrays = {
            name: _read_entry(file, _PREFIX + length, entry, size) for name, entry in header.items()
        }
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ArgumentError(
            f"{what}: {file} is no file of safetensors, or was cut off ({error}): expected the "
            "length of a JSON header in 8 bytes, the header, and the arrays. Download it again"
        ) from None
    return arrays, {str(key): str(value) for key, value in metadata.items()}


def _read_entry(file: Path, start: int, entry: Mapping[str, Any], size: int) -> StoredArray:
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(map(int, entry["shape"])), _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"the dtype {entry['dtype']} is unknown")
    if min((begin, *shape)) < 0 or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for the shape {shape}")
    if start + end > size:
        raise ValueError(f"it has {size} bytes, and needs {start + end}")
    return StoredArray(file, start + begin, shape, dtype)


def create_file(
    file: Path, types: Mapping[str, tuple[Sequence[int], np.dtype]], metadata: Mapping[str, str]
) -> dict[str, StoredArray]:
    """Create a file of arrays that are written afterwards, and return the arrays.

    Args:
        file: The file.
        types: Shape and dtype by name.
        metadata: Texts beside them.

    Raises:
        ArgumentError: The format has no such dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    # The largest items first, so that each array is aligned.
    for name, (shape, dtype) in sorted(types.items(), key=lambda t: (-t[1][1].itemsize, t[0])):
        if dtype not in _NAMES:
            raise ArgumentError(
                f"{name} is {dtype.name}, which safetensors cannot hold: expected one of "
                f"{', '.join(sorted(d.name for d in _NAMES))}. Write a folder of orbax instead"
            )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "xb") as opened:
        opened.write(len(text).to_bytes(_PREFIX, "little") + text)
        opened.truncate(_PREFIX + len(text) + end)
    return _read_header(file, "the file")[0]
