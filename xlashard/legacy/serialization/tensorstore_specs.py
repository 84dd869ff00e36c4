"""TensorStore specs and lists of them, errors that name the stored array, running of coroutines."""

import asyncio
import copy
import re
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xlashard._jax import array_serialization as door
from xlashard.core.array.placement.put import as_host_value
from xlashard.core.sharding import PartitionSpec
from xlashard.errors import ArgumentError, SerializationError, counted

type Spec = dict[str, Any]
"""TensorStore spec in JSON form, such as `get_tensorstore_spec` returns."""

_CHUNKED = ("zarr", "zarr3", "n5")
# Drivers without a key-value store: values in the spec, and stacks of other drivers.
_WITHOUT_STORE = {"array": "array", "stack": "layers"}
# Metadata of the writer, which the stored files contain and readers need not specify.
_OF_THE_WRITER = ("compressor", "chunks", "codecs", "chunk_grid")
_SHOWN = 4
# Start of the specs, C++ source lines and error codes in a message of TensorStore.
_FOR_MACHINES = re.compile(r" \[(?=\w+( \w+)?=')")


def get_tensorstore_spec(
    ckpt_path: str | PathLike[str],
    ocdbt: bool = False,
    process_idx: int | None = None,
    arr: Any = None,
    driver: str = "zarr",
) -> Spec:
    """Return the TensorStore spec of an array in a folder of zarr files.

    Args:
        ckpt_path: The folder, also `gs://bucket/...` and `s3://bucket/...`.
        ocdbt: True for one OCDBT database per folder instead of a folder per array.
        process_idx: Store the array in a subfolder of this process.
        arr: An array whose metadata are added to the spec.
        driver: The TensorStore driver.

    Returns:
        The spec, which may be modified.

    Example:
        >>> get_tensorstore_spec("/checkpoints/step_100/params.w")["kvstore"]["path"]
        '/checkpoints/step_100/params.w'
    """
    return door.get_tensorstore_spec(
        ckpt_path, ocdbt=ocdbt, process_idx=process_idx, arr=arr, driver=driver
    )


def get_metadata(arr: Any) -> dict[str, Any]:
    """Return the zarr metadata of an array: shape, dtype, chunks and compressor.

    Each shard is one chunk, so processes never write to the same file.

    Args:
        arr: An Array, an array of JAX or of NumPy.

    Returns:
        The metadata. `dtype` is a NumPy type string such as `'<f4'`, or the name of an extension
        type such as `'bfloat16'`.

    Example:
        >>> import numpy as np
        >>> get_metadata(np.zeros((8, 2), np.float32))["dtype"]
        '<f4'
    """
    value = arr if isinstance(arr, jax.Array) else as_host_value(arr, lambda: "arr").value
    dtype = np.dtype(value.dtype)
    return {
        **door.make_metadata(value, "zarr"),
        # Programs that open the files themselves have specs that name the compressor of then.
        "compressor": {"id": "gzip"},
        "dtype": dtype.str if dtype.isbuiltin == 1 else dtype.name,
    }


def spec_to_write(user_spec: Any, x: Any) -> Spec:
    """Return a copy of a spec with the metadata of an array, unless it has metadata."""
    spec = as_spec(user_spec)
    inner = _innermost(spec)
    if door.spec_has_metadata(spec) or not is_chunked(spec):
        return spec
    driver = inner.get("driver") or "zarr"
    metadata = get_metadata(x) if driver == "zarr" else door.make_metadata(x, driver)
    if "dtype" in inner:
        metadata.pop("dtype", None)
    inner["metadata"] = metadata
    return spec


def spec_to_read(user_spec: Any) -> Spec:
    """Return a copy of a spec for reading, without the writer's chunks and compressor.

    Missing chunks are errors in it, where TensorStore would read zeros.
    """
    spec = as_spec(user_spec)
    for inner in _stored_parts(spec):
        if inner.get("driver") in _CHUNKED:
            inner.setdefault("fill_missing_data_reads", False)
        if isinstance(inner.get("metadata"), Mapping):
            kept = {k: v for k, v in inner["metadata"].items() if k not in _OF_THE_WRITER}
            inner["metadata"] = kept
    return spec


def filling(spec: Spec) -> Spec:
    """Return a copy of a spec in which missing chunks are read as the stored fill value."""
    out = copy.deepcopy(spec)
    for inner in _stored_parts(out):
        if inner.get("driver") not in _WITHOUT_STORE:
            inner["fill_missing_data_reads"] = True
    return out


def as_spec(user_spec: Any) -> Spec:
    """Return a copy of a spec in JSON form.

    Raises:
        ArgumentError: The argument is not a TensorStore spec.
    """
    if isinstance(user_spec, door.tensorstore.Spec):
        user_spec = user_spec.to_json()
    if not isinstance(user_spec, Mapping) or not _has_store(user_spec):
        shown = (
            f"a dict with keys {sorted(user_spec)}"
            if isinstance(user_spec, Mapping)
            else repr(user_spec)
        )
        raise ArgumentError(
            f"invalid TensorStore spec: expected a dict with a kvstore, got {shown}; write "
            "get_tensorstore_spec('/checkpoints/step_100/w')"
        )
    return copy.deepcopy(dict(user_spec))


