"""Trace dimensions of values in a jaxpr back to their origins."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax._src import core, source_info_util

type Line = tuple[str, int]
"""File and line of the user's code."""

# Primitives whose result has the dimensions of its operands.
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
    """A jaxpr inside a program, and the origins of its arguments.

    Attributes:
        jaxpr: The jaxpr.
        makers: The position and the equation that computes each value.
        outer: For each argument the value outside, its scope, and the number of additional leading
            dimensions of that value.
        inner: The scopes of the jaxprs of an equation, by the equation's position.
    """

    jaxpr: Any
    makers: dict[Any, tuple[int, Any]]
    outer: dict[Any, "tuple[Scope, Any, int]"]
    inner: dict[int, list["Scope"]] = field(default_factory=dict)

    @classmethod
    def of(cls, jaxpr: Any, outer: "Mapping[Any, tuple[Scope, Any, int]] | None" = None) -> "Scope":
        """Return the scope of a jaxpr, with the scopes of all jaxprs inside it."""
        makers = {v: (i, eqn) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        scope = cls(jaxpr, makers, dict(outer or {}))
        for i, eqn in enumerate(jaxpr.eqns):
            for body in core.jaxprs_in_params(eqn.params):
                scope.inner.setdefault(i, []).append(cls.of(body, _taken(scope, eqn, body)))
        return scope

    def all(self) -> "Iterator[Scope]":
        """Yield this scope and all scopes inside it."""
        yield self
        for scopes in self.inner.values():
            for scope in scopes:
                yield from scope.all()


def _taken(scope: Scope, eqn: Any, body: Any) -> dict[Any, tuple[Scope, Any, int]]:
    """Return the origins of the arguments of an equation's body."""
    # Inside shard_map a value is a shard, which the mesh shards no further.
    if len(body.invars) != len(eqn.invars) or eqn.primitive.name == "shard_map":
        return {}
    taken = {}
    for inside, outside in zip(body.invars, eqn.invars, strict=True):
        # The arguments of a scan's body are slices.
        sliced = int(eqn.primitive.name == "scan" and outside.aval.ndim > inside.aval.ndim)
        if outside.aval.shape[sliced:] == inside.aval.shape:
            taken[inside] = scope, outside, sliced
    return taken


@dataclass(frozen=True, eq=False)
class Origin:
    """A value whose dimension is the origin of another value's dimension.

    Attributes:
        scope: The scope of the value.
        variable: The value.
        dim: The dimension.
        eqn: The equation that computes the value; None for an argument of the scope.
        lines: The lines of the equations in between, its own included.
    """

    scope: Scope
    variable: Any
    dim: int
    eqn: Any
    lines: frozenset[Line]


def origins(scope: Scope, variable: Any, dim: int, stop: str) -> Iterator[Origin]:
    """Trace a dimension back through operations that preserve it, and yield its origins.

    Args:
        scope: The scope of the value.
        variable: The value.
        dim: The dimension.
        stop: The name of a primitive at whose results to stop, besides arguments of the program.
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
    """Return the values and dimensions that a dimension of an equation's result comes from."""
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
    """Yield the operands that a dimension of a dot product comes from."""
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
    """Return True if an operand of an equation is a variable, not a literal."""
    return not isinstance(value, core.Literal)


def source_line(eqn: Any) -> Line | None:
    """Return file and line of the user's code of an equation, or None if unknown."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line)


def _lines(eqn: Any) -> frozenset[Line]:
    line = source_line(eqn)
    return frozenset() if line is None else frozenset([line])
