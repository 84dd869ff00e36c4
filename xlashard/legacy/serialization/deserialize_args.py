"""What programs say of arrays that they want to read, in each of the ways in which they do.

Until the autumn of 2022 an array's place was a mesh and a spec, since then it is a sharding:

    async_deserialize(mesh, mesh_axes, tensorstore_spec, global_shape, dtype, byte_limiter)
    async_deserialize(sharding, tensorstore_spec, global_shape, dtype, byte_limiter)

and so with lists of them for `run_deserialization` and the manager's `deserialize`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.serialization import CHUNK_LAYOUT, TS_CONTEXT
from xlashard.array.moving import at_path
from xlashard.array.placement import as_shape, as_sharding
from xlashard.errors import ArgumentError, XlashardError, counted
from xlashard.legacy.serialization.tensorstore_specs import Spec, spec_to_read, stored_at
from xlashard.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

_BY_SHARDING = ("sharding", "tensorstore_spec")
_BY_MESH = ("mesh", "mesh_axes", "tensorstore_spec")
_ALL_BY_SHARDING = ("shardings", "tensorstore_specs")
_ALL_BY_MESH = ("global_meshes", "mesh_axes", "tensorstore_specs")
_REST = ("global_shape", "dtype", "byte_limiter", "context", "chunk_layout", "assume_metadata")
_ALL_REST = ("global_shapes", "dtypes", "concurrent_gb")
# How JAX and programs besides call the first of them.
_OTHER_NAMES = {"in_sharding": "sharding", "in_type": "sharding", "global_mesh": "mesh"}

_GB = 10**9


@dataclass(frozen=True)
class ArrayRequest:
    """One array to be read.

    Attributes:
        sharding: Where its pieces go.
        layout: In what layout; None for the device's own.
        spec: Where it is stored.
        shape: What shape it is to have, zeros where more is asked for than is stored; None for
            the stored one.
        dtype: What it is to be made of; None for what is stored.
    """

    sharding: Sharding
    layout: Layout | None
    spec: Spec = field(repr=False)
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None

    @property
    def stored_at(self) -> str:
        """Where it is stored."""
        return stored_at(self.spec)


@dataclass(frozen=True)
class OpenOptions:
    """How TensorStore opens what it reads.

    Attributes:
        context: Its limits and caches.
        chunk_layout: How to cut, where the metadata don't say.
        assume_metadata: Whether to take the spec's word for the metadata.
    """

    context: Any = TS_CONTEXT
    chunk_layout: Any = field(default_factory=lambda: CHUNK_LAYOUT)
    assume_metadata: bool = False


@dataclass(frozen=True)
class ReadOneArgs:
    """A call for one array.

    Attributes:
        wanted: The array.
        byte_limiter: Whom to ask for memory; None if nobody.
        opening: How to open it.
    """

    request: ArrayRequest
    byte_limiter: Any = None
    opening: OpenOptions = field(default_factory=OpenOptions)


@dataclass(frozen=True)
class ReadManyArgs:
    """A call for several arrays.

    Attributes:
        wanted: The arrays.
        concurrent_bytes: How much memory to read into at a time.
    """

    requests: tuple[ArrayRequest, ...]
    concurrent_bytes: int = 32 * _GB


def read_one(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ReadOneArgs:
    """Reads the arguments of `async_deserialize`.

    Raises:
        ArgumentError: They are none of the two forms, by the argument's name.
    """
    given = _bound("async_deserialize", args, kwargs, (_BY_SHARDING, _BY_MESH), _REST)
    place = (given.get("mesh"), given["mesh_axes"]) if "mesh" in given else given["sharding"]
    request = _array_request(
        place, given["tensorstore_spec"], given.get("global_shape"), given.get("dtype"), ""
    )
    opening = {
        name: given[name]
        for name in ("context", "chunk_layout", "assume_metadata")
        if name in given
    }
    return ReadOneArgs(request, given.get("byte_limiter"), OpenOptions(**opening))


def read_many(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ReadManyArgs:
    """Reads the arguments of `run_deserialization` or of a manager's `deserialize`.

    Args:
        name: What was called.
        args: The positional arguments.
        kwargs: The others.

    Raises:
        ArgumentError: They are none of the two forms, or lists of different lengths.
    """
    given = _bound(name, args, kwargs, (_ALL_BY_SHARDING, _ALL_BY_MESH), _ALL_REST)
    count = len(as_list(given["tensorstore_specs"], "tensorstore_specs"))
    lists = {
        key: as_list(value, key, count) for key, value in given.items() if key != "concurrent_gb"
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
    return ReadManyArgs(requests, int(given.get("concurrent_gb", 32) * _GB))


def as_list(given: Any, name: str, count: int | None = None) -> list[Any]:
    """A list or tuple that a caller gave, of so many entries.

    Raises:
        ArgumentError: It is something else, or of another length.
    """
    if not isinstance(given, list | tuple) or isinstance(given, PartitionSpec):
        raise ArgumentError(
            f"{name} is {type(given).__name__}, not a list with one entry for each array: write "
            f"jax.tree.leaves({name}) of a tree, and treedef.unflatten(...) of what comes back"
        )
    if count is not None and len(given) != count:
        raise ArgumentError(
            f"{name} has {counted(len(given), 'entry', 'entries')} for "
            f"{counted(count, 'tensorstore_spec')}: give one for each array"
        )
    return list(given)


def _bound(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    forms: tuple[tuple[str, ...], tuple[str, ...]],
    rest: tuple[str, ...],
) -> dict[str, Any]:
    """The arguments by name, those that are None and have another meaning left out."""
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
            f"it lacks {', '.join(missing)}"
            if missing
            else f"{', '.join(unknown) or 'more than these'} is none of its arguments"
        )
        raise ArgumentError(
            f"{name}: {wrong}. Write {name}({', '.join(by_sharding + rest[:3])}), or "
            f"{name}({', '.join(by_mesh + rest[:3])})"
        )
    given = {**positional, **kwargs}
    return {key: x for key, x in given.items() if key in required or x is not None}


def _is_mesh_form(first: Any) -> bool:
    if isinstance(first, list | tuple) and not isinstance(first, PartitionSpec):
        first = first[0] if first else None
    return isinstance(first, Mesh)


def _array_request(place: Any, spec: Any, shape: Any, dtype: Any, number: str) -> ArrayRequest:
    """One array to be read; `number` is where it stands in lists of them, `[3]`."""
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
        sharding, layout = as_sharding(place, f"sharding{many}")
        sizes = None if shape is None else as_shape(shape, f"global_shape{many}")
        kind = None if dtype is None else _as_dtype(dtype, f"dtype{many}")
    except XlashardError as error:
        raise at_path(error, f"the array at {stored_at(read)!r}") from None
    return ArrayRequest(sharding, layout, read, sizes, kind)


def _on_mesh(place: tuple[Any, ...], number: str) -> NamedSharding:
    mesh, axes = place
    if not isinstance(mesh, Mesh):
        name = f"global_meshes{number}" if number else "mesh"
        raise ArgumentError(
            f"{name} is {type(mesh).__name__}, not a Mesh: give a Mesh and its mesh_axes for each "
            "array, or one sharding such as x.sharding"
        )
    if not isinstance(axes, list | tuple | PartitionSpec | None):
        raise ArgumentError(
            f"mesh_axes{number} is {axes!r}, not a PartitionSpec: write P({axes!r}), or None for "
            "replicated"
        )
    try:
        return NamedSharding(mesh, axes if isinstance(axes, PartitionSpec) else _spec_of(axes))
    except XlashardError as error:
        raise at_path(error, f"mesh_axes{number}") from None


def _spec_of(axes: Sequence[Any] | None) -> PartitionSpec:
    return PartitionSpec(*(axes or ()))


def _as_dtype(given: Any, name: str) -> np.dtype:
    try:
        return np.dtype(jax.dtypes.canonicalize_dtype(jnp.dtype(given)))
    except TypeError:
        raise ArgumentError(
            f"{name} is {given!r}, which no device can hold: give one such as 'float32' or "
            "jnp.bfloat16"
        ) from None
