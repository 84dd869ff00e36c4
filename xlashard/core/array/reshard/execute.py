"""Execution of reshards: each step of a plan on the devices."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax.runtime.compiler import custom_layout, have_same_layout
from xlashard._jax.runtime.global_state import allow_transfers
from xlashard._jax.runtime.shardings import Device, default_memory_kind
from xlashard._jax.runtime.transfer import (
    Handle,
    assemble,
    copy_to,
    make_aval,
    put,
    separate,
    split,
    with_sharding,
)
from xlashard._jax.trace.tracing import no_mesh_in_force
from xlashard.core.array.placement.put import put_value
from xlashard.core.array.placement.target import Index, ResolvedSharding, resolve_sharding
from xlashard.core.array.reshard import ReshardTask
from xlashard.core.sharding import GSPMDSharding, NamedSharding, from_jax
from xlashard.errors import PlacementError
from xlashard.geometry import Tiling
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.core.array.reshard import compiled, p2p, permute, plan
else:
    compiled = deferred("xlashard.core.array.reshard.compiled")
    p2p = deferred("xlashard.core.array.reshard.p2p")
    permute = deferred("xlashard.core.array.reshard.permute")
    plan = deferred("xlashard.core.array.reshard.plan")


_ORDERS_KEPT = 512


def with_device_order(handle: Handle, devices: Sequence[Device]) -> Handle:
    """Return the handle under a sharding that lists its devices in an order; nothing moves.

    A handle on other devices is returned as it is.
    """
    sharding = from_jax(handle.sharding)
    if sharding.devices == tuple(devices) or set(sharding.devices) != set(devices):
        return handle
    tiling = _reordered_tiling(sharding.tiling(handle.shape), sharding.devices, tuple(devices))
    target = GSPMDSharding(devices, tiling.to_tile_assignment(), memory_kind=sharding.memory_kind)
    jax_sharding = target.jax_sharding(handle.shape)
    own_devices = [sharding.devices[i] for i in sharding.addressable_positions]
    buffers = dict(zip(own_devices, split(handle), strict=True))
    return assemble(
        make_aval(handle.shape, handle.dtype, jax_sharding, handle.weak_type),
        jax_sharding,
        [buffers[target.devices[i]] for i in target.addressable_positions],
        committed=handle.committed,
    )


@lru_cache(maxsize=_ORDERS_KEPT)
def _reordered_tiling(
    tiling: Tiling, listed: tuple[Device, ...], order: tuple[Device, ...]
) -> Tiling:
    positions = {device: position for position, device in enumerate(listed)}
    return tiling.reordered([positions[device] for device in order])


def has_permuted_tiles(handle: Handle) -> bool:
    """Return True if no mesh of the devices in their order has the tiles."""
    sharding = from_jax(handle.sharding)
    if isinstance(sharding, NamedSharding) or sharding.num_devices == 1:
        return False
    return bool(sharding.tiling(handle.shape).listed)


def with_gspmd_sharding(handle: Handle) -> Handle:
    """Return the handle under the `GSPMDSharding` with its tiles; nothing moves."""
    sharding = from_jax(handle.sharding)
    tiles = sharding.tiling(handle.shape).to_tile_assignment()
    target = GSPMDSharding(sharding.devices, tiles, memory_kind=sharding.memory_kind)
    return with_sharding(handle, target.jax_sharding(handle.shape))


def with_mesh_order(handle: Handle, devices: tuple[Device, ...]) -> Handle:
    """Return the handle with devices in an order, under tiles that a mesh in that order has."""
    sharding = from_jax(handle.sharding)
    if set(sharding.devices) != set(devices):
        return handle
    handle = with_device_order(handle, devices)
    if not has_permuted_tiles(handle):
        return handle
    # Two arrays with different orders of tiles: one of them is resharded.
    counts = from_jax(handle.sharding).tiling(handle.shape).counts
    dims = ",".join(map(str, (*counts, len(devices) // math.prod(counts))))
    text = f"{{devices=[{dims}]<=[{len(devices)}] last_tile_dim_replicate}}"
    target = GSPMDSharding(devices, text, memory_kind=sharding.memory_kind)
    return reshard(handle, resolve_sharding(handle.shape, target))


def reshard(
    handle: Handle,
    target: ResolvedSharding,
    *,
    source: ResolvedSharding | None = None,
    donate: bool = False,
    fresh: bool = False,
) -> Handle:
    """Return the value of a handle under another sharding, committed.

    Args:
        handle: The handle.
        target: The sharding of the result.
        source: The sharding of the handle, if it is resolved already.
        donate: Whether the result may reuse the memory of the source, or free it early. The source
            may be deleted afterwards; if not, it shares no buffer with the result.
        fresh: Whether buffers that are in place are copied; otherwise they are shared.
    """
    source = source or resolve_sharding(handle.shape, from_jax(handle.sharding))
    if handle.committed and not (donate or fresh) and handle.sharding == target.jax_sharding:
        return handle
    first = handle
    for step in plan.plan_steps(source, target, handle.dtype):
        before = handle
        if step.strategy is plan.Strategy.TO_BYTES:
            handle = _with_dtype(handle, np.uint8)
        elif step.strategy is plan.Strategy.FROM_BYTES:
            handle = _with_dtype(handle, first.dtype)
        else:
            task = ReshardTask(handle, source, step.target, donate, fresh)
            handle = _run(step.strategy, task)
        if before is not first:
            before.delete()
        # The result of a step is private.
        source, donate, fresh = step.target, True, False
    return handle


def sends_pieces(dtype: Any, source: ResolvedSharding, target: ResolvedSharding) -> bool:
    """Return True if a reshard sends pieces between processes."""
    for step in plan.plan_steps(source, target, dtype):
        if step.strategy is plan.Strategy.PERMUTE:
            ends = [(side.tiling, side.sharding.devices) for side in (source, step.target)]
            if permute.schedule(source.shape, dtype.itemsize, *ends).rounds:
                return True
        source = step.target
    return False


_ON_SAME_DEVICES = ("keep", "copy", "compiled", "split")


def _run(strategy: "plan.Strategy", task: ReshardTask) -> Handle:
    """Run one step of a plan; nothing runs if this process has no device of it."""
    handle, source, target, donate, fresh = task
    if not (source.positions or target.positions):
        return assemble(task.aval, target.jax_sharding, [])
    if strategy in _ON_SAME_DEVICES and source.sharding.devices != target.sharding.devices:
        handle = with_device_order(handle, target.sharding.devices)
        source = resolve_sharding(handle.shape, from_jax(handle.sharding))
        task = task._replace(handle=handle, source=source)
    match strategy:
        case plan.Strategy.KEEP:
            if donate and source.memory_kind == default_memory_kind(source.sharding.devices[0]):
                return compiled.reshard_by_program(task)
            if donate or fresh:
                return _copy_committed(handle, target, fresh=True)
            return with_sharding(handle, target.jax_sharding, committed=True)
        case plan.Strategy.COPY:
            return _copy_committed(handle, target)
        case plan.Strategy.HOST_MEMORY:
            return p2p.reshard_in_host_memory(task)
        case plan.Strategy.COMPILED:
            if source.tiling.is_partial and not handle.size:
                # XLA has no reduction of empty arrays.
                empty = np.empty(handle.shape, handle.dtype)
                return put_value(empty, target, weak_type=handle.weak_type)
            # XLA can only reuse the memory of shards of the same size.
            donate = donate and source.shard_shape == target.shard_shape
            return compiled.reshard_by_program(task._replace(donate=donate))
        case plan.Strategy.SPLIT:
            return _split(task)
        case plan.Strategy.CARRY:
            return p2p.carry_shards(task, split(handle), fresh=donate or fresh)
        case plan.Strategy.P2P:
            return p2p.reshard_by_pieces(task)
        case plan.Strategy.PERMUTE:
            return permute.PermuteReshard(task).run()


def _copy_committed(handle: Handle, target: ResolvedSharding, *, fresh: bool = False) -> Handle:
    copied = copy_to(handle, target.jax_sharding, fresh=fresh)
    # jaxlib leaves the copy of an uncommitted array uncommitted.
    return copied if copied.committed else with_sharding(copied, copied.sharding, committed=True)


def _with_dtype(handle: Handle, dtype: Any) -> Handle:
    """Return elements as bytes, or bytes as elements of a dtype, by way of the host."""
    aval = make_aval(handle.shape, dtype, handle.sharding, handle.weak_type)
    buffers = split(handle)
    if not buffers:
        return assemble(aval, handle.sharding, buffers)
    pieces = [np.asarray(buffer).view(dtype) for buffer in buffers]
    devices = [next(iter(buffer.devices())) for buffer in buffers]
    return put(aval, handle.sharding, separate(pieces), devices)


@no_mesh_in_force()
def _split(task: ReshardTask) -> Handle:
    """Return partial results that reduce to an array, from its tiles on the same devices."""
    source, target = task.source, task.target
    zeros = np.zeros(target.shard_shape, task.handle.dtype)
    ends = target.tiling.whole.indices(target.shape, target.positions)
    keeps_tile = plan.keeps_tile(source, target)
    local = [keeps_tile[position] for position in target.positions]
    pieces = [
        _surround_with_zeros(buffer, before, after, zeros, on_host=target.on_host)
        if keeps
        else zeros.copy()
        for buffer, keeps, before, after in zip(
            split(task.handle), local, source.indices, ends, strict=True
        )
    ]
    fresh = task.donate or task.fresh
    return put(task.aval, target.jax_sharding, pieces, target.devices, fresh=fresh)


def _surround_with_zeros(
    buffer: Handle, inner: Index, outer: Index, zeros: np.ndarray, *, on_host: bool
) -> Handle | np.ndarray:
    """Return a tile of an array with zeros around it, of the shape of `zeros`.

    Args:
        buffer: The tile.
        inner: Its slices of the array.
        outer: The slices that the result covers.
        zeros: Zeros of the shape of the result.
        on_host: True if the devices share the memory of the host.
    """
    if buffer.shape == zeros.shape:
        return buffer
    pairs = zip(inner, outer, strict=True)
    starts = [(start.start or 0) - (end.start or 0) for start, end in pairs]
    if not on_host:
        return p2p.enlarge(buffer, np.array(starts, np.int32), zeros.shape)
    piece = zeros.copy()
    piece[tuple(map(slice, starts, np.add(starts, buffer.shape)))] = buffer
    return piece


def put_local_copy(handle: Handle, source: ResolvedSharding, target: ResolvedSharding) -> Handle:
    """Put this process's part of an array of which every process has its own copy.

    Args:
        handle: The array, with all devices in this process.
        source: Its sharding.
        target: A sharding over devices of several processes.
    """
    normal = default_memory_kind(source.sharding.devices[0])
    if target.on_host or {source.memory_kind, target.memory_kind} != {normal}:
        return put_value(np.asarray(handle), target, weak_type=handle.weak_type)
    return p2p.reshard_by_pieces(ReshardTask(handle, source, target, fresh=True))


def put_beside(handle: Handle, operand: Handle) -> Handle:
    """Return an uncommitted handle on the devices of an operand; replicated, if the shapes differ.

    Args:
        handle: The handle; every process has computed the same one.
        operand: A handle.
    """
    sharding = from_jax(operand.sharding)
    if operand.shape != handle.shape:
        kind = sharding.memory_kind
        sharding = GSPMDSharding.get_replicated(sharding.devices, memory_kind=kind)
    target = resolve_sharding(handle.shape, sharding)
    with allow_transfers():
        if sharding.is_fully_addressable:
            return reshard(handle, target)
        return put_value(np.asarray(handle), target, weak_type=handle.weak_type)


def relayout(handle: Handle, layout: Layout | None, where: ResolvedSharding) -> Handle:
    """Return the array under the same sharding in another layout.

    Raises:
        PlacementError: The sharding is not in the default memory of the devices.
    """
    if layout is None or handle.format.layout == layout:
        return handle
    if where.memory_kind != default_memory_kind(where.sharding.devices[0]):
        raise PlacementError(
            f"a layout can only be chosen in the devices' default memory, not in "
            f"{where.memory_kind!r}: give the sharding alone"
        )
    return compiled.reshard_by_program(ReshardTask(handle, where, where), layout)


def uncommit(handle: Handle, weak_type: bool | None = None) -> Handle:
    """Return a handle over the same buffers to which computations need not stay.

    JAX compiles programs for the default layout of uncommitted arrays, whatever layout they have:
    buffers of another layout are copied.

    Args:
        handle: The handle.
        weak_type: True if the dtype is weak; by default as the source.
    """
    handle = _in_default_layout(handle)
    return with_sharding(handle, handle.sharding, committed=False, weak_type=weak_type)


def unify_layouts(pieces: Sequence[Any]) -> list[Any]:
    """Return the pieces of one array, with copies in the default layout unless all have the same.

    An array has the layout of its first buffer, in which programs read the others as well.

    Args:
        pieces: Single-device handles, or NumPy arrays.
    """
    handles = [piece for piece in pieces if not isinstance(piece, np.ndarray)]
    if not handles or (len(handles) == len(pieces) and have_same_layout(handles)):
        return list(pieces)
    if len({custom_layout(piece) for piece in pieces}) == 1:
        return list(pieces)
    return list(map(_in_default_layout, pieces))


def _in_default_layout(handle: Any) -> Any:
    if custom_layout(handle) is None:
        return handle
    where = resolve_sharding(handle.shape, from_jax(handle.sharding))
    return compiled.reshard_by_program(ReshardTask(handle, where, where))
