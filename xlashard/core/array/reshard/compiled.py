"""Reshards by a compiled program, whose collectives XLA chooses, as a whole or chunk by chunk.

The program is compiled like any other program of this package, so that any tiling can be its source
and its target, under either partitioner and across processes. A collective needs buffers for what
it sends and receives: about two shards for an all-to-all, and up to the whole array on each device
where the partitioner finds nothing better. Split into chunks of which every device has a part
before and after, the same reshard needs them for one chunk at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout

from xlashard._jax import originals
from xlashard._jax.lowering import LoweringTarget, lower_body, uses_shardy
from xlashard._jax.runtime import compiler, execute
from xlashard._jax.runtime.global_state import cleared_with_jax
from xlashard._jax.runtime.shardings import Device, layout_text
from xlashard._jax.runtime.transfer import Handle, run_one
from xlashard._jax.trace.jaxprs import from_function
from xlashard.core.array.placement.put import put_value
from xlashard.core.array.placement.target import resolve_sharding
from xlashard.core.array.reshard import ReshardTask
from xlashard.core.program.compile import compile_program
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.program.lowered import lower_program
from xlashard.core.program.plan import Partitioner, ProgramPlan, ValuePlan
from xlashard.core.sharding import (
    GSPMDSharding,
    Mesh,
    NamedSharding,
    XLACompatibleSharding,
    partition_spec,
)
from xlashard.core.sharding.axes import axes_of
from xlashard.geometry import Tiling
from xlashard.geometry.intermediate_tilings import intermediate_tilings
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class Chunks:
    """Split of an array into chunks.

    Attributes:
        shape: Shape of the array with each dimension in two: `[tiles, extent, ...]`; only the first
            of each pair is sharded, before and after.
        dim: Dimension of that shape along which chunks are cut.
        count: Number of chunks.
    """

    shape: tuple[int, ...]
    dim: int
    count: int

    @property
    def extent(self) -> int:
        """Extent of a chunk along the dimension; chunks overlap where it does not divide."""
        return -(-self.shape[self.dim] // self.count)


def split_into_chunks(
    shape: Sequence[int], source: Tiling, target: Tiling, count: int
) -> Chunks | None:
    """Return chunks along the dimension with most room for them; None if none has any.

    Args:
        shape: Shape of the array; it divides into the tiles.
        source: Tiles before.
        target: Tiles after.
        count: Requested number of chunks; there may be fewer.
    """
    tiles = list(map(math.lcm, source.counts, target.counts))
    extents = [n // t for n, t in zip(shape, tiles, strict=True)]
    longest = max(extents, default=1)
    if longest < 2:
        return None
    halves = tuple(n for pair in zip(tiles, extents, strict=True) for n in pair)
    return Chunks(halves, 2 * extents.index(longest) + 1, min(count, longest))


def reshard_chunk(
    chunks: Chunks, source: Tiling, target: Tiling, devices: tuple[Device, ...]
) -> Callable[[Any, Any, Any], list[Any]]:
    """Return a function `(x, out, number)` that writes one chunk of `x` into `out`."""
    before, *steps = [
        _in_halves(tiling, devices)
        for tiling in (source, *intermediate_tilings(source, target), target)
    ]
    after = steps[-1]
    last = chunks.shape[chunks.dim] - chunks.extent
    constrain = originals.with_sharding_constraint

    def move(x: Any, out: Any, number: Any) -> list[Any]:
        start = jnp.minimum(number * chunks.extent, last)
        halves = constrain(jax.lax.reshape(x, chunks.shape), before)
        chunk = jax.lax.dynamic_slice_in_dim(halves, start, chunks.extent, chunks.dim)
        for sharding in (before, *steps):
            chunk = constrain(chunk, sharding)
        halves = constrain(jax.lax.reshape(out, chunks.shape), after)
        halves = jax.lax.dynamic_update_slice_in_dim(halves, chunk, start, chunks.dim)
        return [jax.lax.reshape(constrain(halves, after), x.shape)]

    return move


def _in_halves(tiling: Tiling, devices: tuple[Device, ...]) -> GSPMDSharding:
    counts = tuple(n for count in tiling.counts for n in (count, 1))
    halves = Tiling(counts, tiling.num_devices, tiling.steps, tiling.listed)
    return GSPMDSharding(devices, halves.to_tile_assignment())


_PROGRAMS_KEPT = 512

# Less temporary memory never runs out, and one program compiles sooner than two.
_NEGLIGIBLE_BYTES = 1 << 20


@dataclass(frozen=True)
class ReshardRequest:
    """Cache key of a compiled reshard.

    Attributes:
        shape: Global shape, in elements.
        dtype: Name of the dtype.
        devices: Devices of source and target.
        tilings: Tilings of source and target.
        layouts: Layouts of source and target as in a module; None for the default.
        donate: Whether the result may reuse the memory of the source.
        partitioner: The partitioner.
    """

    shape: tuple[int, ...]
    dtype: Any
    devices: tuple[Device, ...]
    tilings: tuple[Tiling, Tiling]
    layouts: tuple[str | None, str | None]
    donate: bool
    partitioner: Partitioner

    @property
    def shard_bytes(self) -> tuple[int, int]:
        """Bytes of a shard before and after."""
        itemsize = jnp.dtype(self.dtype).itemsize
        source, target = (math.prod(t.shard_shape(self.shape)) for t in self.tilings)
        return source * itemsize, target * itemsize


def reshard_by_program(
    task: ReshardTask, layout: Layout | None = None, *, alike: bool = False
) -> Handle:
    """Reshard on the same devices, in their default memory.

    Args:
        task: The array, and a target with the same devices in the same order.
        layout: Layout of the result; None for the default.
        alike: Whether all processes of the devices run this program next for certain, so that they
            skip the check of equal programs.
    """
    handle, source, target, donate, _ = task
    request = ReshardRequest(
        shape=target.shape,
        dtype=handle.dtype,
        devices=target.sharding.devices,
        tilings=(source.tiling, target.tiling),
        layouts=(unusual_layout(handle), layout_text(layout, handle.dtype)),
        donate=donate,
        partitioner=_partitioner(source.tiling, target.tiling),
    )
    result = execute.make_result_handler(task.aval, target.jax_sharding, True)
    move = compiled_reshard_for(request)
    if not alike:
        move.program.admit()
    if move.chunks is None:
        return run_one(move.program.executable, [handle], result)
    numbers = [_replicated(number, request.devices) for number in range(move.chunks.count)]
    blank = _blank(request)
    blank.admit()
    out = run_one(blank.executable, numbers[:1], result)
    for number in numbers:
        out = run_one(move.program.executable, [handle, out, number], result)
    return out


def _partitioner(*tilings: Tiling) -> Partitioner:
    """Return the partitioner in force; Shardy for unreduced arrays."""
    if uses_shardy() or any(tiling.is_partial for tiling in tilings):
        return Partitioner.SHARDY
    return Partitioner.GSPMD


@lru_cache(maxsize=_PROGRAMS_KEPT)
def _replicated(number: int, devices: tuple[Device, ...]) -> Handle:
    """Return a number that is replicated over all devices."""
    target = resolve_sharding((), GSPMDSharding.get_replicated(devices))
    return put_value(np.array(number, np.int32), target)


def unusual_layout(handle: Handle) -> str | None:
    """Return the layout if it is not the default one of programs, else None."""
    if handle.ndim < 2:
        return None
    layout = handle.format.layout
    if layout is None or layout.major_to_minor == tuple(range(handle.ndim)):
        return None
    return layout_text(layout, handle.dtype)


@dataclass(frozen=True, eq=False)
class CompiledReshard:
    """Compiled reshard from one tiling to another.

    Attributes:
        program: Program for the array, or for one chunk of it, into the result so far.
        chunks: The chunks, or None if the array is resharded as a whole.
        extra_bytes: Bytes on each device beside source and target; 0 if unknown.
    """

    program: CompiledProgram
    chunks: Chunks | None
    extra_bytes: int


@cleared_with_jax
@lru_cache(maxsize=_PROGRAMS_KEPT)
def compiled_reshard_for(request: ReshardRequest) -> CompiledReshard:
    """Return the cached program, by chunks if the whole array needed more than a shard's room."""
    whole = _compiled(request, _reshard_whole(request), ["x"], donated=[request.donate])
    best = CompiledReshard(whole, None, compiler.extra_bytes(whole.executable) or 0)
    if any(tiling.is_partial for tiling in request.tilings):
        return best
    room = max(request.shard_bytes)
    count = 1
    while best.extra_bytes > max(room, _NEGLIGIBLE_BYTES):
        # Somewhat more than proportional: not all buffers shrink with the chunks.
        count *= 2 * math.ceil(best.extra_bytes / room / 2)
        chunks = split_into_chunks(request.shape, *request.tilings, count)
        if chunks is None:
            break
        chunked = _by_chunks(request, chunks)
        if chunked.extra_bytes < best.extra_bytes:
            best = chunked
        if chunks.count < count:
            break
    return best


