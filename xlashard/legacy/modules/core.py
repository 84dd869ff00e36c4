"""`jax.core` and `jax.abstract_arrays`: jaxprs, primitives, abstract values, named shapes."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax

from xlashard._jax.legacy_api import core, jaxprs, util
from xlashard.legacy.modules.entry import Entry, RemovedApi, members

AbstractToken = jaxprs.AbstractToken
ClosedJaxpr = jaxprs.ClosedJaxpr
ConcretizationTypeError = jax.errors.ConcretizationTypeError
DropVar = jaxprs.DropVar
Effect = jaxprs.Effect
Effects = jaxprs.Effects
InconclusiveDimensionOperation = jaxprs.InconclusiveDimensionOperation
Jaxpr = jaxprs.Jaxpr
JaxprEqn = jaxprs.JaxprEqn
JaxprTypeError = jaxprs.JaxprTypeError
Literal = jaxprs.Literal
Primitive = jaxprs.Primitive
Token = jaxprs.Token
TracerArrayConversionError = jax.errors.TracerArrayConversionError
TracerIntegerConversionError = jax.errors.TracerIntegerConversionError
UnexpectedTracerError = jax.errors.UnexpectedTracerError
Var = jaxprs.Var

abstract_token = core.abstract_token
call_p = core.call_p
check_jaxpr = jaxprs.check_jaxpr
closed_call_p = core.closed_call_p
concrete_or_error = jaxprs.concrete_or_error
find_top_trace = jaxprs.find_top_trace
get_aval = jax.typeof
jaxpr_as_fun = jaxprs.jaxpr_as_fun
jaxprs_in_params = jaxprs.jaxprs_in_params
join_effects = core.join_effects
mapped_aval = jaxprs.mapped_aval
new_jaxpr_eqn = jaxprs.new_jaxpr_eqn
no_effects = jaxprs.no_effects
primal_dtype_to_tangent_dtype = jaxprs.primal_dtype_to_tangent_dtype
safe_map = util.safe_map
safe_zip = util.safe_zip
subjaxprs = jaxprs.subjaxprs
trace_state_clean = core.trace_state_clean
unmapped_aval = jaxprs.unmapped_aval
valid_jaxtype = jaxprs.valid_jaxtype

type Shape = Sequence[Any]

CallPrimitive = RemovedApi("jax.core.CallPrimitive")
ConcreteArray = RemovedApi("jax.core.ConcreteArray")
MainTrace = RemovedApi("jax.core.MainTrace")
MapPrimitive = RemovedApi("jax.core.MapPrimitive")
UnitVar = RemovedApi("jax.core.UnitVar")
UnshapedArray = RemovedApi("jax.core.UnshapedArray")
cur_sublevel = RemovedApi("jax.core.cur_sublevel")
extend_axis_env = RemovedApi("jax.core.extend_axis_env")
full_lower = RemovedApi("jax.core.full_lower")
new_base_main = RemovedApi("jax.core.new_base_main")
new_main = RemovedApi("jax.core.new_main")
new_sublevel = RemovedApi("jax.core.new_sublevel")
thread_local_state = RemovedApi("jax.core.thread_local_state")


def raise_to_shaped(aval: Any, weak_type: bool | None = None) -> Any:
    """Return an abstract value without a concrete value, which today's never have.

    Args:
        aval: The abstract value.
        weak_type: The weak type of the result; None to keep it.
    """
    if weak_type is None or not isinstance(aval, core.ShapedArray):
        return aval
    return aval.update(weak_type=weak_type)


def gensym(jaxprs: Any = None, suffix: str = "") -> Any:
    """Return the constructor of variables, which need no numbers today.

    Args:
        jaxprs: Ignored.
        suffix: Ignored.
    """
    return Var


def canonicalize_shape(shape: Any, context: str = "") -> tuple[Any, ...]:
    """Return a shape as a tuple of integers.

    Args:
        shape: The sizes.
        context: A text for errors.
    """
    return core.canonicalize_shape(shape, context)


class AxisFrame:
    """Named axis of a mapped function.

    Attributes:
        name: Its name.
        size: Its size.
    """

    def __init__(self, name: Any, size: int) -> None:
        self.name = name
        self.size = size


def axis_frame(axis_name: Any, main_trace: Any = None) -> AxisFrame:
    """Return a named axis over which the calling function is mapped.

    Args:
        axis_name: Its name.
        main_trace: Ignored.

    Raises:
        NameError: The axis name is unbound.
    """
    return AxisFrame(axis_name, jax.lax.axis_size(axis_name))


class NamedShape:
    """Shape with positional and named dimensions.

    Args:
        *positional: The sizes of the positional dimensions.
        **named: The sizes of the named dimensions.

    Example:
        >>> shape = NamedShape(2, 3, batch=8)
        >>> shape.rank, shape.positional, shape.names, shape.total
        (3, (2, 3), ('batch',), 48)
    """

    def __init__(self, *positional: int, **named: int) -> None:
        self._positional = positional
        self._named = named

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self._positional) + len(self._named)

    @property
    def positional_rank(self) -> int:
        """The number of positional dimensions."""
        return len(self._positional)

    @property
    def named_rank(self) -> int:
        """The number of named dimensions."""
        return len(self._named)

    @property
    def positional(self) -> tuple[int, ...]:
        """The sizes of the positional dimensions."""
        return self._positional

    @property
    def names(self) -> tuple[str, ...]:
        """The names."""
        return tuple(self._named)

    @property
    def named_sizes(self) -> tuple[int, ...]:
        """The sizes of the named dimensions."""
        return tuple(self._named.values())

    @property
    def named_items(self) -> dict[str, int]:
        """Names and sizes."""
        return dict(self._named)

    @property
    def total(self) -> int:
        """The number of elements."""
        return prod(self._positional) * prod(self._named.values())

    def __getitem__(self, dimension: Any) -> Any:
        if isinstance(dimension, str):
            return self._named[dimension]
        return self._positional[dimension]

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NamedShape):
            return (self._positional, self._named) == (other._positional, other._named)
        return isinstance(other, tuple) and not self._named and self._positional == other

    def __hash__(self) -> int:
        # Equal to the hash of an equal tuple.
        if not self._named:
            return hash(self._positional)
        return hash((self._positional, frozenset(self._named.items())))

    def __repr__(self) -> str:
        named = [f"{name}={size}" for name, size in self._named.items()]
        return f"NamedShape({', '.join([*map(str, self._positional), *named])})"


def as_named_shape(shape: Any) -> NamedShape:
    """Return a shape as a `NamedShape`."""
    return shape if isinstance(shape, NamedShape) else NamedShape(*shape)


_NO_STACK = "JAX has one current trace instead of a stack of traces"


def _extended(*names: str) -> dict[str, str]:
    return {name: f"jax.extend.core.{name}" for name in names}


def _refused(name: str, gone: str, today: str, note: str) -> Entry:
    return Entry(f"jax.core.{name}", gone, "refused", f"{__name__}:{name}", today, note)


def _differs(name: str, gone: str, today: str, note: str) -> Entry:
    return Entry(f"jax.core.{name}", gone, "differs", f"{__name__}:{name}", today, note)


ShapedArray = core.ShapedArray
array_types = jaxprs.array_types

ENTRIES: tuple[Entry, ...] = (
    *members(
        "jax.core", "0.6.0", __name__, _extended("Literal", "Primitive", "Token", "jaxpr_as_fun")
    ),
    *members(
        "jax.core", "0.10.0", __name__, _extended("AbstractToken", "mapped_aval", "subjaxprs")
    ),
    *members("jax.core", "0.10.0", __name__, _extended("unmapped_aval")),
    *members(
        "jax.core",
        "0.11.0",
        __name__,
        _extended(
            *("DropVar", "Effect", "Effects", "InconclusiveDimensionOperation", "JaxprTypeError"),
            *("check_jaxpr", "concrete_or_error", "find_top_trace", "jaxprs_in_params"),
            *("new_jaxpr_eqn", "no_effects", "primal_dtype_to_tangent_dtype", "valid_jaxtype"),
        ),
    ),
    *members(
        "jax.core",
        "0.7.0",
        __name__,
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
        __name__,
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
        __name__,
        {
            "Shape": "tuple[int, ...]",
        },
    ),
    *members(
        "jax.core",
        "0.6.0",
        __name__,
        {"join_effects": "frozenset().union(*effects)", "raise_to_shaped": "aval"},
    ),
    *members(
        "jax.core",
        "0.4.31",
        __name__,
        {name: "tuple(shape)" for name in ("NamedShape", "as_named_shape", "canonicalize_shape")},
    ),
    *members("jax.core", "0.10.0", __name__, {"get_aval": "jax.typeof"}),
    *members("jax.core", "0.11.0", __name__, {"abstract_token": "jax.extend.core.AbstractToken()"}),
    *members("jax.core", "0.11.0", __name__, {"gensym": "jax.extend.core.Var"}),
    _differs(
        "Jaxpr",
        "0.6.0",
        "jax.extend.core.Jaxpr",
        "a jaxpr contains its closed-over constants, so Jaxpr and ClosedJaxpr are one class",
    ),
    _differs(
        "ClosedJaxpr",
        "0.6.0",
        "jax.extend.core.Jaxpr",
        "ClosedJaxpr and Jaxpr are one class; `closed.jaxpr` is the object itself",
    ),
    _differs(
        "JaxprEqn",
        "0.6.0",
        "jax.extend.core.JaxprEqn",
        "it is not a tuple: change fields with `eqn.replace`, construct it with `new_jaxpr_eqn`",
    ),
    _differs(
        "Var",
        "0.6.0",
        "jax.extend.core.Var",
        "its constructor takes only an abstract value, and it has no `count` or `suffix`",
    ),
    _differs("UnitVar", "0.4.4", "False", "it has no instances and cannot be constructed"),
    _differs("ConcreteArray", "0.4.36", "False", "it has no instances and cannot be constructed"),
    _refused(
        "CallPrimitive",
        "0.11.0",
        "jax.extend.core.create_call_primitive",
        "a call primitive is created together with all of its rules",
    ),
    _refused("MapPrimitive", "0.6.0", "jax.shard_map", "JAX has no map primitives"),
    _refused("UnshapedArray", "0.8.2", "jax.core.ShapedArray", "every abstract array has a shape"),
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
        "axis names are bound by the mapping function",
    ),
    Entry("jax.abstract_arrays", "0.4.20", "works", __name__, "jax.core"),
    *members(
        "jax.abstract_arrays",
        "0.4.16",
        __name__,
        {
            "ShapedArray": "jax.core.ShapedArray",
            "raise_to_shaped": "aval",
        },
    ),
    *members(
        "jax.abstract_arrays",
        "0.4.20",
        __name__,
        {"array_types": "jax.extend.core.array_types"},
    ),
)
