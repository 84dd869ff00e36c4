"""`jax.core`, `jax.abstract_arrays`, `jax.linear_util`, `jax.util`: jaxprs and abstract values."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax

from xlashard._jax.legacy_api import core, linear_util, util
from xlashard.lazily import dataclass
from xlashard.legacy.modules.entry import EntryTable, RemovedApi, moved, refused, works

type Shape = Sequence[Any]
UnitVar = RemovedApi("jax.core.UnitVar")
ConcreteArray = RemovedApi("jax.core.ConcreteArray")

# Names of `jax.linear_util` without an entry.
Store = linear_util.Store
annotate = linear_util.annotate
hashable_partial = linear_util.hashable_partial

canonicalize_shape = core.canonicalize_shape


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
    return core.Var


@dataclass(eq=False)
class AxisFrame:
    """Named axis of a mapped function.

    Attributes:
        name: Its name.
        size: Its size.
    """

    name: Any
    size: int


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

    Attributes:
        positional: The sizes of the positional dimensions.
        names: The names.
        named_sizes: The sizes of the named dimensions.
        positional_rank: The number of positional dimensions.
        named_rank: The number of named dimensions.
        rank: The number of dimensions.

    Example:
        >>> shape = NamedShape(2, 3, batch=8)
        >>> shape.rank, shape.positional, shape.names, shape.total
        (3, (2, 3), ('batch',), 48)
    """

    def __init__(self, *positional: int, **named: int) -> None:
        self.positional, self._named = positional, named
        self.names, self.named_sizes = tuple(named), tuple(named.values())
        self.positional_rank, self.named_rank = len(positional), len(named)
        self.rank = len(positional) + len(named)

    @property
    def named_items(self) -> dict[str, int]:
        """Names and sizes."""
        return dict(self._named)

    @property
    def total(self) -> int:
        """The number of elements."""
        return prod(self.positional) * prod(self._named.values())

    def __getitem__(self, dimension: Any) -> Any:
        if isinstance(dimension, str):
            return self._named[dimension]
        return self.positional[dimension]

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NamedShape):
            return (self.positional, self._named) == (other.positional, other._named)
        return isinstance(other, tuple) and not self._named and self.positional == other

    def __hash__(self) -> int:
        # Equal to the hash of an equal tuple.
        if not self._named:
            return hash(self.positional)
        return hash((self.positional, frozenset(self._named.items())))

    def __repr__(self) -> str:
        named = [f"{name}={size}" for name, size in self._named.items()]
        return f"NamedShape({', '.join([*map(str, self.positional), *named])})"


def as_named_shape(shape: Any) -> NamedShape:
    """Return a shape as a `NamedShape`."""
    return shape if isinstance(shape, NamedShape) else NamedShape(*shape)


def as_hashable_function(closure: Any) -> Any:
    """Return a decorator that makes functions with equal keys equal.

    Args:
        closure: The key.
    """
    return lambda f: util.HashableFunction(f, closure)


def split_dict(dct: Mapping[Any, Any], names: Iterable[Any]) -> list[Any]:
    """Return the values of all keys of a mapping, in a given order.

    Args:
        dct: The mapping.
        names: The keys.

    Raises:
        KeyError: A key is missing in `dct` or in `names`.
    """
    rest = dict(dct)
    values = [rest.pop(name) for name in names]
    if rest:
        raise KeyError(next(iter(rest)))  # no-catalogue: the era's own error: the key alone
    return values


def split_merge(predicate: Any, xs: Iterable[Any]) -> Any:
    """Partition a sequence, and return both parts and a function that merges such parts.

    Args:
        predicate: True for elements of the first part.
        xs: The elements.
    """
    xs = list(xs)
    chosen = [bool(predicate(x)) for x in xs]
    yes = [x for x, c in zip(xs, chosen, strict=True) if c]
    no = [x for x, c in zip(xs, chosen, strict=True) if not c]
    return yes, no, functools.partial(_merged, chosen)


def _merged(chosen: list[bool], new_yes: Iterable[Any], new_no: Iterable[Any]) -> list[Any]:
    yes, no = iter(new_yes), iter(new_no)
    return [next(yes if c else no) for c in chosen]


_API = "xlashard._jax.legacy_api"
_UTIL = f"{_API}:util."
_NOW = "jax.extend.core"
_TRACE = "jax.extend.core.take_current_trace()"
_NO_STACK = "JAX has one current trace instead of a stack of traces"
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
            *("check_jaxpr", "concrete_or_error", "find_top_trace", "jaxprs_in_params"),
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
        "UnshapedArray": refused("0.8.2", "jax.core.ShapedArray").because(
            "every abstract array has a shape"
        ),
        **dict.fromkeys(
            (
                *("MainTrace", "new_main", "new_base_main", "new_sublevel", "cur_sublevel"),
                "thread_local_state",
            ),
            refused("0.4.36", _TRACE).because(_NO_STACK),
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
        "wrap_name": works("0.7.0", "f'{transform}({name})'", _UTIL),
        "wraps": works("0.7.0", "functools.wraps", _UTIL),
    },
    "jax._src.util": {"prod": works("0.4.14", "math.prod")},
}
