"""`device_put`: pytrees of values to places."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, TypedDict, Unpack, overload

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.typing import ArrayLike

from xlashard._jax.runtime.tracebacks import shorten
from xlashard._jax.runtime.transfer import Handle, HandleType, Tracer, default_device, with_sharding
from xlashard.array.core.array import Array, wrap
from xlashard.array.core.base import check_alive, type_text
from xlashard.array.cross_process_check import (
    Check,
    compare_across_processes,
    parse_check,
    spans_processes,
)
from xlashard.array.host.put import HostPut, as_host_value, host_route, put_values
from xlashard.array.host.read import read_value, start_read
from xlashard.array.keys import is_key_array, key_handle, keys_over, resolve_key_data
from xlashard.array.placement.oom import as_out_of_memory_error, memory_required
from xlashard.array.placement.prefix import broadcast_prefix, leaf_path
from xlashard.array.placement.target import (
    Placement,
    ResolvedSharding,
    is_in_place,
    is_target,
    parse_placement,
    reorders_devices,
    resolve_requested,
    resolve_sharding,
)
from xlashard.array.placement.transfer_guard import (
    Transfer,
    TransferGuards,
    active_guards,
    check_transfer,
)
from xlashard.array.reshard.execute import put_local_copy, relayout, reshard
from xlashard.errors import (
    ArgumentError,
    DeletedError,
    GeometryError,
    OutOfMemoryError,
    PlacementError,
    ShardingError,
    TransferGuardError,
    UnreducedError,
    XlashardError,
)
from xlashard.sharding import Sharding, SingleDeviceSharding, to_jax


class _Options(TypedDict, total=False):
    """The keywords of `device_put`, for type checkers."""

    src: Any
    donate: Any
    may_alias: Any
    check: Check | None


class _NamedTuple(Protocol):
    @property
    def _fields(self) -> tuple[str, ...]: ...


@overload
def device_put(x: ArrayLike, device: Any = ..., **options: Unpack[_Options]) -> Array: ...
@overload
def device_put[K, V: ArrayLike](
    x: dict[K, V], device: Any = ..., **options: Unpack[_Options]
) -> dict[K, Array]: ...
@overload
def device_put[V: ArrayLike](
    x: list[V], device: Any = ..., **options: Unpack[_Options]
) -> list[Array]: ...
@overload
def device_put[T: _NamedTuple](x: T, device: Any = ..., **options: Unpack[_Options]) -> T: ...
@overload
def device_put[V: ArrayLike](
    x: tuple[V, ...], device: Any = ..., **options: Unpack[_Options]
) -> tuple[Array, ...]: ...
@overload
def device_put(
    x: dict[Any, Any] | list[Any] | tuple[Any, ...], device: Any = ..., **options: Unpack[_Options]
) -> Any: ...
@overload
def device_put[T](x: T, device: Any = ..., **options: Unpack[_Options]) -> T: ...
def device_put(
    x: Any,
    device: Any = None,
    *,
    src: Any = None,
    donate: Any = False,
    may_alias: Any = None,
    check: Check | None = None,
) -> Any:
    """Puts values on devices.

    A NumPy array or number is cut and sent in one transfer. An array moves on the devices; where
    its placement is equivalent already, no byte moves.

    Args:
        x: A value or a pytree of them: NumPy arrays, numbers, Arrays, arrays and keys of JAX.
        device: Where to: a device, a sharding of this package or of JAX, one that you wrote, or a
            `Format`, for all of `x` or as a pytree prefix of it. `None` leaves arrays where they
            are and puts other values, uncommitted, on the default device.
        src: Where `x` is; only inside a traced function does it mean something (to JAX).
        donate: Whether the arrays of `x` may be used up: they are deleted. A bool or a pytree
            prefix of bools.
        may_alias: False always copies. True also lets buffers be the memory of a NumPy array,
            which then must not change any more. A bool, `None`, or a pytree prefix.
        check: When several processes compare a value of the host that goes to devices of theirs,
            and must be the same in each: `"always"`, at each call; `"once"`, at the first call
            from a line of the program with such shapes and places; `"never"`. The default is what
            `XLASHARD_CHECK_DEVICE_PUT` says, otherwise `"once"`.

    Returns:
        `x` with an `Array` for every value (for keys: a key array of JAX). A tracer stays one.

    Raises:
        ArgumentError: A value that no device holds, or a place that is none, with its path.
        PlacementError: A shape that can't be placed so, with its path.
        DeletedError: A deleted array.
        UnequalError: A value that is not the same in all processes, with its path, the processes
            that differ, and the first element that does.
        ProcessesError: Processes that did not come to compare.
        TransferGuardError: JAX's transfer guards forbid it, as they do under
            `"disallow_explicit"`.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> batch = {"x": np.zeros((8, 4), np.float32), "y": np.zeros(8, np.int32)}
        >>> device_put(batch, NamedSharding(mesh, P("data")))["y"].shape
        (8,)
    """
    # Not by short_tracebacks, which costs something where nothing goes wrong.
    try:
        return _put_tree(x, device, src, (donate, may_alias), parse_check(check))
    except Exception as error:
        shorten(error)
        raise


def _put_tree(x: Any, device: Any, src: Any, flags: tuple[Any, Any], check: Check | None) -> Any:
    donate, may_alias = flags
    leaves, treedef = jax.tree.flatten(x)
    entries = broadcast_prefix(device, x, is_target, "device", "x")
    donated = broadcast_prefix(donate, x, _is_flag, "donate", "x")
    aliased = broadcast_prefix(may_alias, x, _is_flag, "may_alias", "x")
    gives, shares = (donated, aliased) if donate is False else _each_once(leaves, donated, aliased)
    known: dict[int, Placement] = {}
    guards = active_guards()
    steps: list[HostPut | _Step] = []
    ways: list[Placement] = []
    # All leaves are looked at before the first one moves: a mistake leaves everything as it was.
    for number, (leaf, entry) in enumerate(zip(leaves, entries, strict=True)):
        try:
            placement = known.get(id(entry))
            if placement is None:
                placement = known[id(entry)] = parse_placement(entry, "device")
            ways.append(placement)
            steps.append(_plan_leaf(leaf, placement, gives[number], shares[number], src))
            if guards is not None:
                _check_crossing(guards, leaf, placement, aliased[number] is False)
        except XlashardError as error:
            raise at_path(error, leaf_path(x, number, "x")) from None
    with nullcontext() if guards is None else jax.transfer_guard("allow"):
        if spans_processes(ways, leaves):
            for number in compare_across_processes(x, leaves, ways, check):
                steps[number] = _plan_leaf(
                    leaves[number], ways[number], gives[number], shares[number], src, own=True
                )
        return treedef.unflatten(_carried_out(x, steps, ways))


def _each_once(
    leaves: list[Any], donated: list[Any], aliased: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The flags by which an array that is several leaves is used up by the last one only.

    The others, as those of tied weights, get copies: buffers that they shared would go with it.
    """
    gives, shares = list(donated), list(aliased)
    later: set[int] = set()
    used_up = {id(x) for x, flag in zip(leaves, donated, strict=True) if flag is True}
    for number in reversed(range(len(leaves))):
        x = leaves[number]
        if not isinstance(x, jax.Array) or id(x) not in used_up:
            continue
        if id(x) in later:
            gives[number], shares[number] = False, False
        elif gives[number] is False:
            gives[number], shares[number] = True, None
        later.add(id(x))
    return gives, shares


