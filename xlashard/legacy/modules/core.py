"""`jax.core`: what jaxprs are made of, and what programs that walk through them need."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax

from xlashard._jax.era import core, jaxprs, util
from xlashard.legacy.installation.removed_api import RemovedApi
from xlashard.legacy.modules.entry import Entry, members

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
    """The type of an abstract value without its value, which none has any more.

    Args:
        aval: The abstract value.
        weak_type: Whether its type is weak; by default as it is.
    """
    if weak_type is None or not isinstance(aval, core.ShapedArray):
        return aval
    return aval.update(weak_type=weak_type)


def gensym(jaxprs: Any = None, suffix: str = "") -> Any:
    """Makes new variables of abstract values; today they need no numbers to differ.

    Args:
        jaxprs: Those that the variables must not be in.
        suffix: What their names ended with.
    """
    return Var


def canonicalize_shape(shape: Any, context: str = "") -> tuple[Any, ...]:
    """A shape as a tuple of numbers.

    Args:
        shape: Its sizes.
        context: What it is of, for errors.
    """
    return core.canonicalize_shape(shape, context)


class AxisFrame:
    """A named axis that is mapped over.

    Attributes:
        name: Its name.
        size: Its size.
    """

    def __init__(self, name: Any, size: int) -> None:
        self.name = name
        self.size = size


def axis_frame(axis_name: Any, main_trace: Any = None) -> AxisFrame:
    """A named axis that the calling function is mapped over.

    Args:
        axis_name: Its name.
        main_trace: Not looked at.

    Raises:
        NameError: Nothing maps over such an axis.
    """
    return AxisFrame(axis_name, jax.lax.axis_size(axis_name))


class NamedShape:
    """A shape some of whose dimensions have names instead of places.

    Args:
        *positional: The sizes of those with places.
        **named: The sizes of those with names.

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
        """How many dimensions."""
        return len(self._positional) + len(self._named)

    @property
    def positional_rank(self) -> int:
        """How many dimensions with places."""
        return len(self._positional)

    @property
    def named_rank(self) -> int:
        """How many dimensions with names."""
        return len(self._named)

    @property
    def positional(self) -> tuple[int, ...]:
        """The sizes of the dimensions with places."""
        return self._positional

    @property
    def names(self) -> tuple[str, ...]:
        """The names."""
        return tuple(self._named)

    @property
    def named_sizes(self) -> tuple[int, ...]:
        """The sizes of the dimensions with names."""
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
        # As the tuple's, which it may be equal to.
        if not self._named:
            return hash(self._positional)
        return hash((self._positional, frozenset(self._named.items())))

    def __repr__(self) -> str:
        named = [f"{name}={size}" for name, size in self._named.items()]
        return f"NamedShape({', '.join([*map(str, self._positional), *named])})"


def as_named_shape(shape: Any) -> NamedShape:
    """A shape that may be a tuple as one whose dimensions may have names."""
    return shape if isinstance(shape, NamedShape) else NamedShape(*shape)


_NO_STACK = "JAX keeps one trace at a time and no stack of them"


def _extended(*names: str) -> dict[str, str]:
    return {name: f"jax.extend.core.{name}" for name in names}


def _refused(name: str, gone: str, today: str, note: str) -> Entry:
    return Entry(f"jax.core.{name}", gone, "refused", f"{__name__}:{name}", today, note)


def _differs(name: str, gone: str, today: str, note: str) -> Entry:
    return Entry(f"jax.core.{name}", gone, "differs", f"{__name__}:{name}", today, note)


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
)
