"""Transfer plans of `device_put`: one per leaf, with source and target resolved before any move."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

from xlashard._jax import originals
from xlashard._jax.runtime.transfer import (
    Handle,
    HandleType,
    Tracer,
    any_shared,
    default_device,
    with_sharding,
)
from xlashard.core.array.array_class.array import Array, wrap
from xlashard.core.array.array_class.base import check_alive
from xlashard.core.array.array_class.handles import (
    is_key_array,
    key_handle,
    keys_over,
    resolve_key_data,
)
from xlashard.core.array.placement.put import (
    HostPut,
    as_host_value,
    host_route,
    memory_required,
    place_within_memory,
    put_values,
)
from xlashard.core.array.placement.target import (
    STAY,
    Placement,
    ResolvedSharding,
    at_path,
    check_layout_rank,
    is_in_place,
    move_to_space,
    reorders_devices,
    resolve_requested,
    resolve_sharding,
)
from xlashard.core.array.reshard.execute import put_local_copy, relayout, reshard, sends_pieces
from xlashard.core.sharding import SingleDeviceSharding, from_jax, to_jax
from xlashard.errors import ArgumentError, OutOfMemoryError, UnreducedError, XlashardError


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
        out = place_within_memory(self._moved, lambda: [memory_required(end, array.dtype)])
        if self.donate:
            array._deleted_by = "device_put(..., donate=True)"
            array._value_cache = None
            if not array.is_deleted():
                array._handle.delete()
        return out if self.keys is None else keys_over(out._handle, self.keys)

    def _moved(self) -> Array:
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
