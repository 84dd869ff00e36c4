"""Reading arrays from TensorStore: each process reads each of its distinct shards once."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xlashard import Array
from xlashard._jax.array_serialization import (
    CHUNK_LAYOUT,
    TS_CONTEXT,
    LimitInFlightBytes,
    estimate_read_memory_footprint,
    tensorstore,
)
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard._jax.runtime.transfer import aligned_empty
from xlashard.array.core.array import wrap
from xlashard.array.placement.put import gather_pieces, put_on
from xlashard.array.placement.target import ResolvedSharding, at_path, resolve_sharding
from xlashard.array.reshard.execute import relayout
from xlashard.errors import ArgumentError, GeometryError, SerializationError, XlashardError
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.modes.config_flags import ArrayMode, current_array_mode
from xlashard.legacy.serialization.deserialize_args import (
    ArrayRequest,
    read_many,
    read_one,
)
from xlashard.legacy.serialization.tensorstore_specs import (
    filling,
    gather_or_cancel,
    is_chunked,
    read_error,
    run_coroutine,
)
from xlashard.sharding import NamedSharding


async def async_deserialize(*args: Any, **kwargs: Any) -> Array:
    """Read one array, with any sharding and dtype; see `run_deserialization`.

    Signatures: `(sharding, tensorstore_spec, ...)` and, until 2022, `(mesh, mesh_axes,
    tensorstore_spec, ...)`, followed by `global_shape`, `dtype`, `byte_limiter` (limits the bytes
    in flight), `context`, `chunk_layout` and `assume_metadata`.

    Returns:
        An Array; with `jax_array` off a GlobalDeviceArray.

    Raises:
        SerializationError: The array does not exist, is incomplete, or cannot be read.
        PlacementError: The sharding does not fit the shape.
        ArgumentError: The arguments match neither signature.

    Example:
        >>> import asyncio, tempfile, jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P
        >>> from xlashard.legacy.serialization import (
        ...     async_deserialize, async_serialize, get_tensorstore_spec,
        ... )
        >>> spec = get_tensorstore_spec(tempfile.mkdtemp() + "/w")
        >>> asyncio.run(async_serialize(np.arange(4, dtype=np.int32), spec))
        >>> place = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P("x"))
        >>> asyncio.run(async_deserialize(place, spec, global_shape=(6,)))
        Array([0, 1, 2, 3, 0, 0], dtype=int32)
    """
    with short_tracebacks:
        request, byte_limiter, opening = read_one(args, kwargs)
        return await _read(request, byte_limiter, opening, current_array_mode())


def run_deserialization(*args: Any, **kwargs: Any) -> list[Array]:
    """Read arrays concurrently.

    The mesh, spec, number of processes, dtype and shape may differ from those with which the
    arrays were written. All arguments are lists with one entry per array.

    Signatures: `(shardings, tensorstore_specs, ...)` and, until 2022, `(global_meshes, mesh_axes,
    tensorstore_specs, ...)`, followed by `global_shapes` (larger ones are padded with zeros,
    smaller ones crop), `dtypes`, and `concurrent_gb`: the limit of bytes in flight, in 10^9 bytes.

    Returns:
        Arrays; with `jax_array` off GlobalDeviceArrays.

    Raises:
        SerializationError: An array does not exist, is incomplete, or cannot be read.
        PlacementError: A sharding does not fit its shape.
        ArgumentError: The arguments match neither signature, or the lists differ in length.

    Example:
        >>> import tempfile, jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P
        >>> from xlashard.legacy import serialization
        >>> spec = serialization.get_tensorstore_spec(tempfile.mkdtemp() + "/w")
        >>> serialization.run_serialization([np.arange(4, dtype=np.int32)], [spec])
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
        >>> serialization.run_deserialization([NamedSharding(mesh, P("x"))], [spec])
        [Array([0, 1, 2, 3], dtype=int32)]
        >>> serialization.run_deserialization([mesh], [P("x")], [spec], dtypes=[np.float32])
        [Array([0., 1., 2., 3.], dtype=float32)]
    """
    with short_tracebacks:
        return deserialize_all("run_deserialization", args, kwargs)


def deserialize_all(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Array]:
    """Read arrays; `name` is the called function in errors. See `run_deserialization`."""
    requests, concurrent_bytes = read_many(name, args, kwargs)
    mode = current_array_mode()

    async def read_all() -> list[Array]:
        limiter = LimitInFlightBytes(concurrent_bytes)
        return await gather_or_cancel(_read(request, limiter, {}, mode) for request in requests)

    return run_coroutine(read_all())


async def _read(
    request: ArrayRequest, limiter: Any, opening: Mapping[str, Any], mode: ArrayMode
) -> Any:
    _check_place(request, mode)
    try:
        store = await _open(request, opening)
        shape = tuple(store.shape) if request.shape is None else request.shape
        if len(shape) != store.rank:
            raise SerializationError(
                f"the array at {request.stored_at!r} has shape {tuple(store.shape)}, but "
                f"global_shape={shape}: pass a shape of the same rank",
                stored_at=request.stored_at,
            )
        stored = store.dtype.numpy_dtype
        dtype = (
            np.dtype(jax.dtypes.canonicalize_dtype(stored))
            if request.dtype is None
            else request.dtype
        )
        target = _target(shape, request)
        parts = await gather_or_cancel(
            _read_piece(store, target, numbers, dtype, limiter) for numbers in target.holders
        )
    except XlashardError:
        raise
    except ValueError as error:
        raise read_error(error, request.spec) from None
    buffers = {number: buffer for part in parts for number, buffer in part.items()}
    ordered = [buffers[number] for number in range(len(target.devices))]
    handle = relayout(gather_pieces(ordered, dtype, target), request.layout, target)
    return _in_mode(wrap(handle, target.sharding), mode)


async def _open(request: ArrayRequest, opening: Mapping[str, Any]) -> Any:
    async def opened(spec: dict[str, Any]) -> Any:
        options = {"context": TS_CONTEXT, "chunk_layout": CHUNK_LAYOUT, **opening}
        if not is_chunked(spec):
            # TensorStore rejects a chunk layout for layers or values, which have their own.
            del options["chunk_layout"]
        return await tensorstore.open(tensorstore.Spec(spec), open=True, **options)

    store = await opened(request.spec)
    # The metadata have a fill value, so missing chunks are valid: other writers omit zeros.
    return store if store.fill_value is None else await opened(filling(request.spec))


def _target(shape: tuple[int, ...], request: ArrayRequest) -> ResolvedSharding:
    try:
        return resolve_sharding(shape, request.sharding)
    except GeometryError as error:
        raise at_path(error, f"the array at {request.stored_at!r}") from None


async def _read_piece(
    store: Any, target: ResolvedSharding, numbers: list[int], dtype: np.dtype, limiter: Any
) -> dict[int, Any]:
    """Read one shard, and return a buffer (or host value) for each device number."""
    index = target.indices[numbers[0]]
    requested = tensorstore.IndexTransform(input_shape=target.shape)[index].domain
    stored = store.domain.intersect(requested)
    if store.chunk_layout.rank != store.rank:  # a stack, whose layers have layouts of their own
        size = stored.size * store.dtype.numpy_dtype.itemsize
    else:
        size = estimate_read_memory_footprint(store, stored)
    if limiter is not None:
        await limiter.wait_for_bytes(size)
    try:
        out = aligned_empty(target.shard_shape, store.dtype.numpy_dtype)
        if stored != requested:
            out[...] = np.zeros((), out.dtype)
        at = tensorstore.d[:].translate_to[requested.origin]
        await tensorstore.array(out)[at][stored].write(store[stored])
        return _put(out.astype(dtype, copy=False), target, numbers)
    finally:
        if limiter is not None:
            await limiter.release_bytes(size)


def _put(value: np.ndarray, target: ResolvedSharding, numbers: list[int]) -> dict[int, Any]:
    if target.on_host:
        return dict.fromkeys(numbers, value)  # becomes the buffers without a copy
    kind = target.sharding.memory_kind
    return {n: put_on(target.devices[n], value, memory_kind=kind, alias=True) for n in numbers}


def _check_place(request: ArrayRequest, mode: ArrayMode) -> None:
    """Reject a sharding that the array mode does not allow, before reading.

    Raises:
        ArgumentError: `jax_array` is off, and the sharding is not a `NamedSharding`.
    """
    if not mode.jax_array and not isinstance(request.sharding, NamedSharding):
        raise ArgumentError(
            f"the array at {request.stored_at!r} has sharding {request.sharding}, but with "
            "jax_array off it becomes a GlobalDeviceArray, which requires mesh axes: pass "
            "NamedSharding(mesh, P(...))"
        )


def _in_mode(x: Array, mode: ArrayMode) -> Any:
    """Return an Array in the class of the array mode: JAX's own, or GlobalDeviceArray."""
    return x.to_jax() if mode.jax_array else GlobalDeviceArray.from_array(x)