def _carried_out(x: Any, steps: "list[HostPut | _Step]", ways: list[Placement]) -> list[Any]:
    try:
        handles = iter(put_values([step for step in steps if isinstance(step, HostPut)]))
    except OutOfMemoryError as error:
        raise at_path(error, "x") from None  # no-catalogue: needs a process with little memory
    out = []
    for number, step in enumerate(steps):
        try:
            if isinstance(step, HostPut):
                out.append(_put_host(next(handles), ways[number], step.route.target))
            else:
                out.append(step())
        except XlashardError as error:
            raise at_path(error, leaf_path(x, number, "x")) from None
    return out


_SIMPLE = (ArgumentError, DeletedError, ShardingError, TransferGuardError, UnreducedError)
"""Errors that are made of their message alone."""


def at_path(error: XlashardError, path: str) -> XlashardError:
    """The error with the path of the leaf in front; what the lower layers say becomes ours."""
    if isinstance(error, GeometryError | PlacementError):
        return PlacementError(f"{path}: {error}")
    if isinstance(error, OutOfMemoryError):
        return OutOfMemoryError(f"{path}: {error}", bytes_per_device=error.bytes_per_device)
    if isinstance(error, _SIMPLE):
        return type(error)(f"{path}: {error}")
    return error


def _check_crossing(guards: TransferGuards, x: Any, placement: Placement, fresh: bool) -> None:
    """Asks the guards whether a leaf may be put somewhere."""
    if isinstance(x, Tracer):
        return
    if not isinstance(x, jax.Array):
        check_transfer(guards, Transfer.HOST_TO_DEVICE, f"the {type(x).__name__}")
        return
    if fresh or not (
        placement.sharding is None or is_in_place(x, placement) or reorders_devices(x, placement)
    ):
        check_transfer(guards, Transfer.DEVICE_TO_DEVICE, f"the array {type_text(x)}")


