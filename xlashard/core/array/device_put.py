"""`device_put` and `device_get`: transfers of pytrees.

Every leaf has a plan, with source and target resolved before any of them moves.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack, overload

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.typing import ArrayLike

from xlashard._jax import originals
from xlashard._jax.runtime.global_state import (
    Transfer,
    TransferGuards,
    active_guards,
    check_transfer,
)
from xlashard._jax.runtime.transfer import (
    Handle,
    HandleType,
    Tracer,
    any_shared,
    default_device,
    with_sharding,
)
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.base import check_alive, type_text
from xlashard.core.array.array_class.handles import (
    is_key_array,
    key_handle,
    keys_over,
    resolve_key_data,
)
from xlashard.core.array.cross_process_check import (
    Check,
    compare_across_processes,
    parse_check,
    spans_processes,
)
from xlashard.core.array.placement.put import (
    HostPut,
    as_host_value,
    host_route,
    memory_required,
    place_within_memory,
    put_values,
)
from xlashard.core.array.placement.read import read_value, start_read
from xlashard.core.array.placement.target import (
    STAY,
    Placement,
    ResolvedSharding,
    at_path,
    check_layout_rank,
    is_in_place,
    is_target,
    leaf_path,
    move_to_space,
    parse_placement,
    reorders_devices,
    resolve_requested,
    resolve_sharding,
)
from xlashard.core.array.placement.tree_prefix import broadcast_prefix
from xlashard.core.array.reshard.execute import put_local_copy, relayout, reshard, sends_pieces
from xlashard.core.sharding import SingleDeviceSharding, from_jax, to_jax
from xlashard.errors import ArgumentError, OutOfMemoryError, UnreducedError, XlashardError
from xlashard.support.tracebacks import shorten


class Unchanged(NamedTuple):
    """Plan of a leaf that `device_put` returns as it is."""

    value: Any

    def run(self) -> Any:
        """Return the leaf."""
        return self.value


class TracerTransfer(NamedTuple):
    """Plan of a leaf inside a traced function: an operation of JAX."""

    tracer: Any
    placement: Placement
    src: Any

    def run(self) -> Any:
        """Record the operation."""
        sharding, layout = self.placement.sharding, self.placement.layout
        if sharding is None:
            return originals.device_put(self.tracer, self.placement.space, src=self.src)
        target: Any = to_jax(sharding, self.tracer.shape)
        if sharding.is_unreduced or jax.typeof(self.tracer).sharding.spec.unreduced:
            # `jax.device_put` would leave the type as it is.
            return originals.reshard(self.tracer, target)
        if layout is not None:
            target = Format(layout, target)
        return originals.device_put(self.tracer, target, src=self.src)


class HostTransfer(NamedTuple):
    """Plan of a value of the host.

    Attributes:
        put: The transfer of the value, to the reduced sharding where the target is unreduced.
        target: The requested sharding, or the default device.
        layout: The requested layout.
        committed: Whether the caller requested a sharding.
    """

    put: HostPut
    target: ResolvedSharding
    layout: Layout | None
    committed: bool

    def finish(self, handle: Handle) -> Array:
        """Return the array over the transferred value."""
        if not self.committed:
            return wrap(handle)
        source, target = self.put.route.target, self.target
        if source is not target:
            return ArrayTransfer(wrap(handle), source, target, self.layout, True, False).run()
        if self.layout is not None:
            handle = relayout(handle, self.layout, target)
        return wrap(handle, target.sharding)


class ArrayTransfer(NamedTuple):
    """Plan of an array, or of the data of a key array.

    Attributes:
        array: The array.
        source: Its sharding.
        target: The requested sharding; None for a copy on the same devices.
        layout: The requested layout.
        donate: Whether the array is donated.
        fresh: Whether buffers that are in place are copied.
        keys: The key array whose data `array` is.
        is_process_copy: Whether every process has an array of its own with the same value.
    """

    array: Array
    source: ResolvedSharding
    target: ResolvedSharding | None
    layout: Layout | None
    donate: bool
    fresh: bool
    keys: Any = None
    is_process_copy: bool = False

    @property
    def crosses_devices(self) -> bool:
        """True if bytes move between devices or memories, for transfer guards."""
        source, target = self.source, self.target
        if target is None or reorders_devices(source, target):
            return False
        return self.layout is not None or not is_in_place(source, target)

    @property
    def sends_pieces(self) -> bool:
        """True if processes send each other pieces, by programs of pairs of processes."""
        if self.target is None:
            return False
        return sends_pieces(self.array.dtype, self.source, self.target)

    def run(self) -> Any:
        """Move the array.

        Raises:
            OutOfMemoryError: The memory of the devices does not suffice.
        """
        check_alive(self.array)
        array, end = self.array, self.target or self.source
        out = place_within_memory(self._move_array, lambda: [memory_required(end, array.dtype)])
        if self.donate:
            array._deleted_by = "device_put(..., donate=True)"
            array._value_cache = None
            if not array.is_deleted():
                array._handle.delete()
        return out if self.keys is None else keys_over(out._handle, self.keys)

    def _move_array(self) -> Array:
        array = self.array
        handle = array._handle
        out = self._wrapped(handle)
        may_share = array._exposed is not None and not (self.donate or self.fresh)
        if may_share and any_shared(handle, out._handle):
            out._expose()
        return out

    def _wrapped(self, handle: Handle) -> Array:
        """Return the array over the moved handle."""
        array, source, target = self.array, self.source, self.target
        if self.is_process_copy:
            assert target is not None
            moved = put_local_copy(handle, source, target)
        else:
            end = source if target is None else target
            moved = reshard(handle, end, source=source, donate=self.donate, fresh=self.fresh)
        if target is not None:
            if self.layout is not None:
                moved = relayout(moved, self.layout, target)
            return wrap(moved, target.sharding)
        if not handle.committed:
            moved = with_sharding(moved, source.jax_sharding, committed=False)
        return wrap(moved, array._own_sharding)


type TransferPlan = Unchanged | TracerTransfer | HostTransfer | ArrayTransfer


def plan_transfer(
    x: Any, placement: Placement, donate: bool, may_alias: bool | None, src: Any
) -> TransferPlan:
    """Return the plan of one leaf; nothing moves.

    Args:
        x: The leaf.
        placement: Its target.
        donate: Whether an array is donated.
        may_alias: Whether buffers are shared: False for never, True also for those of the host.
        src: The source that a traced function names.

    Raises:
        ArgumentError: `x` is no value that devices hold, or the flags are invalid.
        DeletedError: `x` is deleted.
        GeometryError: The target does not fit the shape of `x`.
        UnreducedError: A key array is to become unreduced.
    """
    if donate is not False or may_alias is not None:
        _check_flags(donate, may_alias)
    if placement.space is not None and not isinstance(x, Tracer):
        # JAX places host values there as committed ones.
        source = getattr(x, "sharding", None) or SingleDeviceSharding(default_device())
        placement = Placement(move_to_space(from_jax(source), placement.space))
    if isinstance(x, Array):
        return _plan_array(x, placement, donate, may_alias is False)
    if type(x) is np.ndarray:
        # Tangents of integers hold nothing that a device could, and stay with NumPy.
        is_float0 = x.dtype == jax.dtypes.float0
        return Unchanged(x) if is_float0 else _plan_host(x, placement, may_alias)
    if isinstance(x, Tracer):
        return Unchanged(x) if placement == STAY else TracerTransfer(x, placement, src)
    if is_key_array(x):
        return _plan_keys(x, placement, donate, may_alias is False)
    if isinstance(x, HandleType):
        return _plan_array(Array.from_jax(x), placement, donate, may_alias is False)
    return _plan_host(x, placement, may_alias)


def _check_flags(donate: Any, may_alias: Any) -> None:
    if not isinstance(donate, bool) or not (may_alias is None or isinstance(may_alias, bool)):
        raise ArgumentError(
            "donate must be True or False, may_alias True, False or None; they are "
            f"{donate!r} and {may_alias!r}"
        )
    if donate and may_alias:
        raise ArgumentError("donate=True deletes the array, may_alias=True keeps it: choose one")


def _plan_host(x: Any, placement: Placement, may_alias: bool | None) -> HostTransfer:
    value, dtype, weak_type = as_host_value(x, lambda: "it")
    sharding, layout = placement.sharding, placement.layout
    check_layout_rank(layout, value.ndim)
    if sharding is None:
        target = resolve_sharding(value.shape, SingleDeviceSharding(default_device()))
    else:
        target = resolve_requested(value.shape, sharding)
    if target.tiling.is_partial:
        reduced = resolve_sharding(value.shape, target.sharding.reduced_sharding)
        put = HostPut(value, host_route(reduced, dtype, weak_type), False)
    else:
        route = host_route(target, dtype, weak_type, sharding is not None)
        put = HostPut(value, route, bool(may_alias))
    return HostTransfer(put, target, layout, sharding is not None)


def _plan_array(
    array: Array, placement: Placement, donate: bool, fresh: bool, keys: Any = None
) -> Unchanged | ArrayTransfer:
    check_alive(array)
    sharding, layout = placement.sharding, placement.layout
    handle = array._handle
    check_layout_rank(layout, handle.ndim)
    shared = not (donate or fresh)
    if sharding is None:
        if shared:
            return Unchanged(array)
        target, fresh = None, not donate
    elif shared and handle.committed and layout is None and array._own_sharding is sharding:
        return Unchanged(array)
    else:
        target = resolve_requested(handle.shape, sharding)
    source = resolve_sharding(handle.shape, from_jax(handle.sharding))
    return ArrayTransfer(array, source, target, layout, donate, fresh, keys)


def _plan_keys(
    keys: Any, placement: Placement, donate: bool, fresh: bool
) -> Unchanged | ArrayTransfer:
    if placement.sharding is None and not (donate or fresh):
        return Unchanged(keys)
    data = Array.from_jax(key_handle(keys))
    check_alive(data)
    if placement.layout is not None:
        raise ArgumentError("a key array has no layout: give the sharding alone")
    if placement.sharding is not None:
        if placement.sharding.is_unreduced:
            raise UnreducedError(
                "a key array cannot be unreduced, as keys have no sum: give P(...) without "
                "unreduced axes"
            )
        logical = resolve_requested(tuple(keys.shape), placement.sharding)
        placement = Placement(resolve_key_data(logical, data.shape[keys.ndim :]).sharding)
    return _plan_array(data, placement, donate, fresh, keys)


def execute(plans: Sequence[TransferPlan], path_of: Callable[[int], str]) -> list[Any]:
    """Run plans in order, all values of the host in one transfer.

    Args:
        plans: The plans.
        path_of: Returns the path of a leaf by its number, for errors.
    """
    puts = [plan.put for plan in plans if isinstance(plan, HostTransfer)]
    try:
        handles = iter(put_values(puts) if puts else ())
    except OutOfMemoryError as error:
        raise at_path(error, "x") from None  # no-catalogue: needs a process with little memory
    out = []
    for number, plan in enumerate(plans):
        try:
            out.append(plan.finish(next(handles)) if isinstance(plan, HostTransfer) else plan.run())
        except XlashardError as error:
            raise at_path(error, path_of(number)) from None
    return out


class _DevicePutOptions(TypedDict, total=False):
    """Keywords of `device_put`, for type checkers."""

    src: Any
    donate: Any
    may_alias: Any
    check: Check | None


class _NamedTuple(Protocol):
    @property
    def _fields(self) -> tuple[str, ...]: ...


@overload
def device_put(x: ArrayLike, device: Any = ..., **options: Unpack[_DevicePutOptions]) -> Array: ...
@overload
def device_put[K, V: ArrayLike](
    x: dict[K, V], device: Any = ..., **options: Unpack[_DevicePutOptions]
) -> dict[K, Array]: ...
@overload
def device_put[V: ArrayLike](
    x: list[V], device: Any = ..., **options: Unpack[_DevicePutOptions]
) -> list[Array]: ...
@overload
def device_put[T: _NamedTuple](
    x: T, device: Any = ..., **options: Unpack[_DevicePutOptions]
) -> T: ...
@overload
def device_put[V: ArrayLike](
    x: tuple[V, ...], device: Any = ..., **options: Unpack[_DevicePutOptions]
) -> tuple[Array, ...]: ...
@overload
def device_put(
    x: dict[Any, Any] | list[Any] | tuple[Any, ...],
    device: Any = ...,
    **options: Unpack[_DevicePutOptions],
) -> Any: ...
@overload
def device_put[T](x: T, device: Any = ..., **options: Unpack[_DevicePutOptions]) -> T: ...
def device_put(
    x: Any,
    device: Any = None,
    *,
    src: Any = None,
    donate: Any = False,
    may_alias: Any = None,
    check: Check | None = None,
) -> Any:
    """Put values on devices.

    A NumPy array or number is sliced and sent in one transfer. An array is resharded on the
    devices; if its sharding is equivalent already, no byte moves.

    Args:
        x: A value or a pytree of them: NumPy arrays, numbers, Arrays, arrays and keys of JAX.
        device: A device, a sharding of this package, of JAX or of a class of your own, or a
            `Format`, for all of `x` or as a pytree prefix of it. A memory space
            (`jax.memory.Space.Host`) keeps the devices of arrays. `None` leaves arrays on their
            devices and puts other values, uncommitted, on the default device.
        src: Source device or sharding; only used inside a traced function, by JAX.
        donate: Whether the arrays of `x` are donated, and so deleted. A bool or a pytree prefix of
            bools.
        may_alias: False always copies. True also lets buffers alias the memory of a NumPy array,
            which must not change afterwards. A bool, `None`, or a pytree prefix.
        check: When processes compare a host value that they put on shared devices and that must be
            equal in all of them: `"always"`, at each call; `"once"`, at the first call from a line
            of the program with the same shapes and targets; `"never"`. By default
            `XLASHARD_CHECK_DEVICE_PUT`, otherwise `"once"`.

    Returns:
        `x` with an `Array` for every value (for keys: a key array of JAX). Tracers stay tracers.

    Raises:
        ArgumentError: No device can hold a value, or a target is invalid; with its path.
        PlacementError: A sharding does not fit a shape; with its path.
        DeletedError: An array is deleted.
        UnequalError: A value differs between processes; with its path, the processes, and the first
            element that differs.
        ProcessesError: A process did not take part in the comparison before the timeout.
        DeadlockError: Processes put an array of several processes to different targets.
        TransferGuardError: A transfer guard of JAX forbids it, such as `"disallow_explicit"`.

    Example:
        >>> import jax, numpy as np
        >>> from xlashard import Mesh, NamedSharding, P, device_put
        >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> batch = {"x": np.zeros((8, 4), np.float32), "y": np.zeros(8, np.int32)}
        >>> device_put(batch, NamedSharding(mesh, P("data")))["y"].shape
        (8,)
    """
    # short_tracebacks would cost time without an error.
    try:
        return _put_tree(x, device, src, (donate, may_alias), parse_check(check))
    except Exception as error:
        shorten(error)
        raise


def _put_tree(x: Any, device: Any, src: Any, flags: tuple[Any, Any], check: Check | None) -> Any:
    """Plan every leaf, then run the plans: an invalid argument leaves everything as it was."""
    donate, may_alias = flags
    leaves, treedef = jax.tree.flatten(x)
    targets = broadcast_prefix(device, x, is_target, "device", "x")
    donated = broadcast_prefix(donate, x, _is_flag, "donate", "x")
    aliased = broadcast_prefix(may_alias, x, _is_flag, "may_alias", "x")
    forced = [number for number, flag in enumerate(aliased) if flag is False]
    if donate is not False:
        donated, aliased = _donate_last(leaves, donated, aliased)
    guards = active_guards()
    parsed: dict[int, Placement] = {}
    placements: list[Placement] = []
    plans: list[TransferPlan] = []
    for number, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        try:
            placement = parsed.get(id(target))
            if placement is None:
                placement = parsed[id(target)] = parse_placement(target, "device")
            placements.append(placement)
            plan = plan_transfer(leaf, placement, donated[number], aliased[number], src)
            plans.append(plan)
            if guards is not None:
                _check_guards(guards, leaf, plan, number in forced)
        except XlashardError as error:
            raise at_path(error, leaf_path(x, number, "x")) from None
    with nullcontext() if guards is None else jax.transfer_guard("allow"):
        if spans_processes(placements, leaves):
            sends = partial(_sends_pieces, plans)
            for number in compare_across_processes(x, leaves, placements, check, sends):
                plan = plans[number]
                if isinstance(plan, ArrayTransfer):
                    plans[number] = plan._replace(is_process_copy=True)
        return treedef.unflatten(execute(plans, lambda number: leaf_path(x, number, "x")))


def _sends_pieces(plans: list[TransferPlan], number: int) -> bool:
    plan = plans[number]
    return isinstance(plan, ArrayTransfer) and plan.sends_pieces


def _donate_last(
    leaves: list[Any], donated: list[Any], aliased: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return flags by which an array that is several leaves is donated by the last one only.

    The others, as those of tied weights, are copied: shared buffers would be deleted with it.
    """
    donated, aliased = list(donated), list(aliased)
    later: set[int] = set()
    ids = {id(x) for x, flag in zip(leaves, donated, strict=True) if flag is True}
    for number in reversed(range(len(leaves))):
        x = leaves[number]
        if not isinstance(x, jax.Array) or id(x) not in ids:
            continue
        if id(x) in later:
            donated[number], aliased[number] = False, False
        elif donated[number] is False:
            donated[number], aliased[number] = True, None
        later.add(id(x))
    return donated, aliased


