"""Groups of JAX's primitives by name.

A release of JAX that adds or renames a primitive changes these tables. What holds for one primitive
alone, such as its rule in `xlashard.auto.rules.op_rules`, stands with its function.
"""

CONSTRAINT = "sharding_constraint"
"""Primitive of sharding constraints, of xlashard's and of JAX's."""

CONSTRAINTS = {CONSTRAINT: "sharding", "reshard": "dst_sharding"}
"""Primitives that prescribe the sharding of a value, by the parameter that has the sharding.

JAX's `reshard` prescribes it on Explicit mesh axes.
"""

DEVICE_PROGRAMS = frozenset(("custom_partitioning", "pallas_call", "shard_map"))
"""Primitives whose inner jaxprs are programs for one device."""

CONTROL_FLOW = frozenset(("cond", "scan", "while"))
"""Loops and branches."""

CALLBACKS = frozenset(
    ("debug_callback", "debug_print", "io_callback", "pure_callback", "python_callback")
)
"""Calls of Python functions at run time."""

COLLECTIVES = frozenset(
    (
        *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pbroadcast"),
        *("pmax", "pmean", "pmin", "ppermute", "psum", "psum2", "psum_invariant", "psum_scatter"),
        *("ragged_all_to_all", "reduce_scatter"),
    )
)
"""Collectives that a program calls itself, by the last part of their op names."""

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

ADDITIONS = frozenset(("add", "add_any"))
"""Sums of two values; automatic differentiation adds by the second."""

LINEAR = frozenset(("convert_element_type", "copy", "neg", "transpose"))
"""Functions of one value that may as well be applied to a sum."""

COPIES = frozenset(
    (
        *("boundary_sharding", "device_put", "layout_constraint", "mesh_cast"),
        *("optimization_barrier", "preduced", "pvary", "reduced_vary_cast"),
        *("relayout", "reshard", CONSTRAINT, "stage", "vary_unreduced_cast"),
        *("with_memory_space_constraint",),
    )
)
"""Primitives whose results are copies of their operands, one by one."""

MEMORY_MOVES = frozenset(("call_exported", "compute_on", "device_put"))
"""Primitives that may name a memory space for their results."""

REDUCTIONS = frozenset(
    (
        *("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or"),
        *("reduce_prod", "reduce_sum"),
    )
)
"""Reductions over the dimensions `axes`, whose partial results XLA combines."""

CUMULATIVE = frozenset(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"))
"""Scans along the dimension `axis`."""

SORTS = frozenset(("approx_top_k", "sort", "top_k"))
"""Orders along one dimension."""

RANDOM = frozenset(("random_bits", "random_gamma", "rng_bit_generator", "rng_uniform"))
"""Generators of random values, whose compiled operations have other names."""

PRODUCTS = frozenset(("conv_general_dilated", "dot_general"))
"""Primitives that contract dimensions of two values of fixed shapes."""

SCATTERS = frozenset(
    ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")
)
"""Primitives that write updates at integer indices of their first operand."""

IN_PLACE = frozenset(("dynamic_update_slice", *SCATTERS))
"""Primitives that update their first operand, whose buffer XLA may reuse."""

INDEXING = frozenset(("dynamic_slice", "gather", *IN_PLACE))
"""Primitives that index their first operand by integer operands."""

LINEAR_ALGEBRA = frozenset(
    ("cholesky", "eig", "eigh", "lu", "qr", "schur", "svd", "triangular_solve")
)
"""Primitives of matrices, which JAX does not shard over Explicit mesh axes."""

ALIKE_OPERANDS = frozenset(
    ("clamp", "concatenate", "dynamic_update_slice", "select_n", "sort", "stack")
)
"""Primitives whose operands have one sharding on Explicit mesh axes, as elementwise ones do."""
