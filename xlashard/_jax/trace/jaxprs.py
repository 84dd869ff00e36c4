"""Read and transform jaxprs, their callbacks and their references (`jax.new_ref`).

XLA has values only. A program takes the value of a reference as an additional argument and returns
its new value as an additional result, which takes over the argument's buffers.
"""

import functools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xlashard._jax.private import core, discharge, literals, pe, read_lazily, state_types
from xlashard._jax.runtime.global_state import cached_by_jaxpr
from xlashard._jax.trace.primitive_names import INDEXING, PRODUCTS, SCATTERS
from xlashard._jax.trace.tracing import bodies, equations, replace_fields, with_inner_jaxprs

type Jaxpr = Any
type Handle = Any

if TYPE_CHECKING:
    Literal = core.Literal
else:
    __getattr__ = read_lazily(globals(), {"Literal": lambda: core.Literal})


def has_unreduced(jaxpr: Jaxpr) -> bool:
    """Return True if an operand or a result of an equation is unreduced."""
    for inner in with_inner_jaxprs(jaxpr):
        # An operand is an input, or the result of another equation.
        results = [eqn.outvars for eqn in inner.eqns]
        for variable in chain(inner.constvars, inner.invars, *results):
            sharding = getattr(variable.aval, "sharding", None)
            if sharding is not None and sharding.spec.unreduced:
                return True
    return False


def short_index(jaxpr: Jaxpr) -> tuple[Any, str] | None:
    """Return the type of an array of which a dimension is too long for the integers that index it.

    XLA clamps an index in the index's own type, so that any element may be read then.

    Returns:
        Its abstract value and the dtype of the integers; None without such an array.
    """
    for eqn in equations(jaxpr):
        if eqn.primitive.name not in INDEXING:
            continue
        dims = _indexed_dims(eqn)
        if not dims:
            continue
        operand, index = eqn.invars[0].aval, eqn.invars[-1].aval
        if eqn.primitive.name in SCATTERS:
            index = eqn.invars[1].aval
        reach = max(np.iinfo(index.dtype).max, 2**31 - 1)
        if any(operand.shape[dim] > reach for dim in dims):
            return operand, index.dtype.name
    return None


def _indexed_dims(eqn: Any) -> Sequence[int]:
    """Return the dimensions of the first operand that an equation indexes by integer operands."""
    params = eqn.params
    match eqn.primitive.name:
        case "dynamic_slice":
            window = params["slice_sizes"]
        case "dynamic_update_slice":
            window = eqn.invars[1].aval.shape
        case "gather":
            return params["dimension_numbers"].start_index_map
        case name if name in SCATTERS:
            return params["dimension_numbers"].scatter_dims_to_operand_dims
        case _:
            return ()
    return [d for d, size in enumerate(eqn.invars[0].aval.shape) if window[d] < size]


