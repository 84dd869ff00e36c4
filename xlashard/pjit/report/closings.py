"""Constraints that close a dimension which something before them had cut, found in a jaxpr."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlashard._jax.jaxprs import Literal, nested, source_line
from xlashard.program.hlo import Frame
from xlashard.sharding import NamedSharding, Sharding, from_jax

type Line = tuple[str, int]
"""File and line."""


@dataclass(frozen=True, eq=False)
class Closing:
    """A constraint on a value that was cut along an axis, whole in that dimension from then on.

    Attributes:
        sharding: What the constraint says.
        aval: The abstract value of what is constrained.
        dims: The dimensions that it closes.
        axes: The mesh axes that had cut them, and that it doesn't use elsewhere.
        frames: Its own line, or none.
        lines: Its line, and those of the operations between what was cut and it.
        arguments: The paths of arguments among what was cut.
    """

    sharding: NamedSharding
    aval: Any
    dims: tuple[int, ...]
    axes: frozenset[str]
    frames: tuple[Frame, ...]
    lines: frozenset[Line]
    arguments: frozenset[str]


# Operations through which a cut of a dimension goes as it is, by JAX's names.
_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg
    nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())


def find_closings(jaxpr: Any, arguments: Mapping[str, Sharding | None]) -> list[Closing]:
    """Finds them, in a jaxpr and all jaxprs inside it.

    From each constraint it goes back over elementwise operations, to other constraints and to the
    arguments of the program. What lies behind any other operation is not known.

    Args:
        jaxpr: The closed jaxpr of a program.
        arguments: How its arguments are dealt out, by path, in order.
    """
    found: list[Closing] = []
    for inner in nested(jaxpr):
        outer = dict(zip(jaxpr.invars, arguments, strict=True)) if inner is jaxpr else {}
        makers = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
        for eqn in inner.eqns:
            sharding = _constraint(eqn)
            if sharding is not None:
                cuts = list(_cuts(eqn.invars[0], makers, outer, arguments))
                found += _closings(eqn, sharding, cuts)
    return found


@dataclass(frozen=True, eq=False)
class _Cut:
    """How a value was dealt out, at a place that leads to a constraint.

    Attributes:
        sharding: How.
        lines: Its own line and those on the way.
        argument: Its path, for an argument.
    """

    sharding: NamedSharding
    lines: frozenset[Line]
    argument: str = ""


def _constraint(eqn: Any) -> NamedSharding | None:
    """What a constraint of ours or of JAX says; None for other equations."""
    if eqn.primitive.name != "sharding_constraint":
        return None
    sharding = from_jax(eqn.params["sharding"])
    return sharding if isinstance(sharding, NamedSharding) else None


def _cuts(
    variable: Any,
    makers: Mapping[Any, Any],
    outer: Mapping[Any, str],
    arguments: Mapping[str, Sharding | None],
) -> Iterator[_Cut]:
    """The known shardings from which elementwise operations lead to a variable."""
    waiting: list[tuple[Any, frozenset[Line]]] = [(variable, frozenset())]
    seen: set[Any] = set()
    while waiting:
        value, lines = waiting.pop()
        if isinstance(value, Literal) or value in seen or value.aval.shape != variable.aval.shape:
            continue
        seen.add(value)
        if value in outer:
            path = outer[value]
            sharding = arguments[path]
            if isinstance(sharding, NamedSharding):
                yield _Cut(sharding, lines, path)
        elif (eqn := makers.get(value)) is not None:
            lines |= _lines(eqn)
            sharding = _constraint(eqn)
            if sharding is not None:
                yield _Cut(sharding, lines)
            elif eqn.primitive.name in _ELEMENTWISE:
                waiting += [(operand, lines) for operand in eqn.invars]


def _lines(eqn: Any) -> frozenset[Line]:
    line = source_line(eqn)
    return frozenset() if line is None else frozenset([line])


def _closings(eqn: Any, sharding: NamedSharding, cuts: Sequence[_Cut]) -> Iterator[Closing]:
    aval = eqn.outvars[0].aval
    closed = {i for i, cut in enumerate(sharding.normal_spec.for_rank(aval.ndim)) if cut == ()}
    dims: set[int] = set()
    axes: set[str] = set()
    relevant: list[_Cut] = []
    for cut in cuts:
        before = cut.sharding.normal_spec.for_rank(aval.ndim)
        lost = {d: set(before[d] or ()) - set(sharding.normal_spec.axes) for d in closed}
        lost = {d: names for d, names in lost.items() if names}
        if lost and cut.sharding.mesh == sharding.mesh:
            relevant.append(cut)
            dims.update(lost)
            axes.update(*lost.values())
    if not relevant:
        return
    line = source_line(eqn)
    yield Closing(
        sharding=sharding,
        aval=aval,
        dims=tuple(sorted(dims)),
        axes=frozenset(axes),
        frames=() if line is None else (Frame(*line),),
        lines=_lines(eqn).union(*(cut.lines for cut in relevant)),
        arguments=frozenset(cut.argument for cut in relevant if cut.argument),
    )
