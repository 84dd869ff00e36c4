"""Sharding rules of primitives: along which dimensions an operation can be split."""

import math
from collections.abc import Callable
from typing import Any

from xlashard.auto.rules import dimension_rules as dims
from xlashard.auto.rules import indexing_rules, product_rules
from xlashard.auto.rules.factors import Factor, Factors, Operation, OpRule, operation_of

__all__ = ["Factor", "OpRule", "op_rule"]

ELEMENTWISE = frozenset(
    (
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan"),
        *("atan2", "atanh", "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt"),
        *("ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy"),
        *("copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv"),
        *("erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a"),
        *("igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log"),
        *("log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name"),
        *("ne", "neg", "nextafter", "not", "one_minus_square", "or", "polygamma"),
        *("polynomial", "population_count", "pow", "random_clone", "random_fold_in"),
        *("random_seed", "real", "reduce_precision"),
        *("regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt"),
        *("square", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "threefry4x32"),
        *("philox2x32", "philox4x32", "tie", "to_edtype", "from_edtype", "xor", "zeta"),
    )
)
"""Primitives that compute each value of their results from values at the same place."""

COPIES = frozenset(
    (
        *("boundary_sharding", "device_put", "layout_constraint", "mesh_cast"),
        *("optimization_barrier", "preduced", "pvary", "reduced_vary_cast"),
        *("relayout", "reshard", "sharding_constraint", "stage", "vary_unreduced_cast"),
        *("with_memory_space_constraint",),
    )
)
"""Primitives whose results are copies of their operands, one by one."""


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
    return OpRule(tuple(_RULES[op.name](op)), product_rules.product_flops(op))


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


_RULES: dict[str, Callable[[Operation], Factors]] = {
    "dot_general": product_rules.dot_general,
    "ragged_dot_general": product_rules.ragged_dot_general,
    "conv_general_dilated": product_rules.conv_general_dilated,
    "gather": indexing_rules.gather,
    **dict.fromkeys(
        (
            *("scatter", "scatter-add", "scatter-sub", "scatter-mul"),
            *("scatter-min", "scatter-max"),
        ),
        indexing_rules.scatter,
    ),
    "dynamic_slice": indexing_rules.dynamic_slice,
    "dynamic_update_slice": indexing_rules.dynamic_update_slice,
    "slice": indexing_rules.slice_,
    "pad": indexing_rules.pad,
    "broadcast_in_dim": dims.broadcast_in_dim,
    "reshape": dims.reshape,
    "transpose": dims.transpose,
    "squeeze": dims.squeeze,
    "bitcast_convert_type": dims.same_leading,
    "rev": dims.beside("dimensions"),
    "concatenate": dims.beside("dimension"),
    "split": dims.beside("axis"),
    "stack": dims.stack,
    "unstack": dims.unstack,
    "tile": dims.tile,
    "sort": dims.beside("dimension"),
    "top_k": dims.beside("axis"),
    "approx_top_k": dims.beside("reduction_dimension"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), dims.cumulative),
    "cumlogsumexp": dims.beside("axis"),
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and"),
            *("reduce_or", "reduce_xor", "argmax", "argmin"),
        ),
        dims.reduction,
    ),
    "reduce": dims.reduce,
    **dict.fromkeys(
        (
            *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
            *("select_and_scatter", "select_and_scatter_add", "select_and_gather_add"),
        ),
        dims.windows,
    ),
    "fft": dims.fft,
    "triangular_solve": dims.triangular_solve,
    **dict.fromkeys(
        (
            *("cholesky", "cholesky_update", "qr", "geqrf", "geqp3", "householder_product"),
            *("ormqr", "eig", "schur", "hessenberg", "tridiagonal", "symmetric_product"),
        ),
        dims.leading(2),
    ),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"), dims.leading(1)),
    **dict.fromkeys(("random_bits", "random_gamma", "random_split"), dims.random),
    **dict.fromkeys(("random_wrap", "random_unwrap"), dims.same_leading),
    **dict.fromkeys(("iota", "iota_2x32_shape", "empty", "empty2"), dims.created),
    **dict.fromkeys(
        (
            *("rng_bit_generator", "rng_uniform", "create_token", "after_all", "axis_index"),
            *("dimension_size", "dim_as_value", "platform_index", "debug_callback"),
            *("debug_print", "dce_sink", "check"),
            # Calls of library functions, which the compiler of TPUs does not cut along a batch.
            *("eigh", "lu", "svd"),
        ),
        dims.whole,
    ),
}
"""Rule of each primitive that is neither elementwise nor a copy."""
