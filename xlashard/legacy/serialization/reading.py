"""Reading arrays from TensorStore: each process reads each of its distinct shards once.

Until autumn 2022 an array was placed by a mesh and a spec, and since then by a sharding:

    async_deserialize(mesh, mesh_axes, tensorstore_spec, global_shape, dtype, byte_limiter)
    async_deserialize(sharding, tensorstore_spec, global_shape, dtype, byte_limiter)

`run_deserialization` and the manager's `deserialize` take lists of the same arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.array_serialization import (
    CHUNK_LAYOUT,
    TS_CONTEXT,
    LimitInFlightBytes,
    estimate_read_memory_footprint,
    tensorstore,
)
from xlashard._jax.runtime.transfer import aligned_empty
from xlashard.core.array import Array
from xlashard.core.array.array_class.handles import canonical_dtype
from xlashard.core.array.constructors import finished
from xlashard.core.array.placement.put import stage_piece
from xlashard.core.array.placement.target import (
    ResolvedSharding,
    at_path,
    parse_shape,
    parse_sharding,
    resolve_sharding,
)
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from xlashard.errors import ArgumentError, GeometryError, SerializationError, XlashardError
from xlashard.legacy.arrays.gda import GlobalDeviceArray
from xlashard.legacy.modes.config_flags import ArrayMode, current_array_mode
from xlashard.legacy.serialization.tensorstore_specs import (
    Spec,
    as_list,
    filling,
    gather_or_cancel,
    is_chunked,
    read_error,
    run_coroutine,
    spec_to_read,
    stored_at,
)
from xlashard.support.tracebacks import short_tracebacks

_BY_SHARDING = ("sharding", "tensorstore_spec")
_BY_MESH = ("mesh", "mesh_axes", "tensorstore_spec")
_OPENING = ("context", "chunk_layout", "assume_metadata")
_REST = ("global_shape", "dtype", "byte_limiter", *_OPENING)
_ALL_BY_SHARDING = ("shardings", "tensorstore_specs")
_ALL_BY_MESH = ("global_meshes", "mesh_axes", "tensorstore_specs")
_ALL_REST = ("global_shapes", "dtypes", "concurrent_gb")
# Arguments of one array, by the lists that have one entry per array.
_ENTRIES = {
    "shardings": "sharding",
    "global_meshes": "mesh",
    "mesh_axes": "mesh_axes",
    "tensorstore_specs": "tensorstore_spec",
    "global_shapes": "global_shape",
    "dtypes": "dtype",
}
# Other names of the first arguments, in JAX and in programs.
_OTHER_NAMES = {"in_sharding": "sharding", "in_type": "sharding", "global_mesh": "mesh"}

_GB = 10**9


@dataclass(frozen=True)
class ArrayRequest:
    """Request to read one array.

    Attributes:
        sharding: The sharding of the result.
        layout: The layout of the result; None for the device's default.
        spec: The TensorStore spec of the stored array.
        shape: The shape of the result, padded with zeros or cropped; None for the stored shape.
        dtype: The dtype of the result; None for the stored dtype.
    """

    sharding: Sharding
    layout: Layout | None
    spec: Spec = field(repr=False)
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None


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
        request, byte_limiter, opening = _request_of_one(args, kwargs)
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
    requests, concurrent_bytes = _requests_of_all(name, args, kwargs)
    mode = current_array_mode()

    async def read_all() -> list[Array]:
        limiter = LimitInFlightBytes(concurrent_bytes)
        return await gather_or_cancel(_read(request, limiter, {}, mode) for request in requests)

    return run_coroutine(read_all())


async def _read(
    request: ArrayRequest, limiter: Any, opening: Mapping[str, Any], mode: ArrayMode
) -> Any:
    """Read one array, in the class of the array mode: JAX's own, or GlobalDeviceArray."""
    _check_place(request, mode)
    try:
        store = await _open(request.spec, opening)
        shape = tuple(store.shape) if request.shape is None else request.shape
        if len(shape) != store.rank:
            raise SerializationError(
                f"the array at {stored_at(request.spec)!r} has shape {tuple(store.shape)}, but "
                f"global_shape={shape}: pass a shape of the same rank",
                stored_at=stored_at(request.spec),
            )
        dtype = canonical_dtype(store.dtype.numpy_dtype)
        target = resolve_sharding(shape, request.sharding)
        parts = await gather_or_cancel(
            _read_piece(store, target, numbers, request.dtype or dtype, limiter)
            for numbers in target.holders
        )
    except (GeometryError, ArgumentError) as error:
        raise at_path(error, f"the array at {stored_at(request.spec)!r}") from None
    except XlashardError:
        raise
    except ValueError as error:
        raise read_error(error, request.spec) from None
    buffers = {number: buffer for part in parts for number, buffer in part.items()}
    ordered = [buffers[number] for number in range(len(target.devices))]
    x = finished(ordered, request.dtype or dtype, target, request.layout, None)
    return x.to_jax() if mode.jax_array else GlobalDeviceArray.from_array(x)


async def _open(spec: Spec, opening: Mapping[str, Any]) -> Any:
    options = {"open": True, "context": TS_CONTEXT, "chunk_layout": CHUNK_LAYOUT, **opening}
    if not is_chunked(spec):
        # TensorStore rejects a chunk layout for layers or values, which have their own.
        del options["chunk_layout"]
    store = await tensorstore.open(tensorstore.Spec(spec), **options)
    if store.fill_value is not None:
        # Missing chunks are valid then: other writers omit zeros.
        store = await tensorstore.open(tensorstore.Spec(filling(spec)), **options)
    return store


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
        return stage_piece(out.astype(dtype, copy=False), target, numbers, alias=True)
    finally:
        if limiter is not None:
            await limiter.release_bytes(size)


