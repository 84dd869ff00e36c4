"""Files to arrays: each process reads the pieces that its devices hold, each of them once."""

from collections.abc import Sequence
from typing import Any, overload

import jax
import numpy as np

from xlashard import Array
from xlashard._jax.serialization import (
    LimitInFlightBytes,
    estimate_read_memory_footprint,
    tensorstore,
)
from xlashard._jax.tracebacks import short_tracebacks
from xlashard._jax.transfer import aligned_empty
from xlashard.array.host_put import gather_pieces, put_on
from xlashard.array.moving import at_path, placed
from xlashard.array.placement import Places, places
from xlashard.array.reshard import relayout
from xlashard.errors import ArgumentError, GeometryError, SerializationError, XlashardError
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.modes.array_mode import ArrayMode, current_array_mode
from xlashard.legacy.serialization.deserialize_args import (
    ArrayRequest,
    OpenOptions,
    read_many,
    read_one,
)
from xlashard.legacy.serialization.event_loop import gather_or_cancel, run_coroutine
from xlashard.legacy.serialization.tensorstore_specs import filling, is_chunked, read_error
from xlashard.sharding import NamedSharding


@overload
async def async_deserialize(
    sharding: Any,
    tensorstore_spec: Any,
    global_shape: Sequence[int] | None = None,
    dtype: Any = None,
    byte_limiter: Any = None,
    context: Any = ...,
    chunk_layout: Any = ...,
    assume_metadata: bool = False,
) -> Array: ...
@overload
async def async_deserialize(
    mesh: Any,
    mesh_axes: Any,
    tensorstore_spec: Any,
    global_shape: Sequence[int] | None = None,
    dtype: Any = None,
    byte_limiter: Any = None,
    context: Any = ...,
) -> Array: ...
async def async_deserialize(*args: Any, **kwargs: Any) -> Array:
    """Reads one array, to whichever devices and in whichever dtype; see `run_deserialization`.

    Two forms: `(sharding, tensorstore_spec, ...)` and, as until 2022, `(mesh, mesh_axes,
    tensorstore_spec, ...)`. Then `global_shape`, `dtype`, `byte_limiter` (who is asked for memory
    before a piece is read), `context`, `chunk_layout`, `assume_metadata`.

    Returns:
        An Array; without `jax_array` a GlobalDeviceArray.

    Raises:
        SerializationError: There is nothing, or not all of it, or it can't be read.
        PlacementError: It can't be dealt out so.
        ArgumentError: Arguments of neither form.

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
        call = read_one(args, kwargs)
        return await _read(call.request, call.byte_limiter, call.opening, current_array_mode())


@overload
def run_deserialization(
    shardings: Sequence[Any],
    tensorstore_specs: Sequence[Any],
    global_shapes: Sequence[Any] | None = None,
    dtypes: Sequence[Any] | None = None,
    concurrent_gb: float = 32,
) -> list[Array]: ...
@overload
def run_deserialization(
    global_meshes: Sequence[Any],
    mesh_axes: Sequence[Any],
    tensorstore_specs: Sequence[Any],
    global_shapes: Sequence[Any] | None = None,
    dtypes: Sequence[Any] | None = None,
    concurrent_gb: float = 32,
) -> list[Array]: ...
def run_deserialization(*args: Any, **kwargs: Any) -> list[Array]:
    """Reads arrays, all at the same time.

    They may come to another mesh, spec or number of processes than they were written from, and
    in another dtype or shape. All arguments are lists, with one entry for each array.

    Two forms: `(shardings, tensorstore_specs, ...)` and, as until 2022, `(global_meshes,
    mesh_axes, tensorstore_specs, ...)`. Then `global_shapes` (what is stored beyond is left out,
    what is not stored is zero), `dtypes`, and `concurrent_gb`: into how much memory to read at a
    time, in units of 10^9 bytes.

    Returns:
        Arrays; without `jax_array` GlobalDeviceArrays.

    Raises:
        SerializationError: There is nothing, or not all of it, or it can't be read.
        PlacementError: An array can't be dealt out so.
        ArgumentError: Arguments of neither form, or of different lengths.

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
    """Reads arrays for a caller that is called `name`; see `run_deserialization`."""
    call = read_many(name, args, kwargs)
    mode = current_array_mode()

    async def read_all() -> list[Array]:
        limiter = LimitInFlightBytes(call.concurrent_bytes)
        return await gather_or_cancel(
            _read(request, limiter, OpenOptions(), mode) for request in call.requests
        )

    return run_coroutine(read_all())


