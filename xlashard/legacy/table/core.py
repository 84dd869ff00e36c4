"""`jax.core`, `jax.linear_util` and what else jaxprs are made, walked and run with."""

from xlashard.legacy.table.entry import Entry, members

_CORE = "xlashard.legacy.era.core"
_UTIL = "xlashard.legacy.era.util"
_NO_STACK = "JAX keeps one trace at a time and no stack of them"


def _extended(*names: str) -> dict[str, str]:
    return {name: f"jax.extend.core.{name}" for name in names}


def _refused(name: str, gone: str, today: str, note: str) -> Entry:
    return Entry(f"jax.core.{name}", gone, "refused", f"{_CORE}:{name}", today, note)


def _differs(name: str, gone: str, today: str, note: str) -> Entry:
    return Entry(f"jax.core.{name}", gone, "differs", f"{_CORE}:{name}", today, note)


ENTRIES: tuple[Entry, ...] = (
    *members(
        "jax.core", "0.6.0", _CORE, _extended("Literal", "Primitive", "Token", "jaxpr_as_fun")
    ),
    *members("jax.core", "0.10.0", _CORE, _extended("AbstractToken", "mapped_aval", "subjaxprs")),
    *members("jax.core", "0.10.0", _CORE, _extended("unmapped_aval")),
    *members(
        "jax.core",
        "0.11.0",
        _CORE,
        _extended(
            *("DropVar", "Effect", "Effects", "InconclusiveDimensionOperation", "JaxprTypeError"),
            *("check_jaxpr", "concrete_or_error", "find_top_trace", "jaxprs_in_params"),
            *("new_jaxpr_eqn", "no_effects", "primal_dtype_to_tangent_dtype", "valid_jaxtype"),
        ),
    ),
    *members(
        "jax.core",
        "0.7.0",
        _CORE,
        {
            "ConcretizationTypeError": "jax.errors.ConcretizationTypeError",
            "axis_frame": "jax.lax.axis_size(axis_name)",
            "call_p": "jax.extend.core.primitives.call_p",
            "closed_call_p": "jax.extend.core.primitives.closed_call_p",
            "trace_state_clean": "jax.extend.core.unsafe_am_i_under_a_jit_DO_NOT_USE()",
        },
    ),
    *members(
        "jax.core",
        "0.4.24",
        _CORE,
        {
            "TracerArrayConversionError": "jax.errors.TracerArrayConversionError",
            "TracerIntegerConversionError": "jax.errors.TracerIntegerConversionError",
            "UnexpectedTracerError": "jax.errors.UnexpectedTracerError",
            "safe_map": "[f(x, y) for x, y in zip(xs, ys, strict=True)]",
            "safe_zip": "zip(xs, ys, strict=True)",
        },
    ),
    *members(
        "jax.core",
        "0.4.30",
        _CORE,
        {
            "Shape": "tuple[int, ...]",
        },
    ),
    *members(
        "jax.core",
        "0.6.0",
        _CORE,
        {"join_effects": "frozenset().union(*effects)", "raise_to_shaped": "aval"},
    ),
    *members(
        "jax.core",
        "0.4.31",
        _CORE,
        {name: "tuple(shape)" for name in ("NamedShape", "as_named_shape", "canonicalize_shape")},
    ),
    *members("jax.core", "0.10.0", _CORE, {"get_aval": "jax.typeof"}),
    *members("jax.core", "0.11.0", _CORE, {"abstract_token": "jax.extend.core.AbstractToken()"}),
    *members("jax.core", "0.11.0", _CORE, {"gensym": "jax.extend.core.Var"}),
    _differs(
        "Jaxpr",
        "0.6.0",
        "jax.extend.core.Jaxpr",
        "a jaxpr holds the values that it closes over, so this and ClosedJaxpr are one class",
    ),
    _differs(
        "ClosedJaxpr",
        "0.6.0",
        "jax.extend.core.Jaxpr",
        "this and Jaxpr are one class; `closed.jaxpr` is the object itself",
    ),
    _differs(
        "JaxprEqn",
        "0.6.0",
        "jax.extend.core.JaxprEqn",
        "it is no tuple: change fields by `eqn.replace`, make it by `new_jaxpr_eqn`",
    ),
    _differs(
        "Var",
        "0.6.0",
        "jax.extend.core.Var",
        "it is made of an abstract value alone and has no `count` or `suffix`",
    ),
    _differs("UnitVar", "0.4.4", "False", "nothing is one any more; it can't be made"),
    _differs("ConcreteArray", "0.4.36", "False", "nothing is one any more; it can't be made"),
    _refused(
        "CallPrimitive",
        "0.11.0",
        "jax.extend.core.create_call_primitive",
        "a primitive that calls is made with all of its rules at once",
    ),
    _refused("MapPrimitive", "0.6.0", "jax.shard_map", "no primitive of JAX maps by itself"),
    _refused("UnshapedArray", "0.8.2", "jax.core.ShapedArray", "each abstract array has a shape"),
    _refused("MainTrace", "0.4.36", "jax.extend.core.take_current_trace()", _NO_STACK),
    _refused("new_main", "0.4.36", "jax.extend.core.take_current_trace()", _NO_STACK),
    _refused("new_base_main", "0.4.36", "jax.extend.core.take_current_trace()", _NO_STACK),
    _refused("new_sublevel", "0.4.36", "jax.extend.core.take_current_trace()", _NO_STACK),
    _refused("cur_sublevel", "0.4.36", "jax.extend.core.take_current_trace()", _NO_STACK),
    _refused("full_lower", "0.6.0", "jax.extend.core.take_current_trace()", _NO_STACK),
    _refused("thread_local_state", "0.4.36", "jax.extend.core.take_current_trace()", _NO_STACK),
    _refused(
        "extend_axis_env",
        "0.4.36",
        "jax.vmap(f, axis_name=name)",
        "names of axes come with the function that maps over them",
    ),
    Entry(
        "jax.linear_util",
        "0.4.24",
        "works",
        "xlashard.legacy.era.linear_util",
        "import jax.extend.linear_util",
    ),
    *members(
        "jax.linear_util",
        "0.4.24",
        "xlashard.legacy.era.linear_util",
        {
            "StoreException": "jax.extend.linear_util.StoreException",
            "WrappedFun": "jax.extend.linear_util.WrappedFun",
            "cache": "jax.extend.linear_util.cache",
            "merge_linear_aux": "jax.extend.linear_util.merge_linear_aux",
            "transformation": "jax.extend.linear_util.transformation2",
            "transformation_with_aux": "jax.extend.linear_util.transformation_with_aux2",
            "wrap_init": "jax.extend.linear_util.wrap_init",
        },
    ),
    Entry("jax.util", "0.8.0", "works", _UTIL, "import functools"),
    *members(
        "jax.util",
        "0.7.0",
        _UTIL,
        {
            "HashableFunction": "functools.partial",
            "as_hashable_function": "functools.partial",
            "cache": "functools.lru_cache",
            "safe_map": "[f(x, y) for x, y in zip(xs, ys, strict=True)]",
            "safe_zip": "zip(xs, ys, strict=True)",
            "split_dict": "[mapping[name] for name in names]",
            "split_list": "xs[:n], xs[n:]",
            "split_merge": "[x for x in xs if predicate(x)]",
            "subvals": "[new.get(n, x) for n, x in enumerate(xs)]",
            "toposort": "graphlib.TopologicalSorter",
            "unzip2": "tuple(zip(*pairs, strict=True))",
            "wrap_name": "f'{transform}({name})'",
            "wraps": "functools.wraps",
        },
    ),
    Entry(
        "jax.abstract_arrays", "0.4.20", "works", "xlashard.legacy.era.abstract_arrays", "jax.core"
    ),
    *members(
        "jax.abstract_arrays",
        "0.4.16",
        "xlashard.legacy.era.abstract_arrays",
        {
            "ShapedArray": "jax.core.ShapedArray",
            "raise_to_shaped": "aval",
        },
    ),
    *members(
        "jax.abstract_arrays",
        "0.4.20",
        "xlashard.legacy.era.abstract_arrays",
        {"array_types": "jax.extend.core.array_types"},
    ),
)
