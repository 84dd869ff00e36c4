"""Constraints that close a dimension which something before them had cut, found in a jaxpr."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlashard._jax.dataflow import Line, Origin, Scope, origins, source_line
from xlashard.errors import ShardingError
from xlashard.program.hlo import Frame
from xlashard.sharding import NamedSharding, Sharding, from_jax

CONSTRAINT = "sharding_constraint"
"""The name of the primitive of constraints, of ours and of JAX's."""


@dataclass(frozen=True, eq=False)
class Closing:
    """A constraint that leaves dimensions whole which were cut where the value comes from.

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


type Argument = tuple[str, Sharding | None]
"""The path of an argument, and how it is dealt out, where that is known."""


def find_closings(jaxpr: Any, arguments: Sequence[Argument]) -> list[Closing]:
    """Finds them, in a jaxpr and all jaxprs inside it.

    From each dimension that a constraint closes it goes back over operations that keep the
    dimension, to other constraints and to the arguments of the program. What lies behind any other
    operation is not known.

    Args:
        jaxpr: The closed jaxpr of a program.
        arguments: Its arguments, in order.
    """
    top = Scope.of(jaxpr)
    taken = dict(zip(jaxpr.invars, arguments, strict=True))
    found: dict[object, tuple[Any, NamedSharding, list[_Cut]]] = {}
    for scope in top.all():
        for eqn in scope.jaxpr.eqns:
            sharding = constraint_of(eqn)
            if sharding is not None:
                # A gradient has the constraint again, at the same line.
                key = source_line(eqn), sharding, eqn.outvars[0].aval.shape
                cuts = found.setdefault(key, (eqn, sharding, []))[2]
                cuts += _cuts(scope, eqn, sharding, taken)
    return [_closing(*closing) for closing in found.values() if closing[2]]


def result_constraints(jaxpr: Any) -> Iterator[tuple[int, NamedSharding]]:
    """Yield the results of a closed jaxpr that a constraint makes, with its sharding."""
    made = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == CONSTRAINT}
    for i, variable in enumerate(jaxpr.outvars):
        eqn = made.get(variable) if isinstance(variable, Hashable) else None
        sharding = None if eqn is None else constraint_of(eqn)
        if sharding is not None:
            yield i, sharding


@dataclass(frozen=True, eq=False)
class _Cut:
    """A dimension that a constraint closes, and that was cut where it comes from.

    Attributes:
        dim: The dimension of the constrained value.
        axes: What had cut it.
        lines: The lines on the way.
        argument: The path of the argument that it comes from, or empty.
    """

    dim: int
    axes: frozenset[str]
    lines: frozenset[Line]
    argument: str


def constraint_of(eqn: Any) -> NamedSharding | None:
    """What a constraint says of axes; None for other equations, and for partial sums."""
    if eqn.primitive.name != CONSTRAINT:
        return None
    try:
        sharding = from_jax(eqn.params["sharding"])
    except ShardingError:
        return None
    return sharding if isinstance(sharding, NamedSharding) else None


def _cuts(
    scope: Scope, eqn: Any, sharding: NamedSharding, taken: Mapping[Any, Argument]
) -> Iterator[_Cut]:
    value = eqn.invars[0]
    used = frozenset(sharding.normal_spec.axes)
    for dim, cut in enumerate(sharding.normal_spec.for_rank(value.aval.ndim)):
        if cut != ():
            continue
        for origin in origins(scope, value, dim, CONSTRAINT):
            path, before = taken.get(origin.variable, ("", None))
            if origin.eqn is not None:
                path, before = "", constraint_of(origin.eqn)
            axes = _axes(before, origin, sharding) - used
            if axes:
                yield _Cut(dim, axes, origin.lines, path)


def _axes(before: Sharding | None, origin: Origin, sharding: NamedSharding) -> frozenset[str]:
    """The axes that cut the dimension of an origin."""
    if not isinstance(before, NamedSharding) or before.mesh != sharding.mesh:
        return frozenset()
    cut = before.normal_spec.for_rank(origin.variable.aval.ndim)[origin.dim]
    return frozenset(cut or ())


def _closing(eqn: Any, sharding: NamedSharding, cuts: list[_Cut]) -> Closing:
    line = source_line(eqn)
    own: frozenset[Line] = frozenset() if line is None else frozenset([line])
    return Closing(
        sharding=sharding,
        aval=eqn.outvars[0].aval,
        dims=tuple(sorted({cut.dim for cut in cuts})),
        axes=frozenset().union(*(cut.axes for cut in cuts)),
        frames=() if line is None else (Frame(*line),),
        lines=own.union(*(cut.lines for cut in cuts)),
        arguments=frozenset(cut.argument for cut in cuts if cut.argument),
    )