def is_chunked(spec: Spec) -> bool:
    """Return whether a spec stores an array in chunks of its own layout."""
    return _innermost(spec).get("driver") not in _WITHOUT_STORE


def _has_store(spec: Mapping[str, Any]) -> bool:
    """Return whether a spec names a store, or holds the values or the layers itself."""
    values = _WITHOUT_STORE.get(spec.get("driver", ""))
    return "kvstore" in spec or "base" in spec or (values is not None and values in spec)


def _innermost(spec: Spec) -> Spec:
    """Return the spec of the driver that stores, below drivers such as `cast`."""
    while isinstance(spec.get("base"), dict):
        spec = spec["base"]
    return spec


def _stored_parts(spec: Spec) -> Iterator[Spec]:
    """Iterate over the specs that store, one for each layer of a stack."""
    inner = _innermost(spec)
    if inner.get("driver") != "stack":
        yield inner
        return
    for layer in inner["layers"]:
        if isinstance(layer, dict):
            yield from _stored_parts(layer)


def stored_at(user_spec: Any) -> str:
    """Return the place where a spec stores an array, such as the path of its folder."""
    inner = _innermost(as_spec(user_spec))
    if "kvstore" not in inner:
        return f"the {inner.get('driver')} in the spec"
    return _joined(_store_text(inner["kvstore"]), inner.get("path", ""))


def _store_text(store: Any) -> str:
    if not isinstance(store, Mapping):
        return str(store)
    path = str(store.get("path", ""))
    match store.get("driver"):
        case "file":
            return path
        case "gcs":
            return f"gs://{store.get('bucket')}/{path}"
        case "s3":
            return f"s3://{store.get('bucket')}/{path}"
    if "base" in store:
        return _joined(_store_text(store["base"]), path)
    return f"{store.get('driver')}://{path}"


def _joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name.lstrip('/')}" if name else folder.rstrip("/") or folder


def read_error(error: Exception, user_spec: Any) -> SerializationError:
    """Return the error for an array that TensorStore cannot read.

    Args:
        error: The error of TensorStore.
        user_spec: The spec.
    """
    where, text = stored_at(user_spec), reason(error)
    if text.startswith("NOT_FOUND") and "etadata" in text:
        return SerializationError(f"no array at {where!r}{_siblings(where)}", stored_at=where)
    if text.startswith("NOT_FOUND"):
        return SerializationError(
            f"the array at {where!r} is incomplete: {text.removeprefix('NOT_FOUND: ')}. Its "
            "writing was interrupted, or files were not copied: read another checkpoint",
            stored_at=where,
        )
    return SerializationError(f"the array at {where!r} cannot be read: {text}", stored_at=where)


def write_error(error: Exception, user_spec: Any) -> SerializationError:
    """Return the error for an array that TensorStore cannot write."""
    where, text = stored_at(user_spec), reason(error)
    if text.startswith("FAILED_PRECONDITION") and "but received" in text:
        text += ". Another array is stored at this path: use a new folder for each checkpoint"
    return SerializationError(f"the array at {where!r} cannot be written: {text}", stored_at=where)


def reason(error: BaseException) -> str:
    """Return an error's text without specs, C++ source lines and codes."""
    text = str(error) or type(error).__name__
    return _FOR_MACHINES.split(text)[0].replace("\\x00", "/")


def _siblings(where: str) -> str:
    """Return a text that lists the contents of the closest existing folder of a path."""
    if "://" in where:
        return ""
    for folder in Path(where).parents:
        if folder.is_dir() and folder != folder.parent:
            names = sorted(entry.name for entry in folder.iterdir())[: _SHOWN + 1]
            more = ", ..." if len(names) > _SHOWN else ""
            contents = ", ".join(map(repr, names[:_SHOWN])) + more if names else "nothing"
            return f"; {str(folder)!r} contains {contents}"
    return ""


def as_list(value: Any, name: str, count: int | None = None) -> list[Any]:
    """Return an argument as a list, after checking its type and length.

    Raises:
        ArgumentError: The argument is not a list or tuple, or has the wrong length.
    """
    if not isinstance(value, list | tuple) or isinstance(value, PartitionSpec):
        raise ArgumentError(
            f"{name} of type {type(value).__name__} is invalid: expected a list with one entry per "
            f"array; for a tree write jax.tree.leaves({name}), and treedef.unflatten(...) of the "
            "result"
        )
    if count is not None and len(value) != count:
        raise ArgumentError(
            f"{name} has {counted(len(value), 'entry', 'entries')} for "
            f"{counted(count, 'tensorstore_spec')}: pass one per array"
        )
    return list(value)


def run_coroutine[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion and return its result, blocking this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # This thread's loop is blocked, so run the coroutine in the loop of another thread.
    with ThreadPoolExecutor(1, thread_name_prefix="serialization") as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def gather_or_cancel[T](tasks: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of tasks in order; on an error, cancel the others and raise it."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return await asyncio.gather(*running)
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
