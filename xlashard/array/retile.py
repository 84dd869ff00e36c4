"""A program that changes nothing but the tiles: XLA finds the collectives.

It is compiled like any other program of this package, so that every tiling that can be said at all
can be its source and its destination, under either partitioner and across processes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.experimental.layout import Layout

from xlashard._jax import compiling
from xlashard._jax.caches import cleared_with_jax
from xlashard._jax.jaxprs import from_function
from xlashard._jax.lowering import LoweringTarget, lower_body, uses_shardy
from xlashard._jax.shardings import Device, layout_text
from xlashard._jax.transfer import Handle, make_aval, run_one
from xlashard.array.placement import Places
from xlashard.geometry import Tiling
from xlashard.program import (
    Partitioner,
    Program,
    ProgramPlan,
    ValuePlan,
    compile_program,
    lower_program,
)
from xlashard.sharding import GSPMDSharding

_PROGRAMS_KEPT = 512


@dataclass(frozen=True)
class _Order:
    """What the program depends on.

    Attributes:
        shape: Global shape, in elements.
        dtype: Its name.
        devices: Of source and destination alike.
        tilings: Of the source and of the destination.
        layouts: Of the source and of the destination, as a module writes them; None for default.
        donate: Whether the source's memory may be used for the result.
        partitioner: Who finds the collectives.
    """

    shape: tuple[int, ...]
    dtype: Any
    devices: tuple[Device, ...]
    tilings: tuple[Tiling, Tiling]
    layouts: tuple[str | None, str | None]
    donate: bool
    partitioner: Partitioner


def retile(
    handle: Handle, source: Places, target: Places, layout: Layout | None, *, donate: bool
) -> Handle:
    """The same value in other tiles on the same devices, in their default memory.

    Args:
        handle: The source.
        source: Where it is.
        target: Where to; its devices are the source's, in the same order.
        layout: Of the result in memory; None for the default one.
        donate: Whether the source's memory may be used for the result; it is deleted then.
    """
    order = _Order(
        shape=target.shape,
        dtype=handle.dtype,
        devices=target.sharding.devices,
        tilings=(source.tiling, target.tiling),
        layouts=(_unusual_layout(handle), layout_text(layout, handle.dtype)),
        donate=donate,
        partitioner=Partitioner.SHARDY if uses_shardy() else Partitioner.GSPMD,
    )
    aval = make_aval(target.shape, handle.dtype, target.twin, handle.weak_type)
    result_handler = compiling.result_handler(aval, target.twin, True)
    return run_one(_program(order).executable, handle, result_handler)


def _unusual_layout(handle: Handle) -> str | None:
    """The layout in memory, where its order is not the one that a program takes by default."""
    if handle.ndim < 2:
        return None
    layout = handle.format.layout
    if layout is None or layout.major_to_minor == tuple(range(handle.ndim)):
        return None
    return layout_text(layout, handle.dtype)


@cleared_with_jax
@lru_cache(maxsize=_PROGRAMS_KEPT)
def _program(order: _Order) -> Program:
    aval = jax.typeof(jax.ShapeDtypeStruct(order.shape, order.dtype))
    jaxpr = from_function(lambda x: [x], [aval], "reshard")
    device = order.devices[0]
    target = LoweringTarget(
        compiling.platform_of(device), compiling.client_of(device), order.devices
    )
    body = lower_body(jaxpr, "reshard", ["x"], target)
    argument, result = (
        ValuePlan(
            order.shape,
            str(order.dtype),
            GSPMDSharding(order.devices, tiling.to_tile_assignment()),
            layout=layout,
            name="x",
        )
        for tiling, layout in zip(order.tilings, order.layouts, strict=True)
    )
    plan = ProgramPlan(
        name="reshard",
        devices=order.devices,
        args=(argument,),
        results=(result,),
        donated=(order.donate,),
        partitioner=order.partitioner,
    )
    lowered = lower_program(plan, body)
    return compile_program(lowered, ([aval], [aval]), committed=True)