def _reshard_whole(request: ReshardRequest) -> Callable[[Any], list[Any]]:
    """Return a function of the array that leads the partitioner by steps that it knows."""
    source, target = request.tilings
    if source.is_partial or target.is_partial:
        return lambda x: [x]
    steps = [
        GSPMDSharding(request.devices, tiling.to_tile_assignment())
        for tiling in intermediate_tilings(source, target)
    ]
    return lambda x: [reduce(originals.with_sharding_constraint, steps, x)]


def _by_chunks(request: ReshardRequest, chunks: Chunks) -> CompiledReshard:
    function = reshard_chunk(chunks, *request.tilings, request.devices)
    program = _compiled(request, function, ["x", "out", "number"], donated=[False, True, False])
    # The result is an argument too, and donated.
    extra = (compiler.extra_bytes(program.executable) or 0) + request.shard_bytes[1]
    return CompiledReshard(program, chunks, extra)


@cleared_with_jax
@lru_cache(maxsize=_PROGRAMS_KEPT)
def _blank(request: ReshardRequest) -> CompiledProgram:
    """Return a program for an empty result; its argument is any number."""
    shape, dtype = request.shape, request.dtype
    return _compiled(request, lambda number: [jnp.zeros(shape, dtype)], ["number"], donated=[False])