def product_flops(eqn: Any) -> float:
    """Return the FLOP of a matrix product or convolution, and 0 for any other equation."""
    if eqn.primitive.name not in (*PRODUCTS, "ragged_dot_general"):
        return 0.0
    left, right = (v.aval.shape for v in eqn.invars[:2])
    results = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0][0]
        return 2.0 * results * math.prod(left[dim] for dim in contracted)
    if eqn.primitive.name == "ragged_dot_general":
        # Every row, or contracted index, is of one group at most.
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
        columns = math.prod(size for dim, size in enumerate(right) if dim not in shared)
        return 2.0 * math.prod(left) * columns
    taps = math.prod(right) / max(right[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
    # Of a dilated operand most values are zeros, which no product has to meet.
    zeros = math.prod(eqn.params["lhs_dilation"])
    return 2.0 * results * taps / zeros


def without_high_level(jaxpr: Jaxpr) -> Jaxpr:
    """Replace JAX's high-level primitives (hijax), such as that of `jnp.searchsorted`.

    They have rules for differentiation, and none for lowering.
    """
    types = (*jaxpr.in_avals, *jaxpr.out_avals)
    if not jaxpr.is_high or any(aval.is_high for aval in types):
        return jaxpr
    return pe.lower_jaxpr2(jaxpr)


def hoist(jaxpr: Jaxpr, chosen: Sequence[bool]) -> tuple[Jaxpr, list[Any]]:
    """Turn some closed-over values of a jaxpr into its first arguments.

    Args:
        jaxpr: The closed jaxpr.
        chosen: For each closed-over value, True to make it an argument.

    Returns:
        The new jaxpr, and the values that are arguments now.
    """
    if not any(chosen):
        return jaxpr, []
    moved, values = (list(compress(side, chosen)) for side in (jaxpr.constvars, jaxpr.consts))
    others = list(map(operator.not_, chosen))
    left, kept = (list(compress(side, others)) for side in (jaxpr.constvars, jaxpr.consts))
    invars = [*moved, *jaxpr.invars]
    debug = jaxpr.debug_info
    names = debug.safe_arg_names(len(jaxpr.invars))
    debug = debug._replace(arg_names=(*("",) * len(moved), *names))
    effects = pe.make_jaxpr_effects(left, invars, jaxpr.outvars, jaxpr.eqns)
    return (
        replace_fields(
            jaxpr, constvars=left, invars=invars, effects=effects, debug_info=debug, consts=kept
        ),
        values,
    )


def array_literals(jaxpr: Jaxpr) -> Any:
    """Return the arrays that stand in a jaxpr and in those inside it, each with its aval.

    JAX puts closed-over arrays there under `jax_use_simplified_jaxpr_constants`, and passes those
    above `jax_embedded_constants_max_bytes` to the program as its first arguments.
    """
    return core.jaxpr_const_args(jaxpr)


def closed_over_arrays(jaxpr: Jaxpr) -> list[Any]:
    """Return the arrays that a jaxpr and those inside it close over, each once; no references."""
    consts = [value for inner in with_inner_jaxprs(jaxpr) for value in getattr(inner, "consts", ())]
    values = [*consts, *[value for value, _ in array_literals(jaxpr)]]
    arrays = {id(value): value for value in values if _is_array(value)}
    return list(arrays.values())


def _is_array(value: Any) -> bool:
    # Primitives of libraries, such as lineax's, have jaxprs as parameters that close over values of
    # the trace.
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_host_array(value) or (is_array and not is_ref(value))


def without_results(jaxpr: Jaxpr, kept: Sequence[bool]) -> Jaxpr:
    """Return a closed jaxpr with some of its results, and without the code of the others."""
    smaller = pe.prune_jaxpr_outputs(jaxpr.jaxpr, kept)
    # JAX 0.10 keeps closed-over values in an object around the jaxpr.
    return smaller if jaxpr.jaxpr is jaxpr else jaxpr.replace(jaxpr=smaller)


def drop_unused(jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[bool, ...]]:
    """Remove dead code and unused arguments.

    Returns:
        The smaller jaxpr, and for each argument True if it is left.
    """
    smaller, _, kept = _without_dead_code(jaxpr)
    return smaller or jaxpr, kept


@cached_by_jaxpr
def _without_dead_code(jaxpr: Jaxpr) -> tuple[Jaxpr | None, tuple[bool, ...], tuple[bool, ...]]:
    """Return a jaxpr without dead code, and for each const and argument True if it is in use.

    The placement of a call and its lowering share what is known of the smaller jaxpr. Where
    everything is in use, None stands for the jaxpr: a cache must not keep its key alive.
    """
    smaller, consts, args = pe.dce_jaxpr_consts(jaxpr.jaxpr, [True] * len(jaxpr.outvars))
    if all((*consts, *args)) and smaller.eqns == jaxpr.eqns:
        smaller = None
    elif jaxpr.jaxpr is not jaxpr:  # JAX 0.10 returns the inner jaxpr.
        smaller = jaxpr.replace(jaxpr=smaller, consts=list(compress(jaxpr.consts, consts)))
    return smaller, tuple(consts), tuple(args)


def used_parts(jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[bool, ...], tuple[bool, ...]]:
    """Return a jaxpr without dead code, and which consts and arguments are in use.

    References count as used, since their new values are results.
    """
    smaller, consts, args = _without_dead_code(jaxpr)
    pairs = zip(args, jaxpr.in_avals, strict=True)
    return smaller or jaxpr, consts, tuple([used or is_reference(aval) for used, aval in pairs])


def scan_operands(params: Any, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the closed-over values, the initial carry and the stacked inputs of a scan."""
    consts, carry, xs = (list(part) for part in params["ft_in"].update(operands).unpack())
    return consts, carry, xs


def is_host_array(value: Any) -> bool:
    """Return True for a host array that a traced function closes over."""
    return isinstance(value, np.ndarray | literals.TypedNdArray)


def as_function(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """Return a function of flat arguments that evaluates a closed jaxpr."""
    return core.jaxpr_as_fun(jaxpr)


def from_function(fun: Callable[..., Sequence[Any]], avals: Sequence[Any], name: str) -> Jaxpr:
    """Return the closed jaxpr of a function of flat arguments."""

    def named(*args: Any) -> Sequence[Any]:
        return fun(*args)

    named.__name__ = named.__qualname__ = name
    return jax.make_jaxpr(named)(*avals)


def without_equations(avals: Sequence[Any]) -> Jaxpr:
    """Return a closed jaxpr of arguments alone."""
    return from_function(lambda *_: (), avals, "arguments")


def callback_names(jaxpr: Jaxpr) -> tuple[str, ...]:
    """Return the names of the Python functions that a jaxpr calls at run time."""
    names = []
    for eqn in equations(jaxpr):
        if "callback" in eqn.params:
            names.append(_callback_name(eqn.params["callback"]) or eqn.primitive.name)
        elif eqn.primitive.name == "debug_print":
            names.append(f"jax.debug.print({eqn.params['fmt']!r})")
    return tuple(dict.fromkeys(names))


def callback_results(jaxpr: Jaxpr) -> frozenset[int]:
    """Return the positions of the results of a jaxpr that a Python function returns."""
    called = set()
    for eqn in jaxpr.eqns:
        inside = [callback_results(body) for body in bodies(eqn)] if "jaxpr" in eqn.params else []
        for i, variable in enumerate(eqn.outvars):
            if "callback" in eqn.params or any(i in positions for positions in inside):
                called.add(variable)
    return frozenset(
        i for i, v in enumerate(jaxpr.outvars) if isinstance(v, Hashable) and v in called
    )


def _callback_name(callback: Any) -> str | None:
    """Return the name of the user's function inside of JAX's wrappers."""
    callback = getattr(callback, "callback_func", callback)
    while isinstance(callback, functools.partial):
        callback = callback.func
    # A method of a builtin class has no module.
    if not (getattr(callback, "__module__", None) or "").startswith("jax."):
        return getattr(callback, "__qualname__", type(callback).__name__)
    cells = (cell.cell_contents for cell in getattr(callback, "__closure__", None) or ())
    names = (_callback_name(inner) for inner in cells if callable(inner))
    return next((name for name in names if name is not None), None)


def is_ref(value: Any) -> bool:
    """Return True if a value is a concrete reference, not a tracer of one."""
    # isinstance is also true for tracers of references.
    return type(value) is jax.Ref


def buffer_of(ref: "jax.Ref") -> Handle:
    """Return the handle of a reference's current value."""
    return ref._refs._buf


def write(ref: "jax.Ref", handle: Handle) -> None:
    """Replace the value of a reference by another array of its type."""
    ref._refs._buf = handle


def is_reference(aval: Any) -> bool:
    """Return True if an abstract value is that of a reference."""
    return isinstance(aval, state_types.AbstractRef)


def reference_positions(jaxpr: Jaxpr) -> list[int]:
    """Return the positions of the arguments that are references."""
    kind = state_types.AbstractRef
    return [i for i, aval in enumerate(jaxpr.in_avals) if isinstance(aval, kind)]


def without_references(jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[int, ...]]:
    """Return a jaxpr whose references are replaced by values.

    Args:
        jaxpr: A closed jaxpr; closed-over references are among its arguments already.

    Returns:
        The new jaxpr, and the positions of the arguments whose new values follow its results.
    """
    references = reference_positions(jaxpr)
    makes_own = any(isinstance(e, core.InternalMutableArrayEffect) for e in jaxpr.effects)
    if not references and not makes_own:
        return jaxpr, ()
    pure = discharge.discharge_state(jaxpr)
    results = len(jaxpr.outvars)
    # References that are only read need no result.
    written = [
        pure.outvars[k] is not pure.invars[i] for k, i in enumerate(references, start=results)
    ]
    pure = without_results(pure, [*(True,) * results, *written])
    positions = tuple(i for i, w in zip(references, written, strict=True) if w)
    debug = jaxpr.debug_info
    names = debug.safe_arg_names(len(pure.invars))
    paths = debug.safe_result_paths(results)
    debug = debug._replace(arg_names=names, result_paths=(*paths, *(names[i] for i in positions)))
    return replace_fields(pure, debug_info=debug), positions
