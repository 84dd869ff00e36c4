"""Sharding rules of primitives: along which dimensions an operation can be split.

The rules of matrix products and convolutions stand here, with their FLOP.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from xlashard._jax.trace.jaxprs import product_flops
from xlashard._jax.trace.primitive_names import COPIES, ELEMENTWISE, REDUCTIONS, SCATTERS
from xlashard.auto.rules import dimension_rules as dims
from xlashard.auto.rules.factors import (
    Factors,
    Operation,
    OpRule,
    operation_of,
    remaining,
    wide_pieces,
)

type Rule = Callable[[Operation], Factors]
"""Rule of a primitive, which yields the factors of an operation."""


def op_rule(eqn: Any) -> OpRule:
    """Return the sharding rule of an equation without inner jaxprs.

    A scatter or reduction holds a jaxpr of scalars, which is no program of its own: it has a rule.

    Args:
        eqn: The equation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
        >>> rule = op_rule(jax.make_jaxpr(jnp.dot)(x, w).eqns[0])
        >>> [(factor.size, factor.results) for factor in rule.factors]
        [(8, (0,)), (4, (1,)), (16, (None,))]
        >>> rule.flops
        1024.0
    """
    op = operation_of(eqn)
    if op.name in COPIES and len(op.operands) == len(op.results) > 1:
        return OpRule(tuple(_pairs(op)), pairwise=True)
    if op.name in ELEMENTWISE | COPIES and (rule := _elementwise(op)):
        return rule
    if op.name not in _RULES:
        return OpRule((), known=False)
    passes = dims.fft_passes(op) if op.name == "fft" else 1.0
    return OpRule(tuple(_RULES[op.name](op)), product_flops(op.eqn), passes)


def _pairs(op: Operation) -> Factors:
    for i, shape in enumerate(op.operands):
        for d in range(len(shape)):
            yield from op.factor({i: d}, {i: d})


def _elementwise(op: Operation) -> OpRule | None:
    """Return the rule of an elementwise operation; None for shapes that do not broadcast."""
    whole = max(
        (*op.operands, *op.results), key=lambda shape: (len(shape), math.prod(shape)), default=()
    )
    arrays = [shape for shape in (*op.operands, *op.results) if shape]
    if any(len(shape) != len(whole) for shape in arrays):
        return None
    factors = []
    for d, size in enumerate(whole):
        # Operands may have size 1 where the result has more.
        at = [
            {i: d for i, shape in enumerate(side) if shape and shape[d] == size}
            for side in (op.operands, op.results)
        ]
        factors += op.factor(at[0], at[1])
    return OpRule(tuple(factors), elementwise=all(shape == whole for shape in arrays))


def dot_general(op: Operation) -> Factors:
    """Yield the factors of a matrix product: batch, rows, columns, contracted dimensions."""
    yield from _product(op, op.params["dimension_numbers"], (), 0)


def _product(op: Operation, numbers: Any, groups: Sequence[int], result: int) -> Factors:
    """Yield the factors of a product, whose result's dimensions begin at `result`."""
    (left_contracted, right_contracted), (left_batch, right_batch) = numbers
    for left, right in zip(left_batch, right_batch, strict=True):
        most = op.operands[0][left]
        yield from op.factor({0: left, 1: right}, {0: result}, most_padded=most)
        result += 1
    others = ((*left_contracted, *left_batch), (*right_contracted, *right_batch, *groups))
    for i, used in enumerate(others):
        for d in remaining(len(op.operands[i]), used):
            yield from op.factor({i: d}, {0: result}, most_padded=op.operands[i][d])
            result += 1
    for left, right in zip(left_contracted, right_contracted, strict=True):
        most = op.operands[0][left]
        yield from op.factor({0: left, 1: right}, {}, reduced=True, most_padded=most)


