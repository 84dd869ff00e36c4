"""Slow, obvious oracle of sharding rules: runs an equation in parts along a factor."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from xlashard._jax.trace.tracing import bodies
from xlashard.auto.rules.factors import Factor
from xlashard.auto.rules.op_rules import op_rule

COMBINED = {
    **dict.fromkeys(("reduce_max", "reduce_or", "scatter-max"), "maximum"),
    **dict.fromkeys(("reduce_min", "reduce_and", "scatter-min"), "minimum"),
    **dict.fromkeys(("reduce_prod", "scatter-mul"), "multiply"),
    "reduce_xor": "bitwise_xor",
}
"""Function of `jax.numpy` that combines partial results that aren't summed."""

COUNTED = frozenset({"random_bits", "random_split"})
"""Primitives whose parts depend on their place: `test_partitioned` has them."""


def run(eqn: Any, operands: Sequence[Any], params: Any = None) -> list[Any]:
    """Run an equation, perhaps with other parameters, and return its results."""
    results = eqn.primitive.bind(*operands, **{**eqn.params, **(params or {})})
    return list(results) if eqn.primitive.multiple_results else [results]


def visited(jaxpr: Any, args: Sequence[Any]) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Run a jaxpr without control flow, and yield each equation with its operands and results."""
    yield from _visited(jaxpr, jaxpr.consts, args, [])


def _visited(jaxpr: Any, consts: Any, args: Any, results: list[Any]) -> Iterator[Any]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
        made: list[Any] = []
        if op_rule(eqn).known:
            made = run(eqn, operands)
            yield eqn, operands, made
        else:
            (inner,) = bodies(eqn)
            yield from _visited(inner, getattr(inner, "consts", ()), operands, made)
        env.update(zip(eqn.outvars, made, strict=True))
    results += [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]


def pieces(factor: Factor) -> int:
    """Return the smallest number of parts into which a factor can be split, evenly or padded."""
    if factor.size == 1:
        return 2
    return next(n for n in range(2, factor.size + 1) if factor.size % n == 0)


def cut(array: Any, dim: int | None, part: int, count: int) -> Any:
    """Return one of several parts of an array along a dimension; all of it for None.

    They are equal, but for the last one.
    """
    if dim is None:
        return array
    size = -(-array.shape[dim] // count)
    return array[(slice(None),) * dim + (slice(part * size, (part + 1) * size),)]


def in_parts(eqn: Any, factor: Factor, operands: Sequence[Any]) -> list[Any]:
    """Compute an equation in parts along a factor, and put the results together."""
    count = pieces(factor)
    made = []
    for part in range(count):
        own = [cut(x, d, part, count) for x, d in zip(operands, factor.operands, strict=True)]
        special = _SPECIAL.get(eqn.primitive.name)
        results = special(eqn, factor, own, part, count) if special else None
        if eqn.primitive.name == "fft" and factor.halo:
            # Devices take what they need of all others.
            results = [cut(run(eqn, operands)[0], factor.results[0], part, count)]
        elif factor.halo:
            results = _with_neighbors(eqn, factor, operands, part, count)
        if results is None:
            results = run(eqn, own, _params(eqn, factor, count))
        made.append(results)
    if factor.reduced:
        assert set(factor.results) == {None}
        return _combine(eqn, made)
    if not op_rule(eqn).pairwise:
        assert None not in factor.results
    return [
        parts[0] if dim is None else jnp.concatenate(parts, dim)
        for dim, parts in zip(factor.results, zip(*made, strict=True), strict=True)
    ]


def _combine(eqn: Any, made: list[list[Any]]) -> list[Any]:
    if eqn.primitive.name in ("argmax", "argmin"):
        indices, extremes = (jnp.stack(side) for side in zip(*(m[0] for m in made), strict=True))
        best = getattr(jnp, eqn.primitive.name)(extremes, 0)
        return [jnp.take_along_axis(indices, best[None], 0)[0]]
    if eqn.primitive.name == "top_k":
        values, indices = (jnp.concatenate(side, -1) for side in zip(*made, strict=True))
        best, at = jax.lax.top_k(values, eqn.params["k"])
        return [best, jnp.take_along_axis(indices, at, -1)]
    combine = getattr(jnp, COMBINED.get(eqn.primitive.name, "add"))
    out = []
    for parts in zip(*made, strict=True):
        total = parts[0]
        for part in parts[1:]:
            total = combine(total, part)
        out.append(total.astype(parts[0].dtype))
    return out


def _params(eqn: Any, factor: Factor, count: int) -> dict[str, Any]:
    """Return the parameters that differ for a part."""

    def less(key: str, dim: int | None) -> dict[str, Any]:
        assert dim is not None
        sizes = list(eqn.params[key])
        sizes[dim] //= count
        return {key: tuple(sizes)}

    result, operand = factor.results[0], factor.operands[0] if factor.operands else None
    match eqn.primitive.name:
        case "broadcast_in_dim" | "empty":
            return less("shape", result)
        case "reshape":
            return less("new_sizes", result)
        case "slice" if not factor.reduced:
            limits = list(eqn.params["limit_indices"])
            limits[operand] = eqn.invars[0].aval.shape[operand] // count
            return {"limit_indices": tuple(limits)}
        case "dynamic_slice":
            return less("slice_sizes", operand)
        case "gather" if operand is not None:
            numbers = eqn.params["dimension_numbers"]
            if operand not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims):
                return less("slice_sizes", operand)
        case "conv_general_dilated" if None not in factor.operands and not factor.reduced:
            key = "feature_group_count"
            if eqn.params["batch_group_count"] > 1:
                key = "batch_group_count"
            return {key: eqn.params[key] // count}
    return {}


def _with_neighbors(eqn: Any, factor: Factor, operands: Any, part: int, count: int) -> list[Any]:
    """Compute a part by the whole equation, where values beyond the halo are wrong."""
    name = eqn.primitive.name
    if name in ("slice", "pad", "concatenate", "rev"):
        return _shifted(eqn, factor, operands, part, count)
    d = factor.operands[0]
    if name.startswith("cum"):
        return _cumulative(eqn, d, operands[0], part, count)
    wide = operands[0].shape[d]
    begin, end = part * wide // count, (part + 1) * wide // count
    operands = list(operands)
    if name.startswith("select_and_scatter"):
        # The windows of the part's values, and all that compete with these for them.
        stride, size = (eqn.params[key][d] for key in ("window_strides", "window_dimensions"))
        operands[0] = _wrong_outside(operands[0], d, begin - size, end + size)
        begin, end = begin * stride, end * stride
        operands[1] = _wrong_outside(operands[1], d, begin - 2 * size, end + 2 * size)
        return [cut(run(eqn, operands)[0], d, part, count)]
    first, last = _rows(eqn, factor, part, count)
    halo = max(0, begin - max(first, 0)) + max(0, min(last, wide) - end)
    assert halo <= round(factor.halo * wide), (first, last, factor)
    operands[0] = _wrong_outside(operands[0], d, min(first, begin), max(last, end))
    if factor.reduced:
        kernel, k = operands[1], factor.operands[1]
        size = kernel.shape[k] // count
        inside = jnp.arange(kernel.shape[k]) // size == part
        shape = [-1 if i == k else 1 for i in range(kernel.ndim)]
        operands[1] = jnp.where(inside.reshape(shape), kernel, 0)
        return run(eqn, operands)
    return [cut(x, factor.results[0], part, count) for x in run(eqn, operands)]


def _shifted(eqn: Any, factor: Factor, operands: Any, part: int, count: int) -> list[Any]:
    """Compute a part of what shifts or reverses a dimension, of its own values and the halo."""
    k, d = next((k, dim) for k, dim in enumerate(factor.operands) if dim is not None)
    wide, made = operands[k].shape[d], eqn.outvars[0].aval.shape[d]
    size, own = -(-made // count), -(-wide // count)
    begin, end = own * part, min(own * (part + 1), wide)
    match eqn.primitive.name:
        case "slice":
            start = eqn.params["start_indices"][d]
        case "pad":
            start = -eqn.params["padding_config"][d][0]
        case "concatenate":
            start = -sum(each.shape[d] for each in operands[:k])
        case _:
            # A reversed piece is that of another device.
            start = wide - (2 * part + 1) * size
    first = max(size * part + start, 0)
    last = min(min(size * (part + 1), made) + start, wide)
    halo = max(0, begin - first) + max(0, last - end)
    if eqn.primitive.name != "rev":
        shifted = abs(size - own) * (count - 1)
        assert halo <= round(factor.halo * operands[0].shape[d]) + shifted, factor
    operands = list(operands)
    operands[k] = _wrong_outside(operands[k], d, first, last)
    return [cut(x, factor.results[0], part, count) for x in run(eqn, operands)]


def _wrong_outside(array: Any, dim: int, begin: int, end: int) -> Any:
    place = jnp.arange(array.shape[dim])
    shape = [-1 if d == dim else 1 for d in range(array.ndim)]
    return jnp.where(((place >= begin) & (place < end)).reshape(shape), array, 7)


def _rows(eqn: Any, factor: Factor, part: int, count: int) -> tuple[int, int]:
    """Return the first row of the operand that a part needs, and the one behind its last."""
    params, d = eqn.params, factor.operands[0]
    if eqn.primitive.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        i = numbers.lhs_spec.index(d)
        window = eqn.invars[1].aval.shape[numbers.rhs_spec[i]]
        made = eqn.outvars[0].aval.shape[numbers.out_spec[i]]
        keys, i = ("window_strides", "rhs_dilation", "lhs_dilation"), i - 2
    else:
        window, made, i = params["window_dimensions"][d], eqn.outvars[0].aval.shape[d], d
        keys = ("window_strides", "window_dilation", "base_dilation")
    stride, spread, dilation = (params[key][i] if key in params else 1 for key in keys)
    taps, places = (0, window), (0, made)
    if factor.reduced:
        taps = (part * window // count, (part + 1) * window // count)
    else:
        places = (part * made // count, (part + 1) * made // count)
    low = params["padding"][i][0]
    first = places[0] * stride + taps[0] * spread - low
    last = (places[1] - 1) * stride + (taps[1] - 1) * spread - low
    return -(-first // dilation), last // dilation + 1


def _cumulative(eqn: Any, dim: int, operand: Any, part: int, count: int) -> list[Any]:
    (made,) = run(eqn, [cut(operand, dim, part, count)])
    others = range(part + 1, count) if eqn.params["reverse"] else range(part)
    fold, join = {
        "cumsum": (jnp.sum, jnp.add),
        "cumprod": (jnp.prod, jnp.multiply),
        "cummax": (jnp.max, jnp.maximum),
        "cummin": (jnp.min, jnp.minimum),
    }[eqn.primitive.name]
    for other in others:
        made = join(made, fold(cut(operand, dim, other, count), axis=dim, keepdims=True))
    return [made]


def _iota(eqn: Any, factor: Factor, own: Any, part: int, count: int) -> list[Any]:
    (dim,) = factor.results
    shape = list(eqn.outvars[0].aval.shape)
    shape[dim] //= count
    (made,) = run(eqn, own, {"shape": tuple(shape)})
    offset = part * shape[dim] if dim == eqn.params["dimension"] else 0
    return [made + jnp.asarray(offset, made.dtype)]


def _iota_2x32(eqn: Any, factor: Factor, own: Any, part: int, count: int) -> list[Any]:
    shape, dim = eqn.outvars[0].aval.shape, factor.results[0]
    # The results are the upper and lower halves of positions in the flat array.
    place = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return [jnp.zeros_like(cut(place, dim, part, count)), cut(place, dim, part, count)]


def _gather(eqn: Any, factor: Factor, own: Any, part: int, count: int) -> list[Any] | None:
    if not factor.reduced:
        return None
    operand, indices = own
    (d, _), numbers = factor.operands, eqn.params["dimension_numbers"]
    column = numbers.start_index_map.index(d)
    shifted = indices.at[..., column].add(-part * operand.shape[d])
    fill = jax.lax.GatherScatterMode.FILL_OR_DROP
    return run(eqn, [operand, shifted], {"mode": fill, "fill_value": 0})


def _slice(eqn: Any, factor: Factor, own: Any, part: int, count: int) -> list[Any] | None:
    if not factor.reduced:
        return None
    # Each device has its own values of the part, and zeros.
    (d,) = {k for k in factor.operands if k is not None}
    whole = eqn.invars[0].aval.shape[d]
    before = part * own[0].shape[d]
    edges = [(0, 0)] * own[0].ndim
    edges[d] = (before, whole - before - own[0].shape[d])
    return run(eqn, [jnp.pad(own[0], edges)])


def _scatter(eqn: Any, factor: Factor, own: Any, part: int, count: int) -> list[Any] | None:
    operand, indices, updates = own
    if factor.reduced:
        if part and eqn.primitive.name == "scatter-mul":
            return run(eqn, [jnp.ones_like(operand), indices, updates])
        if part and eqn.primitive.name in ("scatter-add", "scatter-sub"):
            return run(eqn, [jnp.zeros_like(operand), indices, updates])
        return None
    if factor.divides_work:
        return None
    d = factor.operands[0]
    column = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims.index(d)
    shifted = indices.at[..., column].add(-part * operand.shape[d])
    drop = jax.lax.GatherScatterMode.FILL_OR_DROP
    return run(eqn, [operand, shifted, updates], {"mode": drop})


def _update(eqn: Any, factor: Factor, own: Any, part: int, count: int) -> list[Any] | None:
    if factor.divides_work:
        return None
    operand, update, *starts = own
    d = factor.operands[0]
    start = starts[d] - part * operand.shape[d]
    (written,) = run(eqn, [operand, update, *starts[:d], start, *starts[d + 1 :]])
    return [jnp.where((start >= 0) & (start < operand.shape[d]), written, operand)]


def _arg(eqn: Any, factor: Factor, own: Any, part: int, count: int) -> list[Any] | None:
    if not factor.reduced:
        return None
    (index,) = run(eqn, own)
    (d,) = eqn.params["axes"]
    extreme = jnp.max if eqn.primitive.name == "argmax" else jnp.min
    return [(index + part * own[0].shape[d], extreme(own[0], axis=d))]


def _top_k(eqn: Any, factor: Factor, own: Any, part: int, count: int) -> list[Any] | None:
    if not factor.reduced:
        return None
    values, indices = run(eqn, own)
    return [values, indices + part * own[0].shape[eqn.params["axis"]]]


_SPECIAL = {
    "top_k": _top_k,
    "iota": _iota,
    "iota_2x32_shape": _iota_2x32,
    "gather": _gather,
    "slice": _slice,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        _scatter,
    ),
    "dynamic_update_slice": _update,
    "argmax": _arg,
    "argmin": _arg,
}
"""Parts that depend on their place, by primitive; None where they don't."""
