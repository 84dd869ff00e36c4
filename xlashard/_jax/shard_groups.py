"""A primitive that puts values into one group, whose members the partitioner shards alike."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from xlashard._jax.lowering import register_lowering
from xlashard._jax.private import batching, core, ir, mlir

# Every group has a number of its own: a program may be inlined into another one.
_NUMBERS = itertools.count()


@functools.lru_cache(maxsize=1)
def shard_group_primitive() -> Any:
    """Return the primitive of several values, whose results are these values."""
    primitive = core.Primitive("shard_alike")
    primitive.multiple_results = True
    primitive.def_impl(jax.jit(primitive.bind))
    primitive.def_abstract_eval(lambda *types: list(types))
    register_lowering(primitive, _lower)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive)
    return primitive


def _lower(context: Any, *values: Any) -> Sequence[Any]:
    if jax.config.jax_use_shardy_partitioner:
        number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), next(_NUMBERS))
        for value in values:
            mlir.dialects.sdy.sharding_group(value, number)
    return values


def _batch(
    primitive: Any, axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], **_: Any
) -> tuple[Any, Any]:
    """Move the mapped dimensions to the front, so that the values keep equal ranks."""
    moved = [
        jax.numpy.broadcast_to(value, (axis_data.size, *value.shape))
        if dim is None
        else jax.numpy.moveaxis(value, dim, 0)
        for value, dim in zip(values, dims, strict=True)
    ]
    return primitive.bind(*moved), [0] * len(moved)
