"""`jax.core`, `jax.abstract_arrays`, `jax.linear_util`, `jax.util`: jaxprs and abstract values."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import jax

from xlashard._jax.legacy_api import core, linear_util, partial_eval, util
from xlashard.legacy.entries.entry import RemovedApi
from xlashard.support.lazily import dataclass

type Shape = Sequence[Any]
UnitVar = RemovedApi("jax.core.UnitVar")
ConcreteArray = RemovedApi("jax.core.ConcreteArray")
DShapedArray = RemovedApi("jax.core.DShapedArray")

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


def lattice_join(x: Any, y: Any) -> Any:
    """Return the abstract value that two abstract values have in common.

    Args:
        x: An abstract value, or None for no value.
        y: Another one of the same shape and dtype.

    Raises:
        TypeError: They differ in more than their weak types.
    """
    if x is None or y is None:
        return y if x is None else x
    if not core.typematch(x, y):
        raise TypeError(x, y)  # no-catalogue: the era's own error: both values
    return x if y.weak_type else y


def traverse_jaxpr_params(f: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a function of the jaxprs in an equation's parameters, by name.

    Args:
        f: The function.
        params: The parameters; of several jaxprs in one parameter, the last one counts.
    """
    listed = ((name, p if isinstance(p, tuple | list) else [p]) for name, p in params.items())
    return {name: f(p) for name, ps in listed for p in ps if isinstance(p, core.Jaxpr)}


def gensym(jaxprs: Any = None, suffix: str = "") -> Any:
    """Return the constructor of variables, which need no numbers today.

    Args:
        jaxprs: Ignored.
        suffix: Ignored.
    """
    return core.Var


@dataclass(frozen=True)
class TraceLevel:
    """Transformation in progress, which was a `MainTrace`.

    Attributes:
        level: The number of transformations around it.
        trace_type: The class of its trace.
    """

    level: int
    trace_type: type


class TraceStack:
    """The transformations in progress in this thread."""

    @property
    def stack(self) -> list[TraceLevel]:
        """The transformations, outermost first; the first one is that of eager operations."""
        return [TraceLevel(n, type(trace)) for n, trace in enumerate(_list_traces())]

    @property
    def dynamic(self) -> TraceLevel:
        """The innermost one that traces a program, or that of eager operations."""
        return self.stack[_find_program_level(_list_traces())]


thread_local_state = SimpleNamespace(trace_state=SimpleNamespace(trace_stack=TraceStack()))


@dataclass(frozen=True, order=True)
class Sublevel:
    """The number of programs in progress.

    Attributes:
        level: That number.
    """

    level: int


def cur_sublevel() -> Sublevel:
    """Return the number of programs that are traced; 0 outside of every `jax.jit`."""
    return Sublevel(sum(map(_traces_program, _list_traces())))


class TopTrace:
    """Trace with its level; other attributes are those of the trace.

    Args:
        trace: The trace.
        level: The number of traces around it.
    """

    def __init__(self, trace: Any, level: int) -> None:
        self._trace = trace
        self.level = level
        self.main = TraceLevel(level, type(trace))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)


def find_top_trace(xs: Iterable[Any]) -> TopTrace:
    """Return the innermost trace of some values, or that of the program around them.

    Args:
        xs: The values.
    """
    traces = _list_traces()
    traces = traces[: _find_program_level(traces) + 1]
    for x in xs:
        if isinstance(x, core.Tracer):
            traces = max(traces, core.unsafe_get_trace_stack(x._trace), key=len)
    return TopTrace(traces[-1], len(traces) - 1)


def _list_traces() -> list[Any]:
    return core.unsafe_get_trace_stack(core.trace_ctx.trace)


def _traces_program(trace: Any) -> bool:
    return isinstance(trace, partial_eval.DynamicJaxprTrace)


def _find_program_level(traces: Sequence[Any]) -> int:
    levels = [level for level, trace in enumerate(traces) if _traces_program(trace)]
    return levels[-1] if levels else 0


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


def wrap_name(name: str, transform_name: str) -> str:
    """Return the name of a transformed function.

    Args:
        name: The name of the function.
        transform_name: The name of the transformation, as in `jvp(f)`.
    """
    return f"{transform_name}({name})"


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
