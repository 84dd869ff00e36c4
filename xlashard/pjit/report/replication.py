"""Find values with more copies than requested, and constraints that unshard dimensions."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlashard._jax.trace.origins import Line, Origin, Scope, origins, source_frames, source_line
from xlashard._jax.trace.tracing import explicit_sharding
from xlashard.errors import ShardingError
from xlashard.geometry import MeshGrid
from xlashard.hlo.collectives import Collective
from xlashard.hlo.module import Frame
from xlashard.pjit.report.descriptions import decided_by, spec_text
from xlashard.pjit.report.explained_program import ExplainedProgram, ProgramValue, SourceLocator
from xlashard.pjit.report.model import ReplicationKind, ReplicationReport, UnevenReport
from xlashard.pjit.shardings import uneven as settings
from xlashard.pjit.shardings.uneven import CONSTRAINT, UnevenConstraint, uneven_constraints
from xlashard.program.annotate import is_open
from xlashard.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, from_jax
from xlashard.sharding.named import grid_of
from xlashard.wording import typed

CONSTRAINTS = {CONSTRAINT: "sharding", "reshard": "dst_sharding"}
"""Primitives that prescribe the sharding of a value, by the parameter that has the sharding.

JAX's `reshard` prescribes it on Explicit mesh axes.
"""


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


def result_constraints(jaxpr: Any, mesh: Mesh | None) -> Iterator[tuple[int, NamedSharding]]:
    """Yield the results of a closed jaxpr that a constraint makes, with its sharding on a mesh."""
    made = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name in CONSTRAINTS}
    for i, variable in enumerate(jaxpr.outvars):
        eqn = made.get(variable) if isinstance(variable, Hashable) else None
        sharding = None if eqn is None else constraint_of(eqn, mesh)
        if sharding is not None:
            yield i, sharding


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
        mesh: The mesh of the program, on which a constraint on an abstract mesh with the same axes
            stands.
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
    abstract = isinstance(sharding.mesh, AbstractMesh)
    if abstract and mesh is not None and dict(sharding.mesh.shape) == dict(mesh.shape):
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


def describe_replications(
    program: ExplainedProgram, collectives: Sequence[Collective], sources: SourceLocator
) -> tuple[ReplicationReport, ...]:
    """Find values with more copies than requested, most wasted bytes first."""
    mesh = program.mesh
    if mesh is None or len(program.plan.devices) == 1:
        return ()
    reports = [
        *_arguments(program, mesh),
        *_results(program, mesh),
        *_open_dims(program, mesh),
        *_constraints(program, collectives, mesh, sources),
    ]
    return tuple(sorted(reports, key=lambda r: -r.wasted_bytes))


def _arguments(program: ExplainedProgram, mesh: Mesh) -> Iterator[ReplicationReport]:
    """Yield the arguments of which a `ReplicationWarning` warns, if an axis divides them."""
    least = settings.FLAGS.warn_replicated * 2**20
    for value in program.arguments:
        if least and value.nbytes >= least and decided_by(value) == "partitioner":
            assert value.sharding is not None
            if value.sharding.rank_tiling(value.aval.ndim).is_replicated:
                yield from _report("argument", value, range(value.aval.ndim), mesh.axis_names)


def _results(program: ExplainedProgram, mesh: Mesh) -> Iterator[ReplicationReport]:
    """Yield results without a requested sharding that are not sharded over an argument's axis.

    A result with the sharding of an argument of its shape and dtype is as intended.
    """
    shardings = (value.sharding for value in (*program.arguments, *program.closed_over))
    named = (sharding for sharding in shardings if isinstance(sharding, NamedSharding))
    used = {axis for sharding in named for axis in sharding.normal_spec.axes}
    for value, requested in zip(program.results, _requested(program), strict=True):
        if requested is None and not _is_like_an_argument(program, value):
            dims = tuple(range(value.aval.ndim))
            yield from _report("result", value, dims, [a for a in mesh.axis_names if a in used])


def _is_like_an_argument(program: ExplainedProgram, value: ProgramValue) -> bool:
    """Return True if an argument of the same shape and dtype has the sharding of a result."""
    type_ = value.aval.shape, value.aval.dtype
    shardings = (a.sharding for a in program.arguments if (a.aval.shape, a.aval.dtype) == type_)
    own = value.sharding
    return any(
        own is not None and s is not None and own.is_equivalent_to(s, value.aval.ndim)
        for s in shardings
    )


def _requested(program: ExplainedProgram) -> list[Sharding | None]:
    """Return the sharding requested of each result: at the boundary, or by a final constraint."""
    requested = [value.requested for value in program.results]
    if program.call is not None:
        jaxpr = program.call.traced.jaxpr
        for i, constraint in result_constraints(jaxpr, program.mesh):
            if requested[i] is None and is_open(constraint):
                requested[i] = constraint
    return requested


def _open_dims(program: ExplainedProgram, mesh: Mesh) -> Iterator[ReplicationReport]:
    """Yield arguments and results with an unconstrained dimension that was left unsharded."""
    shardings = [*(value.lowered_sharding for value in program.arguments), *_requested(program)]
    for value, requested in zip((*program.arguments, *program.results), shardings, strict=True):
        sharding = value.sharding
        if not isinstance(requested, NamedSharding) or not is_open(requested) or sharding is None:
            continue
        counts = sharding.rank_tiling(value.aval.ndim).counts
        dims = requested.normal_spec.for_rank(value.aval.ndim)
        whole = tuple(i for i, axes in enumerate(dims) if axes is None and counts[i] == 1)
        yield from _report("open dimension", value, whole, mesh.axis_names)


def _report(
    kind: ReplicationKind, value: ProgramValue, dims: Sequence[int], axes: Iterable[str]
) -> Iterator[ReplicationReport]:
    """Yield the bytes wasted by not sharding dimensions over axes, if one of them divides."""
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding):
        return
    counts, sizes = sharding.rank_tiling(value.aval.ndim).counts, sharding.mesh.shape
    free = {a: sizes[a] for a in axes if sizes.get(a, 1) > 1 and a not in sharding.normal_spec.axes}
    able = {
        d: fitting
        for d in dims
        if (fitting := fitting_axes(value.aval.shape[d] // counts[d], free))
    }
    if not able:
        return
    cut = max(math.prod(free[a] for a in fitting) for fitting in able.values())
    fitting = {a for names in able.values() for a in names}
    yield ReplicationReport(
        kind=kind,
        path=value.path,
        spec=spec_text(sharding),
        dims=tuple(able),
        axes=tuple(a for a in free if a in fitting),
        wasted_bytes=value.device_bytes - value.device_bytes // cut,
    )


def fitting_axes(size: int, axes: Mapping[str, int]) -> list[str]:
    """List the axes of more than one device that a size can be sharded over together."""
    fitting = []
    for name, count in axes.items():
        if count > 1 and size and size % count == 0:
            fitting.append(name)
            size //= count
    return fitting


def _constraints(
    program: ExplainedProgram, collectives: Sequence[Collective], mesh: Mesh, sources: SourceLocator
) -> Iterator[ReplicationReport]:
    """Yield constraints that close sharded dimensions, where the program gathers for them.

    The partitioner may gather at the constraint, or before an operation that precedes it. A gather
    is attributed to a constraint if it runs along an axis that the constraint closes, and if its
    line is that of one of these operations, or its value is the argument that they begin with.
    """
    gathers = [c for c in collectives if c.kind == "all-gather"]
    if program.call is None or not gathers:
        return
    grid = grid_of(mesh)
    placed = [(value.path, value.sharding) for value in program.arguments]
    for closed in find_closed_dimensions(program.call.traced.jaxpr, placed, mesh):
        forced = [c for c in gathers if _is_forced(c, closed, grid)]
        if not forced:
            continue
        names = {part.name for c in forced for part in c.axes(grid) or ()}
        yield ReplicationReport(
            kind="constraint",
            path=typed(closed.aval.dtype, closed.aval.shape),
            spec=spec_text(closed.sharding),
            dims=closed.dims,
            axes=tuple(a for a in mesh.axis_names if a in names & closed.axes),
            wasted_bytes=sum(c.times * (c.result_bytes - c.operand_bytes) for c in forced),
            source=sources.line(closed.frames),
        )


def _is_forced(gather: Collective, closed: ClosedDimension, grid: MeshGrid) -> bool:
    along = {part.name for part in gather.axes(grid) or ()}
    if not along & closed.axes:
        return False
    if not gather.frames:
        return gather.op_name in closed.arguments
    return (gather.frames[0].file, gather.frames[0].line) in closed.lines


def describe_uneven(program: ExplainedProgram) -> tuple[UnevenReport, ...]:
    """Describe the dimensions of constraints that do not divide, most padding first."""
    if program.call is None or len(program.plan.devices) == 1:
        return ()
    jaxpr = program.call.traced.jaxpr
    results = {v: i for i, v in enumerate(jaxpr.outvars) if isinstance(v, Hashable)}
    reports: dict[UnevenReport, None] = {}
    for constraint in uneven_constraints(jaxpr):
        position = results.get(constraint.eqn.outvars[0])
        result = None if position is None else program.results[position]
        # A gradient repeats the constraint, at the same line.
        reports |= dict.fromkeys(_uneven(constraint, result, program.sources))
    return tuple(sorted(reports, key=lambda r: -r.padding_bytes))


def _uneven(
    constraint: UnevenConstraint, result: ProgramValue | None, sources: SourceLocator
) -> Iterator[UnevenReport]:
    aval, frames = constraint.aval, [Frame(*frame) for frame in source_frames(constraint.eqn)]
    final = None if result is None else result.sharding
    for dim in constraint.dims:
        yield UnevenReport(
            type=typed(aval.dtype, aval.shape),
            spec=spec_text(constraint.sharding),
            dim=dim.dim,
            size=dim.size,
            axes=tuple(name for name, _ in dim.axes),
            shards=dim.shards,
            shard_size=dim.shard_size,
            padded_size=dim.padded_size,
            empty_shards=dim.empty_shards,
            device_bytes=constraint.device_bytes,
            padding_bytes=constraint.padding_bytes,
            whole_bytes=constraint.whole_bytes,
            result="" if result is None else result.path,
            result_spec="" if final is None else spec_text(final),
            source=sources.line(frames),
        )


def is_needlessly_replicated(program: ExplainedProgram, value: ProgramValue) -> bool:
    """Return True if a value is replicated although a mesh axis divides one of its dimensions.

    The type of a value prescribes its sharding on Explicit axes: the user chose it.
    """
    mesh, sharding = program.mesh, value.sharding
    if explicit_sharding(value.aval) is not None:
        return False
    if mesh is None or sharding is None or sharding.num_devices == 1:
        return False
    if not sharding.rank_tiling(value.aval.ndim).is_replicated:
        return False
    return any(fitting_axes(size, mesh.shape) for size in value.aval.shape)
