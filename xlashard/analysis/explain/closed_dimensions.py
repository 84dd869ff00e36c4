"""Find constraints that unshard dimensions which were sharded at their origin."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlashard._jax.trace.origins import Line, Scope, origins, source_line
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
    closed: dict[object, tuple[Any, NamedSharding, list[_Closed]]] = {}
    for scope in top.all():
        for eqn in scope.jaxpr.eqns:
            sharding = constraint_of(eqn, mesh)
            if sharding is not None and eqn.primitive.name == CONSTRAINT:
                # A gradient repeats the constraint, at the same line.
                key = source_line(eqn), sharding, eqn.outvars[0].aval.shape
                sources = closed.setdefault(key, (eqn, sharding, []))[2]
                sources += _closed_by(scope, eqn, sharding, by_variable, mesh)
    return [_closed_dimension(*each) for each in closed.values() if each[2]]


@dataclass(frozen=True, eq=False)
class DimensionSource:
    """An argument or constraint that determines the sharding of a dimension of another value.

    Attributes:
        path: Path of the argument; empty for a constraint.
        line: Line of the constraint; None for an argument.
        sharding: Its sharding.
        shape: Shape of the argument or the constrained value.
        dim: Its dimension.
        lines: Lines of the operations between the two, its own included.
    """

    path: str
    line: Line | None
    sharding: NamedSharding
    shape: tuple[int, ...]
    dim: int
    lines: frozenset[Line]

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the dimension."""
        return list_axes(self.sharding, len(self.shape))[self.dim]


type _Closed = tuple[int, DimensionSource]
"""A dimension that a constraint closes, and where it was sharded."""


def list_axes(sharding: NamedSharding, rank: int) -> list[tuple[str, ...]]:
    """Return the axes of each dimension; none for an unconstrained dimension."""
    return [tuple(axes or ()) for axes in sharding.normal_spec.for_rank(rank)]


def find_sources(
    scope: Scope, value: Any, dim: int, arguments: Mapping[Any, Argument], mesh: Mesh | None
) -> Iterator[DimensionSource]:
    """Yield the arguments and constraints that determine the sharding of a dimension.

    Args:
        scope: Scope of the value.
        value: Variable of its jaxpr.
        dim: The dimension.
        arguments: The arguments of the program, by variable.
        mesh: The mesh of the program, for constraints on an abstract mesh.
    """
    for origin in origins(scope, value, dim, CONSTRAINTS):
        path, sharding = arguments.get(origin.variable, ("", None))
        line = None
        if origin.eqn is not None:
            path, line = "", source_line(origin.eqn)
            sharding = constraint_of(origin.eqn, mesh)
        shape = tuple(origin.variable.aval.shape)
        # Slices of stacked loop outputs can't always be mapped to a dimension.
        if isinstance(sharding, NamedSharding) and origin.dim < len(shape):
            yield DimensionSource(path, line, sharding, shape, origin.dim, origin.lines)


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


def _closed_by(
    scope: Scope,
    eqn: Any,
    sharding: NamedSharding,
    arguments: Mapping[Any, Argument],
    mesh: Mesh | None,
) -> Iterator[_Closed]:
    value, spec = eqn.invars[0], sharding.normal_spec
    for dim, dim_axes in enumerate(spec.for_rank(value.aval.ndim)):
        for source in find_sources(scope, value, dim, arguments, mesh) if dim_axes == () else ():
            is_sharded = not set(source.axes) <= set(spec.axes)
            if is_sharded and source.sharding.mesh == sharding.mesh:
                yield dim, source


def _closed_dimension(
    eqn: Any, sharding: NamedSharding, closed: Sequence[_Closed]
) -> ClosedDimension:
    line = source_line(eqn)
    own: frozenset[Line] = frozenset() if line is None else frozenset([line])
    sources, used = [source for _, source in closed], sharding.normal_spec.axes
    return ClosedDimension(
        sharding=sharding,
        aval=eqn.outvars[0].aval,
        dims=tuple(sorted({dim for dim, _ in closed})),
        axes=frozenset().union(*(source.axes for source in sources)).difference(used),
        frames=() if line is None else (Frame(*line),),
        lines=own.union(*(source.lines for source in sources)),
        arguments=frozenset(source.path for source in sources if source.path),
    )
