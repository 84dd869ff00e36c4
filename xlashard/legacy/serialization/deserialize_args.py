"""Arguments of `async_deserialize` and `run_deserialization`, in both of their signatures.

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

from xlashard.array.placement.target import at_path, parse_shape, parse_sharding
from xlashard.errors import ArgumentError, XlashardError, counted
from xlashard.legacy.serialization.tensorstore_specs import Spec, spec_to_read, stored_at
from xlashard.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

_BY_SHARDING = ("sharding", "tensorstore_spec")
_BY_MESH = ("mesh", "mesh_axes", "tensorstore_spec")
_ALL_BY_SHARDING = ("shardings", "tensorstore_specs")
_ALL_BY_MESH = ("global_meshes", "mesh_axes", "tensorstore_specs")
_OPENING = ("context", "chunk_layout", "assume_metadata")
_REST = ("global_shape", "dtype", "byte_limiter", *_OPENING)
_ALL_REST = ("global_shapes", "dtypes", "concurrent_gb")
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

    @property
    def stored_at(self) -> str:
        """The location of the stored array."""
        return stored_at(self.spec)


def read_one(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[ArrayRequest, Any, dict[str, Any]]:
    """Parse the arguments of `async_deserialize`.

    Returns:
        The request, the limiter of the bytes in flight or None, and options of `tensorstore.open`.

    Raises:
        ArgumentError: The arguments match neither signature; names the argument.
    """
    bound = _bound("async_deserialize", args, kwargs, (_BY_SHARDING, _BY_MESH), _REST)
    place = (bound.get("mesh"), bound["mesh_axes"]) if "mesh" in bound else bound["sharding"]
    request = _array_request(
        place, bound["tensorstore_spec"], bound.get("global_shape"), bound.get("dtype"), ""
    )
    opening = {key: bound[key] for key in _OPENING if key in bound}
    return request, bound.get("byte_limiter"), opening


def read_many(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[ArrayRequest, ...], int]:
    """Parse the arguments of `run_deserialization` or of a manager's `deserialize`.

    Args:
        name: The name of the called function.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Returns:
        A request per array, and the maximum number of bytes in flight.

    Raises:
        ArgumentError: The arguments match neither signature, or the lists differ in length.
    """
    bound = _bound(name, args, kwargs, (_ALL_BY_SHARDING, _ALL_BY_MESH), _ALL_REST)
    count = len(as_list(bound["tensorstore_specs"], "tensorstore_specs"))
    lists = {
        key: as_list(value, key, count) for key, value in bound.items() if key != "concurrent_gb"
    }
    nothing = [None] * count
    if "global_meshes" in lists:
        where = list(zip(lists["global_meshes"], lists["mesh_axes"], strict=True))
    else:
        where = lists["shardings"]
    rows = zip(
        where,
        lists["tensorstore_specs"],
        lists.get("global_shapes", nothing),
        lists.get("dtypes", nothing),
        strict=True,
    )
    requests = tuple(_array_request(*row, f"[{number}]") for number, row in enumerate(rows))
    return requests, int(bound.get("concurrent_gb", 32) * _GB)


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


def _array_request(place: Any, spec: Any, shape: Any, dtype: Any, number: str) -> ArrayRequest:
    """Return the request of one array; `number` is its index in a list, such as `[3]`."""
    many = f"s{number}" if number else ""
    try:
        read = spec_to_read(spec)
    except ArgumentError as error:
        raise at_path(error, f"tensorstore_spec{many}") from None
    try:
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