def _check_guards(guards: TransferGuards, x: Any, plan: TransferPlan, forced: bool) -> None:
    """Check that the transfer guards allow a leaf to move; `forced` requests a copy."""
    if isinstance(plan, HostTransfer):
        check_transfer(guards, Transfer.HOST_TO_DEVICE, f"the {type(x).__name__}")
    elif isinstance(plan, ArrayTransfer) and (forced or plan.crosses_devices):
        check_transfer(guards, Transfer.DEVICE_TO_DEVICE, f"the array {type_text(x)}")


def _is_flag(x: Any) -> bool:
    return x is None or isinstance(x, bool)


def device_get(x: Any) -> Any:
    """Return the values on the host; all transfers start before the first is awaited.

    Args:
        x: An array or a pytree of them.

    Returns:
        `x` with a read-only NumPy array for every array; other leaves as they are.

    Raises:
        NotAddressableError: A value is not wholly in this process.
        DeletedError: An array is deleted.
        TransferGuardError: A transfer guard of JAX forbids it, such as `"disallow_explicit"`.

    Example:
        >>> import numpy as np
        >>> device_get((device_put(np.ones(2, np.float32)), 7))
        (array([1., 1.], dtype=float32), 7)
    """
    leaves, treedef = jax.tree.flatten(x)
    arrays = [wrap(leaf) if type(leaf) is HandleType else leaf for leaf in leaves]
    for array in arrays:
        if isinstance(array, Array):
            start_read(array, explicit=True)
    return treedef.unflatten(
        read_value(array, explicit=True)
        if isinstance(array, Array)
        else (originals.device_get(array) if isinstance(array, jax.Array) else array)
        for array in arrays
    )
