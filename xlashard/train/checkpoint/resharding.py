"""Checkpoints copied to other shardings or formats, in little memory.

An array is copied in blocks of whole chunks of the destination. A block is read chunk by chunk of
the source, so that memory holds a block, one chunk of the source, and what TensorStore makes of
them.
"""

import base64
import itertools
import json
import math
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tensorstore

from xlashard.core.pjit.shardings.path_rules import PathRules
from xlashard.core.sharding import AbstractMesh, NamedSharding, PartitionSpec
from xlashard.errors import ArgumentError, counted
from xlashard.geometry.strides import divisors
from xlashard.pods.multihost.safetensors_files import (
    ENDING,
    INDEX_ENDING,
    Box,
    SafetensorsFiles,
    StoredArray,
    create_file,
)
from xlashard.support.documents import sync_path
from xlashard.support.formatting import in_bytes

type Format = Literal["orbax", "safetensors"]

_TREE, _SHARDINGS, _ARRAYS = "_METADATA", "_sharding", "array_metadatas"
_MANIFEST = "manifest.ocdbt"
# Shares of the limit: of a block, of a chunk that is written, and the least number of chunks of
# the source. TensorStore holds a chunk compressed, decoded, and as the part that was requested; its
# threads and code take a few MiB more.
_BLOCK, _WRITTEN, _READ = 1 / 8, 1 / 16, 8
_LEAST_LIMIT = 16 * 2**20
# Array types of orbax; others, such as strings, are in files that are copied.
_ARRAY_TYPES = ("jax.Array", "np.ndarray", "scalar")


@dataclass(frozen=True)
class _TensorstoreArray:
    """Array in a checkpoint of orbax.

    Attributes:
        store: The open array.
    """

    store: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.store.dtype.numpy_dtype

    @property
    def chunk(self) -> tuple[int, ...]:
        return tuple(self.store.chunk_layout.read_chunk.shape or ())  # None for rank 0

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize

    def read(self, box: Box) -> np.ndarray:
        """Return a part, read one chunk after the other."""
        part = np.empty([end - start for start, end in box], self.dtype)
        for piece in _split(box, self.chunk):
            inside = zip(piece, box, strict=True)
            target = tuple(slice(start - low, end - low) for (start, end), (low, _) in inside)
            part[target] = self.store[_index(piece)].read().result()
        return part

    def write(self, box: Box, part: np.ndarray) -> None:
        """Write a part of whole chunks, one after the other."""
        for piece in _split(box, self.chunk):
            inside = zip(piece, box, strict=True)
            source = tuple(slice(start - low, end - low) for (start, end), (low, _) in inside)
            self.store[_index(piece)].write(part[source]).result()


