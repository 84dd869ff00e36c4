"""Where a dimension of a value in a jaxpr comes from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax._src import core, source_info_util

type Line = tuple[str, int]
"""File and line of the user's code."""

# Operations whose result has the dimensions of its operands, by JAX's names.
_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg
    nextafter not or pow real reduce_precision rem round rsqrt select_n sharding_constraint sign sin
    sinh sqrt square stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())

_REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
)


@dataclass(frozen=True, eq=False)
class Scope:
    """A jaxpr inside a program, and where the values come from that it takes.

    Attributes:
        jaxpr: The jaxpr.
        makers: The equation that makes each value.
        outer: For what it takes: the value outside, its scope, and by how many dimensions that has
            more in front.
        inner: The scopes of the jaxprs of an equation, by the equation's place.
    """

    jaxpr: Any
    makers: dict[Any, tuple[int, Any]]
    outer: dict[Any, "tuple[Scope, Any, int]"]
    inner: dict[int, list["Scope"]] = field(default_factory=dict)

    @classmethod
    def of(cls, jaxpr: Any, outer: "Mapping[Any, tuple[Scope, Any, int]] | None" = None) -> "Scope":
        """The scope of a jaxpr, with those of all jaxprs inside it."""
        makers = {v: (i, eqn) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        scope = cls(jaxpr, makers, dict(outer or {}))
        for i, eqn in enumerate(jaxpr.eqns):
            for body in core.jaxprs_in_params(eqn.params):
                scope.inner.setdefault(i, []).append(cls.of(body, _taken(scope, eqn, body)))
        return scope

    def all(self) -> "Iterator[Scope]":
        """This scope and all inside it."""
        yield self
        for scopes in self.inner.values():
            for scope in scopes:
                yield from scope.all()


def _taken(scope: Scope, eqn: Any, body: Any) -> dict[Any, tuple[Scope, Any, int]]:
    """Where the values come from that the body of an equation takes."""
    # Inside shard_map a value is a shard, of which the mesh cuts nothing more.
    if len(body.invars) != len(eqn.invars) or eqn.primitive.name == "shard_map":
        return {}
    taken = {}
    for inside, outside in zip(body.invars, eqn.invars, strict=True):
        # The body of a scan takes slices.
        sliced = int(eqn.primitive.name == "scan" and outside.aval.ndim > inside.aval.ndim)
        if outside.aval.shape[sliced:] == inside.aval.shape:
            taken[inside] = scope, outside, sliced
    return taken


@dataclass(frozen=True, eq=False)
class Origin:
    """A value from whose dimension another value's dimension comes.

    Attributes:
        scope: Where it is.
        variable: The value.
        dim: The dimension.
        eqn: The equation that makes it; None for what the scope takes.
        lines: The lines of the equations on the way, its own included.
    """

    scope: Scope
    variable: Any
    dim: int
    eqn: Any
    lines: frozenset[Line]


def origins(scope: Scope, variable: Any, dim: int, stop: str) -> Iterator[Origin]:
    """Follows a dimension back, over operations that keep it, to what it comes from.

    Args:
        scope: Where the value is.
        variable: The value.
        dim: The dimension.
        stop: The name of a primitive at whose results to stop; and at what the program takes.
    """
    waiting = [Origin(scope, variable, dim, None, frozenset())]
    seen: set[tuple[int, Any, int]] = set()
    while waiting:
        at = waiting.pop()
        key = id(at.scope), at.variable, at.dim
        if isinstance(at.variable, core.Literal) or key in seen:
            continue
        seen.add(key)
        made = at.scope.makers.get(at.variable)
        if made is not None:
            place, eqn = made
            lines = at.lines | _lines(eqn)
            if eqn.primitive.name == stop:
                yield Origin(at.scope, at.variable, at.dim, eqn, lines)
                continue
            found = _back(at, place, eqn)
            waiting += [Origin(s, v, d, None, lines) for s, v, d in found]
        elif at.variable in at.scope.outer:
            outside, value, shift = at.scope.outer[at.variable]
            waiting.append(Origin(outside, value, at.dim + shift, None, at.lines))
        else:
            yield at


def _back(at: Origin, place: int, eqn: Any) -> list[tuple[Scope, Any, int]]:
    """The values, and their dimensions, from which an equation makes a dimension of its result."""
    inner = at.scope.inner.get(place, [])
    if len(inner) == 1 and eqn.primitive.name not in ("scan", "while", "cond"):
        outputs = inner[0].jaxpr.outvars
        if len(outputs) == len(eqn.outvars):
            return [(inner[0], outputs[eqn.outvars.index(at.variable)], at.dim)]
    return [(at.scope, value, dim) for value, dim in _operands(eqn, at.dim)]


def _operands(eqn: Any, dim: int) -> Iterator[tuple[Any, int]]:
    name, params = eqn.primitive.name, eqn.params
    if name in _ELEMENTWISE:
        shape = eqn.outvars[0].aval.shape
        yield from ((v, dim) for v in eqn.invars if v.aval.shape == shape)
    elif name == "dot_general":
        yield from _factors(eqn, dim)
    elif name == "transpose":
        yield eqn.invars[0], params["permutation"][dim]
    elif name == "broadcast_in_dim" and dim in params["broadcast_dimensions"]:
        before = params["broadcast_dimensions"].index(dim)
        if eqn.invars[0].aval.shape[before] == eqn.outvars[0].aval.shape[dim]:
            yield eqn.invars[0], before
    elif name in _REDUCTIONS or name == "squeeze":
        gone = params["dimensions"] if name == "squeeze" else params["axes"]
        yield eqn.invars[0], [d for d in range(eqn.invars[0].aval.ndim) if d not in gone][dim]


def _factors(eqn: Any, dim: int) -> Iterator[tuple[Any, int]]:
    """The factor, or both for a dimension of the batch, that a product has a dimension from."""
    contracted, batched = eqn.params["dimension_numbers"]
    count = len(batched[0])
    if dim < count:
        yield from ((v, dims[dim]) for v, dims in zip(eqn.invars, batched, strict=True))
        return
    dim -= count
    for value, *used in zip(eqn.invars, contracted, batched, strict=True):
        free = [d for d in range(value.aval.ndim) if d not in (*used[0], *used[1])]
        if dim < len(free):
            yield value, free[dim]
            return
        dim -= len(free)


def is_variable(value: Any) -> bool:
    """Whether an operand of an equation is a variable, and not a number written out."""
    return not isinstance(value, core.Literal)


def source_line(eqn: Any) -> Line | None:
    """File and line of the user's code that made an equation, or None where it is not known."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line)


def _lines(eqn: Any) -> frozenset[Line]:
    line = source_line(eqn)
    return frozenset() if line is None else frozenset([line])
