"""What `jax.export` asks of a traced function: a module of JAX's own making."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Format

from xlashard.pjit.lower import LoweringRequest
from xlashard.pjit.shardings.resources import UNSPECIFIED
from xlashard.pjit.stages.info import StageInfo, struct
from xlashard.sharding import to_jax


def lower_by_jax(
    fun: Any, info: StageInfo, order: LoweringRequest, platforms: Sequence[str] | None, private: Any
) -> Any:
    """Lowers a traced function as `jax.jit` would, arguments and results placed as here.

    An exported module follows JAX's calling convention, with symbolic dimensions and several
    platforms, so JAX writes it. What the function says of shardings is said to it.

    Args:
        fun: Runs what was traced, in the trace of JAX.
        info: The outside of the function.
        order: The program that the traced call needs here.
        platforms: Those that the module shall run on.
        private: What `jax.export` hands to JAX's own stage.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    call.__name__ = call.__qualname__ = info.name
    placement = order.placement
    ins, outs = (
        [
            _place(sharding, layout, aval, alone=len(placement.devices) == 1)
            for sharding, layout, aval in zip(shardings, layouts, avals, strict=True)
        ]
        for shardings, layouts, avals in (
            (placement.in_shardings, order.layouts[0], info.in_avals),
            (placement.out_shardings, order.layouts[1], info.out_avals),
        )
    )
    args, kwargs = info.in_tree.unflatten(map(struct, info.in_avals, ins))
    places = [UNSPECIFIED if place is None else place for place in outs]
    outer = jax.jit(call, out_shardings=info.out_tree.unflatten(places))
    traced: Any = outer.trace(*args, **kwargs)
    return traced.lower(lowering_platforms=platforms, _private_parameters=private)


def _place(sharding: Any, layout: Any, aval: Any, *, alone: bool) -> Any:
    """The place of an argument or result as JAX takes it; None leaves it open."""
    if sharding is None or (alone and layout is None and sharding.memory_kind is None):
        return None
    twin: Any = to_jax(sharding, aval.shape)
    return twin if layout is None else Format(layout, twin)