def _check_place(request: ArrayRequest, mode: ArrayMode) -> None:
    """Reject a sharding that the array mode does not allow."""
    if not mode.jax_array and not isinstance(request.sharding, NamedSharding):
        raise ArgumentError(
            f"the array at {stored_at(request.spec)!r} has sharding {request.sharding}, but with "
            "jax_array off it becomes a GlobalDeviceArray, which requires mesh axes: pass "
            "NamedSharding(mesh, P(...))"
        )


def _request_of_one(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[ArrayRequest, Any, dict[str, Any]]:
    """Return the request, the limiter of the bytes in flight, and options of `tensorstore.open`.

    Raises:
        ArgumentError: The arguments match neither signature; names the argument.
    """
    bound = _bound("async_deserialize", args, kwargs, (_BY_SHARDING, _BY_MESH), _REST)
    opening = {key: bound[key] for key in _OPENING if key in bound}
    return _array_request(bound, ""), bound.get("byte_limiter"), opening


def _requests_of_all(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[ArrayRequest, ...], int]:
    """Return the request of each array, and the maximum number of bytes in flight.

    Raises:
        ArgumentError: The arguments match neither signature, or the lists differ in length.
    """
    bound = _bound(name, args, kwargs, (_ALL_BY_SHARDING, _ALL_BY_MESH), _ALL_REST)
    concurrent_bytes = int(bound.pop("concurrent_gb", 32) * _GB)
    count = len(as_list(bound["tensorstore_specs"], "tensorstore_specs"))
    lists = {_ENTRIES[key]: as_list(value, key, count) for key, value in bound.items()}
    requests = tuple(
        _array_request({key: values[number] for key, values in lists.items()}, f"[{number}]")
        for number in range(count)
    )
    return requests, concurrent_bytes


def _bound(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    forms: tuple[tuple[str, ...], tuple[str, ...]],
    rest: tuple[str, ...],
) -> dict[str, Any]:
    """Return the arguments by name, without optional ones that are None."""
    kwargs = {_OTHER_NAMES.get(key, key): value for key, value in kwargs.items()}
    by_sharding, by_mesh = forms
    by_mesh_now = _is_mesh_form(args[0]) if args else by_mesh[0] in kwargs
    form = (by_mesh if by_mesh_now else by_sharding) + rest
    positional = dict(zip(form, args, strict=False))
    unknown = [key for key in kwargs if key not in form or key in positional]
    required = form[: -len(rest)]
    missing = [key for key in required if key not in positional and key not in kwargs]
    if unknown or missing or len(args) > len(form):
        wrong = (
            f"missing argument {', '.join(missing)}"
            if missing
            else f"unexpected argument {', '.join(unknown) or 'at the end'}"
        )
        raise ArgumentError(
            f"{name}: {wrong}. Write {name}({', '.join(by_sharding + rest[:3])}), or "
            f"{name}({', '.join(by_mesh + rest[:3])})"
        )
    bound = {**positional, **kwargs}
    return {key: x for key, x in bound.items() if key in required or x is not None}


def _is_mesh_form(first: Any) -> bool:
    if isinstance(first, list | tuple) and not isinstance(first, PartitionSpec):
        first = first[0] if first else None
    return isinstance(first, Mesh)


def _array_request(bound: Mapping[str, Any], number: str) -> ArrayRequest:
    """Return the request of one array; `number` is its index in a list, such as `[3]`."""
    shape, dtype = bound.get("global_shape"), bound.get("dtype")
    many = f"s{number}" if number else ""
    try:
        read = spec_to_read(bound["tensorstore_spec"])
    except ArgumentError as error:
        raise at_path(error, f"tensorstore_spec{many}") from None
    try:
        place = (bound["mesh"], bound["mesh_axes"]) if "mesh" in bound else bound["sharding"]
        if isinstance(place, jax.ShapeDtypeStruct):
            dtype = place.dtype if dtype is None else dtype
            place = place.sharding
        if type(place) is tuple:
            place = _on_mesh(place, number)
        sharding, layout = parse_sharding(place, f"sharding{many}")
        sizes = None if shape is None else parse_shape(shape, f"global_shape{many}")
        kind = None if dtype is None else _as_dtype(dtype, f"dtype{many}")
    except XlashardError as error:
        raise at_path(error, f"the array at {stored_at(read)!r}") from None
    return ArrayRequest(sharding, layout, read, sizes, kind)


def _on_mesh(place: tuple[Any, ...], number: str) -> NamedSharding:
    mesh, axes = place
    if not isinstance(mesh, Mesh):
        name = f"global_meshes{number}" if number else "mesh"
        raise ArgumentError(
            f"{name} of type {type(mesh).__name__} is invalid: expected a Mesh and its mesh_axes "
            "for each array, or a sharding such as x.sharding"
        )
    if not isinstance(axes, list | tuple | PartitionSpec | None):
        raise ArgumentError(
            f"mesh_axes{number}={axes!r} is invalid: expected a PartitionSpec such as P({axes!r}), "
            "or None for replicated"
        )
    try:
        spec = axes if isinstance(axes, PartitionSpec) else PartitionSpec(*(axes or ()))
        return NamedSharding(mesh, spec)
    except XlashardError as error:
        raise at_path(error, f"mesh_axes{number}") from None


def _as_dtype(dtype: Any, name: str) -> np.dtype:
    try:
        return np.dtype(jax.dtypes.canonicalize_dtype(jnp.dtype(dtype)))
    except TypeError:
        raise ArgumentError(
            f"{name}={dtype!r} is invalid: expected a dtype that devices support, such as "
            "'float32' or jnp.bfloat16"
        ) from None