def ragged_dot_general(op: Operation) -> Factors:
    """Yield the factors of a product whose rows, contracted indices or batches form groups.

    Neither the ragged dimension nor the groups are a factor: the compiler of TPUs gathers both. It
    refuses groups of several sizes along a batch.
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    (ragged,) = numbers.lhs_ragged_dimensions
    # A ragged contraction puts the groups before the dimensions of the product.
    start = int(ragged in numbers.dot_dimension_numbers[0][0])
    batched = len(op.operands[2]) > 1
    groups = numbers.rhs_group_dimensions
    for factor in _product(op, numbers.dot_dimension_numbers, groups, start):
        left = factor.operands[0]
        if left != ragged and not (batched and left is not None):
            yield factor


def conv_general_dilated(op: Operation) -> Factors:
    """Yield the factors of a convolution: batch, features, groups, and spatial dimensions."""
    numbers = op.params["dimension_numbers"]
    left, right, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups, batches = op.params["feature_group_count"], op.params["batch_group_count"]
    if batches == 1:
        yield from op.factor({0: left[0]}, {0: out[0]})
    if groups > 1:
        # Of a depthwise kernel with several outputs per feature, the compiler gathers the features.
        if op.operands[1][right[1]] > 1 or op.operands[1][right[0]] == groups:
            yield from op.factor({0: left[1], 1: right[0]}, {0: out[1]}, size=groups)
    elif batches > 1:
        yield from op.factor({0: left[0], 1: right[0]}, {0: out[1]}, size=batches)
        yield from op.factor({0: left[1], 1: right[1]}, {}, reduced=True)
    else:
        yield from op.factor({1: right[0]}, {0: out[1]})
        yield from op.factor({0: left[1], 1: right[1]}, {}, reduced=True)
    for i in range(2, len(left)):
        yield from _spatial(op, i)


def _spatial(op: Operation, i: int) -> Factors:
    """Yield the factor of a spatial dimension, whose pieces overlap by a halo.

    With a window as wide as the image, as in the gradient of a kernel, the window is cut, too, and
    the devices' results are summed. Of the gradient of a grouped kernel, the compiler gathers the
    image, unless each group has one feature and one output.
    """
    params, numbers = op.params, op.params["dimension_numbers"]
    batches = params["batch_group_count"]
    channels = {op.operands[0][numbers.lhs_spec[0]], op.operands[1][numbers.rhs_spec[0]]}
    left, right, out = (spec[i] for spec in numbers)
    wide, window, result = op.operands[0][left], op.operands[1][right], op.results[0][out]
    stride, spread, dilation = (
        params[key][i - 2] for key in ("window_strides", "rhs_dilation", "lhs_dilation")
    )
    if not wide:
        return
    if wide * dilation == result * stride:
        halo = max(0, -(((window - 1) * spread + 1 - stride) // -dilation))
        size = wide_pieces(math.gcd(wide, result), wide, halo)
        most = min(wide, result) // max(halo, 1)
        yield from op.factor({0: left}, {0: out}, size=size, halo=halo / wide, most_padded=most)
    elif dilation == 1 and wide == window * spread and (batches == 1 or channels == {batches}):
        halo = max(0, (result - 1) * stride + 1 - spread)
        size = wide_pieces(window, wide, halo)
        most, sides = min(wide, window) // max(halo, 1), {0: left, 1: right}
        yield from op.factor(sides, {}, size=size, reduced=True, halo=halo / wide, most_padded=most)


_PRIMITIVES: dict[Rule, Collection[str]] = {
    dot_general: ("dot_general",),
    ragged_dot_general: ("ragged_dot_general",),
    conv_general_dilated: ("conv_general_dilated",),
    dims.gather: ("gather",),
    dims.scatter: SCATTERS,
    dims.dynamic_slice: ("dynamic_slice",),
    dims.dynamic_update_slice: ("dynamic_update_slice",),
    dims.slice_: ("slice",),
    dims.pad: ("pad",),
    dims.broadcast_in_dim: ("broadcast_in_dim",),
    dims.reshape: ("reshape",),
    dims.transpose: ("transpose",),
    dims.squeeze: ("squeeze",),
    dims.same_leading: ("bitcast_convert_type", "random_wrap", "random_unwrap"),
    dims.reverse: ("rev",),
    dims.concatenate: ("concatenate",),
    dims.beside("dimension"): ("sort",),
    dims.beside("axis"): ("split", "cumlogsumexp"),
    dims.top_k: ("top_k",),
    dims.beside("reduction_dimension"): ("approx_top_k",),
    dims.stack: ("stack",),
    dims.unstack: ("unstack",),
    dims.tile: ("tile",),
    dims.cumulative: ("cumsum", "cumprod", "cummax", "cummin"),
    dims.reduction: (*REDUCTIONS, "reduce_xor"),
    dims.reduce: ("reduce",),
    dims.windows: (
        *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        *("select_and_scatter", "select_and_scatter_add", "select_and_gather_add"),
    ),
    dims.fft: ("fft",),
    dims.triangular_solve: ("triangular_solve",),
    dims.leading(2): (
        *("cholesky", "cholesky_update", "qr", "geqrf", "geqp3", "householder_product"),
        *("ormqr", "eig", "schur", "hessenberg", "tridiagonal", "symmetric_product"),
    ),
    dims.leading(1): ("lu_pivots_to_permutation", "tridiagonal_solve"),
    dims.random: ("random_bits", "random_gamma", "random_split"),
    dims.created: ("iota", "iota_2x32_shape", "empty", "empty2"),
    dims.whole: (
        *("rng_bit_generator", "rng_uniform", "create_token", "after_all", "axis_index"),
        *("dimension_size", "dim_as_value", "platform_index", "debug_callback"),
        *("debug_print", "dce_sink", "check"),
        # Calls of library functions, which the compiler of TPUs does not cut along a batch.
        *("eigh", "lu", "svd"),
    ),
}
"""Primitives of each rule, those that are neither elementwise nor copies."""

_RULES = {name: rule for rule, names in _PRIMITIVES.items() for name in names}