async def _read(request: ArrayRequest, limiter: Any, opening: OpenOptions, mode: ArrayMode) -> Any:
    _check_place(request, mode)
    try:
        store = await _open(request, opening)
        shape = tuple(store.shape) if request.shape is None else request.shape
        if len(shape) != store.rank:
            raise SerializationError(
                f"the array at {request.stored_at!r} has shape {tuple(store.shape)}, and "
                f"global_shape says {shape}: sizes may differ, the number of dimensions may not",
                stored_at=request.stored_at,
            )
        stored = store.dtype.numpy_dtype
        dtype = (
            np.dtype(jax.dtypes.canonicalize_dtype(stored))
            if request.dtype is None
            else request.dtype
        )
        target = _target(shape, request)
        holders: dict[int, list[int]] = {}
        for number, tile in enumerate(target.tiles):
            holders.setdefault(tile, []).append(number)
        parts = await gather_or_cancel(
            _read_piece(store, target, numbers, dtype, limiter) for numbers in holders.values()
        )
    except XlashardError:
        raise
    except ValueError as error:
        raise read_error(error, request.spec) from None
    buffers = {number: buffer for part in parts for number, buffer in part.items()}
    ordered = [buffers[number] for number in range(len(target.devices))]
    handle = relayout(gather_pieces(ordered, dtype, target), request.layout, target)
    return _in_mode(placed(handle, target.sharding), mode)


async def _open(request: ArrayRequest, opening: OpenOptions) -> Any:
    async def opened(spec: dict[str, Any]) -> Any:
        return await tensorstore.open(
            tensorstore.Spec(spec),
            open=True,
            assume_metadata=opening.assume_metadata,
            context=opening.context,
            # TensorStore takes none for layers or values in a spec, which have their own.
            **({"chunk_layout": opening.chunk_layout} if is_chunked(spec) else {}),
        )

    store = await opened(request.spec)
    # Files that say what stands for parts that are not there, as other writers leave out zeros.
    return store if store.fill_value is None else await opened(filling(request.spec))


def _target(shape: tuple[int, ...], request: ArrayRequest) -> Places:
    try:
        return places(shape, request.sharding)
    except GeometryError as error:
        raise at_path(error, f"the array at {request.stored_at!r}") from None


async def _read_piece(
    store: Any, target: Places, numbers: list[int], dtype: np.dtype, limiter: Any
) -> dict[int, Any]:
    """Reads what some devices hold: by their numbers the buffers, or what becomes them."""
    index = target.indices[numbers[0]]
    asked = tensorstore.IndexTransform(input_shape=target.shape)[index].domain
    there = store.domain.intersect(asked)
    if store.chunk_layout.rank != store.rank:  # a stack, whose layers have layouts of their own
        size = there.size * store.dtype.numpy_dtype.itemsize
    else:
        size = estimate_read_memory_footprint(store, there)
    if limiter is not None:
        await limiter.wait_for_bytes(size)
    try:
        out = aligned_empty(target.shard_shape, store.dtype.numpy_dtype)
        if there != asked:
            out[...] = np.zeros((), out.dtype)
        at = tensorstore.d[:].translate_to[asked.origin]
        await tensorstore.array(out)[at][there].write(store[there])
        return _put(out.astype(dtype, copy=False), target, numbers)
    finally:
        if limiter is not None:
            await limiter.release_bytes(size)


def _put(value: np.ndarray, target: Places, numbers: list[int]) -> dict[int, Any]:
    if target.on_host:
        return dict.fromkeys(numbers, value)  # the memory itself becomes the buffers, at the end
    kind = target.sharding.memory_kind
    return {n: put_on(target.devices[n], value, memory_kind=kind, alias=True) for n in numbers}


def _check_place(request: ArrayRequest, mode: ArrayMode) -> None:
    """Refuses a place that an array of a world can't have, before anything is read.

    Raises:
        ArgumentError: Without `jax_array`, a place that is not named by a mesh.
    """
    if not mode.jax_array and not isinstance(request.sharding, NamedSharding):
        raise ArgumentError(
            f"the array at {request.stored_at!r} is to go to {request.sharding}, but without "
            "jax_array it becomes a GlobalDeviceArray, which is placed by a mesh and axes: give "
            "NamedSharding(mesh, P(...))"
        )


def _in_mode(x: Array, mode: ArrayMode) -> Any:
    """Return what a world reads, over the buffers of an Array: JAX's array, or a GDA."""
    return x.to_jax() if mode.jax_array else GlobalDeviceArray.from_array(x)
