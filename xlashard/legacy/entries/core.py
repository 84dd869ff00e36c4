"""Entries of the names of `jax.core`, `jax.abstract_arrays`, `jax.linear_util` and `jax.util`."""

from xlashard.legacy.entries.entry import EntryTable, moved, refused, works

_API = "xlashard._jax.legacy_api"

_UTIL = f"{_API}:util."

_NOW = "jax.extend.core"

_TRACE = "jax.extend.core.take_current_trace()"

_NO_STACK = "JAX has one current trace instead of a stack of traces"

_COUNTED = "levels are counted from the current trace outwards"

_NO_INSTANCES = "it has no instances and cannot be constructed"

ENTRIES: EntryTable = {
    "jax.core": {
        **moved("0.6.0", _NOW, "Literal", "Primitive", "Token", "jaxpr_as_fun"),
        **moved("0.10.0", _NOW, "AbstractToken", "mapped_aval", "subjaxprs"),
        "unmapped_aval": works("0.10.0", f"{_NOW}.unmapped_aval"),
        **moved(
            "0.11.0",
            _NOW,
            *("DropVar", "Effect", "Effects", "InconclusiveDimensionOperation", "JaxprTypeError"),
            *("check_jaxpr", "concrete_or_error", "jaxprs_in_params"),
            *("new_jaxpr_eqn", "no_effects", "primal_dtype_to_tangent_dtype", "valid_jaxtype"),
        ),
        "ConcretizationTypeError": works("0.7.0", "jax.errors.ConcretizationTypeError"),
        **moved("0.7.0", "jax.extend.core.primitives", "call_p", "closed_call_p"),
        **moved(
            "0.4.24",
            "jax.errors",
            *(
                "TracerArrayConversionError",
                "TracerIntegerConversionError",
                "UnexpectedTracerError",
            ),
        ),
        "get_aval": works("0.10.0", "jax.typeof"),
        "axis_frame": works("0.7.0", "jax.lax.axis_size(axis_name)"),
        "Shape": works("0.4.30", "tuple[int, ...]"),
        "raise_to_shaped": works("0.6.0", "aval"),
        "NamedShape": works("0.4.31", "tuple(shape)"),
        "as_named_shape": works("0.4.31", "tuple(shape)"),
        "canonicalize_shape": works("0.4.31", "tuple(shape)"),
        "gensym": works("0.11.0", "jax.extend.core.Var"),
        "trace_state_clean": works(
            "0.7.0", "jax.extend.core.unsafe_am_i_under_a_jit_DO_NOT_USE()", f"{_API}:core."
        ),
        "join_effects": works("0.6.0", "frozenset().union(*effects)", f"{_API}:core."),
        "abstract_token": works("0.11.0", "jax.extend.core.AbstractToken()", f"{_API}:core."),
        "safe_map": works("0.4.24", "[f(x, y) for x, y in zip(xs, ys, strict=True)]", _UTIL),
        "safe_zip": works("0.4.24", "zip(xs, ys, strict=True)", _UTIL),
        "Jaxpr": works("0.6.0", "jax.extend.core.Jaxpr", _NOW).but(
            "a jaxpr contains its closed-over constants, so Jaxpr and ClosedJaxpr are one class"
        ),
        "ClosedJaxpr": works("0.6.0", "jax.extend.core.Jaxpr", _NOW).but(
            "ClosedJaxpr and Jaxpr are one class; `closed.jaxpr` is the object itself"
        ),
        "JaxprEqn": works("0.6.0", "jax.extend.core.JaxprEqn", _NOW).but(
            "it is not a tuple: change fields with `eqn.replace`, construct it with `new_jaxpr_eqn`"
        ),
        "Var": works("0.6.0", "jax.extend.core.Var", _NOW).but(
            "its constructor takes only an abstract value, and it has no `count` or `suffix`"
        ),
        "UnitVar": works("0.4.4", "False").but(_NO_INSTANCES),
        "ConcreteArray": works("0.4.36", "False").but(_NO_INSTANCES),
        "CallPrimitive": refused("0.11.0", "jax.extend.core.create_call_primitive").because(
            "a call primitive is created together with all of its rules"
        ),
        "MapPrimitive": refused("0.6.0", "jax.shard_map").because("JAX has no map primitives"),
        **dict.fromkeys(
            (
                *("pp_eqn", "pp_eqn_rules", "pp_eqns", "pp_jaxpr", "pp_kv_pair", "pp_kv_pairs"),
                *("pp_var", "pp_vars"),
            ),
            works("0.4.34", "str(jaxpr)", f"{_API}:core."),
        ),
        "JaxprPpContext": works("0.11.0", "str(jaxpr)", f"{_API}:core."),
        "JaxprPpSettings": works("0.11.0", "str(jaxpr)", f"{_API}:core."),
        "source_info_util": works("0.4.24", "eqn.source_info", f"{_API}:source_info_util"),
        "custom_typechecks": works("0.11.0", "jax.extend.core.check_jaxpr(jaxpr)", f"{_API}:core."),
        "lattice_join": works("0.6.0", "jax.typeof(x)"),
        "typecheck": works("0.7.0", "jax.typeof(x) == aval", f"{_API}:core."),
        "typecompat": works("0.6.0", "aval == other", f"{_API}:core."),
        "typematch": works("0.7.0", "aval == other", f"{_API}:core."),
        "traverse_jaxpr_params": works("0.10.0", f"{_NOW}.jaxprs_in_params(eqn.params)"),
        "AxisName": works("0.7.0", "collections.abc.Hashable", "collections.abc:Hashable"),
        "DimSize": works("0.4.31", "int", f"{_API}:core."),
        "dimension_as_value": works("0.4.31", "x.shape[0]", f"{_API}:core."),
        "is_constant_dim": works("0.11.0", "isinstance(size, int)", f"{_API}:core."),
        "is_constant_shape": works(
            "0.11.0", "all(isinstance(size, int) for size in shape)", f"{_API}:core."
        ),
        "DShapedArray": works("0.8.2", "False").but(_NO_INSTANCES),
        "UnshapedArray": refused("0.8.2", "jax.core.ShapedArray").because(
            "every abstract array has a shape"
        ),
        **dict.fromkeys(
            ("MainTrace", "new_main", "new_base_main", "new_sublevel"),
            refused("0.4.36", _TRACE).because(_NO_STACK),
        ),
        "cur_sublevel": works("0.4.36", _TRACE).but(_COUNTED),
        "find_top_trace": works("0.11.0", _TRACE).but(_COUNTED),
        "thread_local_state": works("0.4.36", _TRACE).but(
            "`trace_state.trace_stack` alone, which cannot be changed"
        ),
        "full_lower": refused("0.6.0", _TRACE).because(_NO_STACK),
        "extend_axis_env": refused("0.4.36", "jax.vmap(f, axis_name=name)").because(
            "axis names are bound by the mapping function"
        ),
    },
    "jax.abstract_arrays": {
        "": works("0.4.20", "jax.core"),
        "ShapedArray": works("0.4.16", "jax.core.ShapedArray"),
        "raise_to_shaped": works("0.4.16", "aval"),
        "array_types": works("0.4.20", f"{_NOW}.array_types"),
    },
    "jax.linear_util": {
        "": works("0.4.24", "import jax.extend.linear_util"),
        **moved(
            "0.4.24",
            "jax.extend.linear_util",
            *("StoreException", "WrappedFun", "cache", "merge_linear_aux", "wrap_init"),
        ),
        "transformation": works(
            "0.4.24", "jax.extend.linear_util.transformation2", f"{_API}:functions."
        ),
        "transformation_with_aux": works(
            "0.4.24", "jax.extend.linear_util.transformation_with_aux2", f"{_API}:functions."
        ),
    },
    "jax.util": {
        "": works("0.8.0", "import functools"),
        "as_hashable_function": works("0.7.0", "functools.partial"),
        "split_dict": works("0.7.0", "[mapping[name] for name in names]"),
        "split_merge": works("0.7.0", "[x for x in xs if predicate(x)]"),
        "HashableFunction": works("0.7.0", "functools.partial", _UTIL),
        "cache": works("0.7.0", "functools.lru_cache", _UTIL),
        "safe_map": works("0.7.0", "[f(x, y) for x, y in zip(xs, ys, strict=True)]", _UTIL),
        "safe_zip": works("0.7.0", "zip(xs, ys, strict=True)", _UTIL),
        "split_list": works("0.7.0", "xs[:n], xs[n:]", _UTIL),
        "subvals": works("0.7.0", "[new.get(n, x) for n, x in enumerate(xs)]", _UTIL),
        "toposort": works("0.7.0", "graphlib.TopologicalSorter", _UTIL),
        "unzip2": works("0.7.0", "tuple(zip(*pairs, strict=True))", _UTIL),
        "wrap_name": works("0.7.0", "f'{transform}({name})'"),
        "wraps": works("0.7.0", "functools.wraps", _UTIL),
    },
    "jax._src.util": {"prod": works("0.4.14", "math.prod")},
}