def _shardings(request: ReshardRequest) -> tuple[XLACompatibleSharding, ...]:
    """Return the shardings of source and target, on one mesh if either is unreduced."""
    partial = next((tiling for tiling in request.tilings if tiling.is_partial), None)
    if partial is None:
        return tuple(
            GSPMDSharding(request.devices, tiling.to_tile_assignment())
            for tiling in request.tilings
        )
    axes = axes_of(partial)
    grid = np.array(request.devices, dtype=object).reshape(axes.grid.axis_sizes)
    types = (jax.sharding.AxisType.Explicit,) * grid.ndim
    mesh = Mesh(grid, axes.grid.axis_names, axis_types=types)
    return tuple(
        NamedSharding(mesh, partition_spec(axes.spec if tiling.is_partial else axes.spec.whole))
        for tiling in request.tilings
    )


def _compiled(
    request: ReshardRequest,
    function: Callable[..., list[Any]],
    names: Sequence[str],
    donated: Sequence[bool],
) -> CompiledProgram:
    """Compile a program whose arguments have the names of the function's parameters."""
    x, out = (
        ValuePlan(request.shape, str(request.dtype), sharding, layout=layout)
        for sharding, layout in zip(_shardings(request), request.layouts, strict=True)
    )
    number = ValuePlan((), "int32", GSPMDSharding.get_replicated(request.devices))
    known = {"x": x, "number": number, "out": out}
    args = [replace(known[name], name=name) for name in names]
    avals = [jax.typeof(jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype))) for a in args]
    result = jax.typeof(jax.ShapeDtypeStruct(request.shape, request.dtype))
    device = request.devices[0]
    target = LoweringTarget(
        compiler.platform_of(device), compiler.client_of(device), request.devices
    )
    body = lower_body(from_function(function, avals, "reshard"), "reshard", list(names), target)
    plan = ProgramPlan(
        name="reshard",
        devices=request.devices,
        args=tuple(args),
        results=(replace(out, name="x"),),
        donated=tuple(donated),
        partitioner=request.partitioner,
    )
    return compile_program(lower_program(plan, body, (avals, [result])))