type SourceArray = _TensorstoreArray | StoredArray
"""Array of a checkpoint, which is read in parts."""


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def _split(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """Yield the parts of a box that lie in one chunk of a grid each."""
    edges = []
    for (start, end), size in zip(box, chunk, strict=True):
        inner = range((start // size + 1) * size, end, size)
        edges.append(list(itertools.pairwise([start, *inner, end])) if end > start else [])
    yield from itertools.product(*edges)


def split_blocks(shape: Sequence[int], chunk: Sequence[int], most: int) -> Iterator[Box]:
    """Yield blocks of whole chunks that cover an array.

    Args:
        shape: Shape of the array.
        chunk: Shape of a chunk.
        most: Number of elements of a block, if a chunk has no more.

    Example:
        >>> list(split_blocks((4, 4), (1, 2), 8))
        [((0, 2), (0, 4)), ((2, 4), (0, 4))]
    """
    block = list(chunk)
    for dim in reversed(range(len(shape))):
        # Whole rows first: they are contiguous in files of safetensors.
        rest = max(1, math.prod(block) // block[dim])
        block[dim] = min(max(most // rest // chunk[dim], 1) * chunk[dim], shape[dim])
        if block[dim] < shape[dim]:
            break
    yield from _split(tuple((0, size) for size in shape), [max(1, size) for size in block])


def choose_chunk(shard: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the largest chunk that divides a shard, with whole rows if possible.

    Args:
        shard: Shape of the shard.
        most: Largest number of elements.

    Example:
        >>> choose_chunk((6, 4), 8)
        (2, 4)
    """
    chunk = [max(1, size) for size in shard]
    for dim, size in enumerate(chunk):
        rest = math.prod(chunk) // size
        fitting = [part for part in divisors(size) if part * rest <= most]
        chunk[dim] = max(fitting, default=1)
    return tuple(chunk)


@dataclass(frozen=True)
class CheckpointSource:
    """Checkpoint that is copied.

    Attributes:
        path: Its path.
        format: Its format.
        arrays: Its arrays, by name.
        metadata: Texts of a file of safetensors.
        largest_chunk: Bytes of the largest chunk that has to be read whole; 0 if none has to.
    """

    path: Path
    format: Format
    arrays: Mapping[str, SourceArray]
    metadata: Mapping[str, str] = field(default_factory=dict)
    largest_chunk: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all arrays."""
        arrays = self.arrays.values()
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def open_source(path: Path) -> CheckpointSource:
    """Open a checkpoint of orbax, or files of safetensors.

    Args:
        path: A folder of orbax with `_METADATA`, or a file or folder of safetensors.

    Raises:
        ArgumentError: It is missing, of another format or damaged.
    """
    if not path.exists():
        raise ArgumentError(f"SRC is {path}, which does not exist: write the path of a checkpoint")
    if not (path / _TREE).is_file():
        inside = sorted(file.parent for file in path.glob(f"*/{_TREE}")) if path.is_dir() else []
        if inside:
            raise ArgumentError(
                f"SRC is {path}, a folder around {counted(len(inside), 'checkpoint')} of orbax: "
                f"write {inside[0]}"
            )
        files = SafetensorsFiles.open(path, "SRC")
        return CheckpointSource(path, "safetensors", files.arrays, files.metadata)
    try:
        tree = json.loads((path / _TREE).read_bytes())
        names = [
            ".".join(str(key["key"]) for key in entry["key_metadata"])
            for entry in tree["tree_metadata"].values()
            if entry["value_metadata"]["value_type"] in _ARRAY_TYPES
        ]
        is_zarr3 = bool(tree.get("use_zarr3"))
        arrays = {name: _open_array(path, name, is_zarr3) for name in names}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = str(error).partition(" [")[0]
        raise ArgumentError(
            f"SRC is {path}, whose {_TREE} or arrays can't be read ({text}): expected a finished "
            "checkpoint of orbax"
        ) from None
    largest = max((array.chunk_bytes for array in arrays.values()), default=0)
    return CheckpointSource(path, "orbax", arrays, largest_chunk=largest)


# Without a cache, and one transfer at a time: more would be held in memory.
_CONTEXT = tensorstore.Context(
    {
        "cache_pool": {"total_bytes_limit": 0},
        "data_copy_concurrency": {"limit": 1},
        "file_io_concurrency": {"limit": 1},
    }
)


def _open_array(
    folder: Path, name: str, is_zarr3: bool, metadata: Mapping[str, Any] | None = None
) -> _TensorstoreArray:
    """Open an array of orbax, or create one of these metadata."""
    spec: dict[str, Any] = {"driver": "zarr3" if is_zarr3 else "zarr"}
    base = f"file://{folder.absolute()}/"
    is_joined = metadata is not None or (folder / _MANIFEST).exists()
    if is_joined:
        spec["kvstore"] = {"driver": "ocdbt", "base": base, "path": name}
    else:
        spec["kvstore"] = f"{base}{name}/"
    if metadata is None:
        return _TensorstoreArray(tensorstore.open(spec, open=True, context=_CONTEXT).result())
    spec |= metadata
    return _TensorstoreArray(tensorstore.open(spec, create=True, context=_CONTEXT).result())


@dataclass(frozen=True)
class CheckpointCopy:
    """Copy of a checkpoint.

    Attributes:
        source: The checkpoint.
        destination: Path of the copy.
        format: Its format.
        limit: Bytes of memory that copying may take.
        mesh: Mesh of the shardings; None for safetensors.
        rules: Rules for the shardings.
        file_bytes: Bytes of a file of safetensors in a folder.
    """

    source: CheckpointSource
    destination: Path
    format: Format
    limit: int
    mesh: AbstractMesh | None
    rules: PathRules | None
    file_bytes: int

    def check(self) -> None:
        """Check what would stop the copy, before anything is written.

        Raises:
            ArgumentError: The destination exists, or the memory is too little.
        """
        path, chunk = self.destination, self.source.largest_chunk
        needed = max(_READ * chunk, _LEAST_LIMIT)
        if path.exists():
            raise ArgumentError(f"DST is {path}, which exists: write another path, or remove it")
        if not path.absolute().parent.is_dir():
            raise ArgumentError(
                f"DST is {path}, but {path.absolute().parent} is no folder: make it"
            )
        if needed > self.limit:
            raise ArgumentError(
                f"--memory-limit {in_bytes(self.limit)} is too little to copy SRC, whose chunks, "
                f"of up to {in_bytes(chunk)}, are read whole: write --memory-limit "
                f"{-(-needed // 2**20)}MiB"
            )

    def find_shardings(self) -> dict[str, NamedSharding]:
        """Return the sharding of each array; one that no rule matches is whole."""
        assert self.mesh is not None
        named, whole = self.find_named_shardings(), NamedSharding(self.mesh, PartitionSpec())
        return {name: named.get(name, whole) for name in self.source.arrays}

    def find_named_shardings(self) -> dict[str, Any]:
        """Return the sharding of each array that a rule matches.

        Raises:
            ArgumentError: A rule matches nothing.
            ResourceError: A rule does not fit the mesh or an array.
        """
        assert self.rules is not None
        arrays = self.source.arrays.items()
        types = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays}
        return dict(self.rules.find_shardings(types, self.mesh, "array"))

    def run(self) -> None:
        """Copy the checkpoint into a folder or file of another name, and rename that."""
        target = self.destination.absolute()
        staging = target.with_name(f".{target.name}.resharding-{secrets.token_hex(4)}")
        try:
            if self.format == "orbax":
                self._write_orbax(staging)
            elif target.name.endswith(ENDING):
                self._write_file(staging, self.source.arrays)
            else:
                self._write_files(staging)
            for path in [staging, *staging.rglob("*")]:
                sync_path(path)
            # Of a folder that was made meanwhile, only an empty one is replaced.
            staging.rename(target)
            sync_path(target.parent)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            with suppress(OSError):
                staging.unlink(missing_ok=True)
            raise

    def _copy(self, name: str, target: Any, chunk: Sequence[int]) -> None:
        source = self.source.arrays[name]
        most = max(1, int(self.limit * _BLOCK) // source.dtype.itemsize)
        for box in split_blocks(source.shape, chunk, most):
            target.write(box, source.read(box))

    def _write_file(self, file: Path, arrays: Mapping[str, SourceArray]) -> None:
        types = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        created: dict[str, StoredArray] = create_file(
            file, types, self.source.metadata or {"format": "flax"}
        )
        for name, target in created.items():
            self._copy(name, target, (1,) * len(target.shape))

    def _write_files(self, folder: Path) -> None:
        """Write several files and their index, named as those of large models are."""
        folder.mkdir()
        parts: list[dict[str, SourceArray]] = [{}]
        filled = 0
        for name, array in self.source.arrays.items():
            nbytes = math.prod(array.shape) * array.dtype.itemsize
            if parts[-1] and filled + nbytes > self.file_bytes:
                parts.append({})
                filled = 0
            parts[-1][name] = array
            filled += nbytes
        places = {}
        for number, part in enumerate(parts, 1):
            file = f"model-{number:05d}-of-{len(parts):05d}{ENDING}"
            self._write_file(folder / file, part)
            places |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": self.source.total_bytes}, "weight_map": places}
        (folder / f"model{INDEX_ENDING}").write_text(json.dumps(index, indent=2))

    def _write_orbax(self, folder: Path) -> None:
        """Write a folder of orbax: that of the source with other chunks, or a flat dict."""
        shardings = self.find_shardings()
        _copy_other_files(self.source, folder)
        chunks: dict[str, tuple[int, ...]] = {}
        most = max(1, int(self.limit * _WRITTEN))
        for name, source in self.source.arrays.items():
            shard = shardings[name].shard_shape(source.shape)
            chunks[name] = choose_chunk(shard, max(1, most // source.dtype.itemsize))
            metadata = {
                "metadata": {
                    "shape": list(source.shape),
                    "chunks": list(chunks[name]),
                    "compressor": {"id": "zstd", "level": 1},
                },
                "dtype": tensorstore.dtype(source.dtype).name,
                "store_data_equal_to_fill_value": True,
            }
            self._copy(name, _open_array(folder, name, False, metadata), chunks[name])
        _write_descriptions(self.source, folder, shardings, chunks)


def _copy_other_files(source: CheckpointSource, folder: Path) -> None:
    """Create a folder with the files of a checkpoint of orbax that hold no arrays."""
    folder.mkdir()
    if source.format != "orbax":
        return
    for path in source.path.iterdir():
        is_array = path.name in source.arrays or re.match(r"d$|manifest\.ocdbt$|ocdbt\.", path.name)
        if not is_array and path.name not in (_TREE, _SHARDINGS):
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)


def _write_descriptions(
    source: CheckpointSource,
    folder: Path,
    shardings: Mapping[str, NamedSharding],
    chunks: Mapping[str, tuple[int, ...]],
) -> None:
    """Write the files in which orbax describes the tree, its shardings and its chunks."""
    tree: dict[str, Any]
    if source.format == "orbax":
        tree = json.loads((source.path / _TREE).read_bytes())
        tree["use_zarr3"] = False
    else:
        tree = {"tree_metadata": {repr((name,)): _describe_entry(name) for name in source.arrays}}
    tree["use_ocdbt"] = True
    for entry in tree["tree_metadata"].values():
        name = ".".join(str(key["key"]) for key in entry["key_metadata"])
        if name in chunks and entry["value_metadata"]["value_type"] == "jax.Array":
            shard = shardings[name].shard_shape(source.arrays[name].shape)
            entry["value_metadata"]["write_shape"] = list(shard)
    (folder / _TREE).write_text(json.dumps(tree))
    encoded = {
        base64.urlsafe_b64encode(name.encode()).decode(): _describe_sharding(sharding)
        for name, sharding in shardings.items()
    }
    (folder / _SHARDINGS).write_text(json.dumps(encoded))
    for file in folder.glob(f"{_ARRAYS}/*"):
        arrays = json.loads(file.read_bytes())
        for each in arrays["array_metadatas"]:
            described = each["array_metadata"]
            name = described["param_name"]
            described["write_shape"] = list(shardings[name].shard_shape(source.arrays[name].shape))
            described["chunk_shape"] = list(chunks[name])
        file.write_text(json.dumps(arrays))


def _describe_entry(name: str) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": name, "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }


def _describe_sharding(sharding: NamedSharding) -> str:
    """Return a sharding as orbax stores it, for a restore that requests no other."""
    mesh = sharding.mesh
    devices = np.array([{"id": number} for number in range(mesh.size)], object)
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.axis_sizes),
            "axis_names": list(mesh.axis_names),
            "axis_types": [str(kind) for kind in mesh.axis_types],
            "partition_spec": list(sharding.spec),
            "device_mesh": {"mesh": devices.reshape(mesh.axis_sizes).tolist()},
        }
    )
