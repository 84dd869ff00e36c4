"""Find constraints that unshard dimensions which were sharded at their origin."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlashard._jax.trace.origins import Line, Origin, Scope, origins, source_line
from xlashard._jax.trace.primitive_names import CONSTRAINT, CONSTRAINTS
from xlashard.core.sharding import Mesh, NamedSharding, Sharding, from_jax
from xlashard.errors import ShardingError
from xlashard.hlo.module import Frame


@dataclass(frozen=True, eq=False)
class ClosedDimension:
    """Constraint that unshards dimensions of a value which were sharded at its origin.

    Attributes:
        sharding: The sharding of the constraint.
        aval: The abstract value of the constrained value.
        dims: The dimensions that it closes.
        axes: The mesh axes that they were sharded over, without those that it uses elsewhere.
        frames: Its own line, if known.
        lines: Its line, and those of the operations between the sharded origin and the constraint.
        arguments: The paths of arguments among the origins.
    """

    sharding: NamedSharding
    aval: Any
    dims: tuple[int, ...]
    axes: frozenset[str]
    frames: tuple[Frame, ...]
    lines: frozenset[Line]
    arguments: frozenset[str]


type Argument = tuple[str, Sharding | None]
"""Path of an argument, and its sharding if known."""


def find_closed_dimensions(
    jaxpr: Any, arguments: Sequence[Argument], mesh: Mesh | None = None
) -> list[ClosedDimension]:
    """Find closed dimensions in a jaxpr and its inner jaxprs.

    Each dimension of a constraint is followed back through operations that preserve it, to other
    constraints and to the arguments of the program. Other operations end the search.

    Args:
        jaxpr: The closed jaxpr of a program.
        arguments: Its arguments, in order.
        mesh: The mesh of the program, for constraints on an abstract mesh.
    """
    top = Scope.of(jaxpr)
    by_variable = dict(zip(jaxpr.invars, arguments, strict=True))
    closed: dict[object, tuple[Any, NamedSharding, list[_ShardedOrigin]]] = {}
    for scope in top.all():
        for eqn in scope.jaxpr.eqns:
            sharding = constraint_of(eqn, mesh)
            if sharding is not None and eqn.primitive.name == CONSTRAINT:
                # A gradient repeats the constraint, at the same line.
                key = source_line(eqn), sharding, eqn.outvars[0].aval.shape
                sources = closed.setdefault(key, (eqn, sharding, []))[2]
                sources += _sharded_origins(scope, eqn, sharding, by_variable, mesh)
    return [_closed_dimension(*each) for each in closed.values() if each[2]]


@dataclass(frozen=True, eq=False)
class _ShardedOrigin:
    """Origin of a closed dimension, where it was sharded.

    Attributes:
        dim: The dimension of the constrained value.
        axes: The axes that it was sharded over.
        lines: The lines of the operations in between.
        argument: The path of the argument that is the origin, or empty.
    """

    dim: int
    axes: frozenset[str]
    lines: frozenset[Line]
    argument: str


def constraint_of(eqn: Any, mesh: Mesh | None) -> NamedSharding | None:
    """Return the named sharding of a constraint; None for other equations, and for partial sums.

    Args:
        eqn: The equation.
        mesh: The mesh of the compiled program, on which a constraint stands that names an abstract
            mesh with the same axes, or one of the devices for which it was traced.
    """
    parameter = CONSTRAINTS.get(eqn.primitive.name)
    if parameter is None:
        return None
    try:
        sharding = from_jax(eqn.params[parameter])
    except ShardingError:
        return None
    if not isinstance(sharding, NamedSharding):
        return None
    if mesh is not None and dict(sharding.mesh.shape) == dict(mesh.shape):
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def _sharded_origins(
    scope: Scope,
    eqn: Any,
    sharding: NamedSharding,
    by_variable: Mapping[Any, Argument],
    mesh: Mesh | None,
) -> Iterator[_ShardedOrigin]:
    value = eqn.invars[0]
    used = frozenset(sharding.normal_spec.axes)
    for dim, dim_axes in enumerate(sharding.normal_spec.for_rank(value.aval.ndim)):
        if dim_axes != ():
            continue
        for origin in origins(scope, value, dim, CONSTRAINTS):
            path, before = by_variable.get(origin.variable, ("", None))
            if origin.eqn is not None:
                path, before = "", constraint_of(origin.eqn, mesh)
            axes = _axes(before, origin, sharding) - used
            if axes:
                yield _ShardedOrigin(dim, axes, origin.lines, path)


def _axes(before: Sharding | None, origin: Origin, sharding: NamedSharding) -> frozenset[str]:
    """Return the axes that the dimension of an origin is sharded over."""
    if not isinstance(before, NamedSharding) or before.mesh != sharding.mesh:
        return frozenset()
    axes = before.normal_spec.for_rank(origin.variable.aval.ndim)[origin.dim]
    return frozenset(axes or ())


def _closed_dimension(
    eqn: Any, sharding: NamedSharding, sources: list[_ShardedOrigin]
) -> ClosedDimension:
    line = source_line(eqn)
    own: frozenset[Line] = frozenset() if line is None else frozenset([line])
    return ClosedDimension(
        sharding=sharding,
        aval=eqn.outvars[0].aval,
        dims=tuple(sorted({source.dim for source in sources})),
        axes=frozenset().union(*(source.axes for source in sources)),
        frames=() if line is None else (Frame(*line),),
        lines=own.union(*(source.lines for source in sources)),
        arguments=frozenset(source.argument for source in sources if source.argument),
    )