def _is_flag(x: Any) -> bool:
    return x is None or isinstance(x, bool)


type _Step = Callable[[], Any]


def _plan_leaf(
    x: Any,
    placement: Placement,
    donate: bool,
    may_alias: bool | None,
    src: Any,
    *,
    own: bool = False,
) -> "HostPut | _Step":
    """What is to be done with one leaf; refuses what can't be done.

    `own` says of an array that each process has its own, with the same value.
    """
    if not isinstance(donate, bool) or not _is_flag(may_alias):
        raise ArgumentError(
            "donate must be True or False, may_alias True, False or None; they are "
            f"{donate!r} and {may_alias!r}"
        )
    if donate and may_alias:
        raise ArgumentError("donate=True uses the array up, may_alias=True keeps it: choose one")
    if type(x) is np.ndarray:
        if x.dtype == jax.dtypes.float0:
            # Tangents of integers: they hold nothing that a device could, and stay with NumPy.
            return lambda: x
        return _plan_host(x, placement, may_alias)
    if isinstance(x, Tracer):
        return lambda: _put_tracer(x, placement, src)
    if is_key_array(x):
        return lambda: _put_keys(x, placement, donate, may_alias, own)
    if not isinstance(x, Array | HandleType):
        return _plan_host(x, placement, may_alias)
    array = x if isinstance(x, Array) else Array.from_jax(x)
    check_alive(array)
    if placement.sharding is not None:
        resolve_requested(array.shape, placement.sharding)

    def put() -> Array:
        check_alive(array)
        out = _put_array(array, placement, donate, fresh=may_alias is False, own=own)
        if donate:
            _use_up(array)
        return out

    return put


def _plan_host(x: Any, placement: Placement, may_alias: bool | None) -> "HostPut | _Step":
    value, dtype, weak_type = as_host_value(x, lambda: "it")
    where = placement.sharding
    committed = where is not None
    place = SingleDeviceSharding(default_device()) if where is None else where
    target = resolve_requested(value.shape, place)
    if not target.tiling.is_partial:
        return HostPut(value, host_route(target, dtype, weak_type, committed), bool(may_alias))
    whole = resolve_sharding(value.shape, target.sharding.reduced_sharding)
    step = HostPut(value, host_route(whole, dtype, weak_type), False)

    def put() -> Array:
        (handle,) = put_values([step])
        return _put_array(wrap(handle), placement, donate=True, fresh=False, own=False)

    return put


def _put_host(handle: Handle, placement: Placement, target: ResolvedSharding) -> Array:
    if placement.sharding is None:
        return wrap(handle)
    return placed(relayout(handle, placement.layout, target), placement.sharding)


def _put_tracer(x: Any, placement: Placement, src: Any) -> Any:
    if placement.sharding is None:
        return x
    twin: Any = to_jax(placement.sharding, x.shape)
    if placement.sharding.is_unreduced or jax.typeof(x).sharding.spec.unreduced:
        # `jax.device_put` would leave the type as it is.
        return jax.sharding.reshard(x, twin)
    if placement.layout is not None:
        twin = Format(placement.layout, twin)
    return jax.device_put(x, twin, src=src)


def placed(handle: Handle, sharding: Sharding) -> Array:
    """An `Array` whose sharding is the caller's own object, where JAX can be shown that too."""
    array = wrap(handle)
    if isinstance(sharding, jax.sharding.Sharding):
        # JAX's compiled functions look at it; one of a user's class they could not read.
        array._own_sharding = sharding
    return array


def _put_array(array: Array, placement: Placement, donate: bool, fresh: bool, own: bool) -> Array:
    handle = array.to_jax()
    if placement.sharding is None:
        return array if not (donate or fresh) else _renewed(array, donate)
    if (
        not (donate or fresh)
        and handle.committed
        and placement.layout is None
        and array._own_sharding is placement.sharding
    ):
        return array
    target = resolve_sharding(handle.shape, placement.sharding)
    try:
        if own:
            moved = put_local_copy(handle, target)
        else:
            moved = reshard(handle, target, donate=donate, fresh=fresh)
        moved = relayout(moved, placement.layout, target)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        scarce = as_out_of_memory_error(error, [memory_required(target, handle.dtype)])
        if scarce is None:
            raise
    else:
        return placed(moved, placement.sharding)
    raise scarce  # no-catalogue: needs a process with little memory


def _renewed(array: Array, donate: bool) -> Array:
    """The same array in the same place, in other buffers or with the source used up."""
    handle = array.to_jax()
    target = resolve_sharding(handle.shape, array.sharding)
    moved = reshard(handle, target, donate=donate, fresh=not donate)
    if not handle.committed:
        moved = with_sharding(moved, target.jax_sharding, committed=False)
    out = wrap(moved)
    out._own_sharding = array._own_sharding
    return out


def _use_up(array: Array) -> None:
    array._deleted_by = "device_put(..., donate=True)"
    array._value_cache = None
    if not array.is_deleted():
        array.to_jax().delete()


def _put_keys(
    keys: Any, placement: Placement, donate: bool, may_alias: bool | None, own: bool
) -> Any:
    if placement.sharding is None and not donate and may_alias is not False:
        return keys
    numbers = Array.from_jax(key_handle(keys))
    check_alive(numbers)
    if placement.layout is not None:
        raise ArgumentError("a key array has no layout: give the sharding alone")
    if placement.sharding is not None and placement.sharding.is_unreduced:
        raise UnreducedError(
            "a key array can't be put as partial results, for keys have no sum: give P(...) "
            "without unreduced axes"
        )
    if placement.sharding is not None:
        logical = resolve_requested(tuple(keys.shape), placement.sharding)
        there: ResolvedSharding = resolve_key_data(logical, numbers.shape[keys.ndim :])
        placement = Placement(there.sharding)
    out = _put_array(numbers, placement, donate, fresh=may_alias is False, own=own)
    if donate and not numbers.is_deleted():
        numbers.delete()
    return keys_over(out.to_jax(), keys)


def device_get(x: Any) -> Any:
    """Brings values to the host; all transfers start before the first is awaited.

    Args:
        x: An array or a pytree of them.

    Returns:
        `x` with a read-only NumPy array for every array; other leaves as they are.

    Raises:
        NotAddressableError: A value that is not wholly in this process.
        DeletedError: A deleted array.
        TransferGuardError: JAX's transfer guards forbid it, as they do under
            `"disallow_explicit"`.
    """
    leaves, treedef = jax.tree.flatten(x)
    arrays = [wrap(leaf) if type(leaf) is HandleType else leaf for leaf in leaves]
    for array in arrays:
        if isinstance(array, Array):
            start_read(array, explicit=True)
    return treedef.unflatten(
        read_value(array, explicit=True)
        if isinstance(array, Array)
        else (jax.device_get(array) if isinstance(array, jax.Array) else array)
        for array in arrays
    )
