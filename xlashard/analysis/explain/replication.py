"""Find values with more copies than requested."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from xlashard._jax.trace.primitive_names import CONSTRAINTS
from xlashard._jax.trace.tracing import explicit_sharding
from xlashard.analysis.explain.closed_dimensions import (
    ClosedDimension,
    constraint_of,
    find_closed_dimensions,
)
from xlashard.analysis.explain.descriptions import decided_by, spec_text
from xlashard.analysis.explain.model import ReplicationKind, ReplicationReport
from xlashard.analysis.programs.program import Compilation, ProgramValue
from xlashard.core.pjit.shardings import uneven as settings
from xlashard.core.program.annotate import is_open
from xlashard.core.sharding import Mesh, NamedSharding, Sharding
from xlashard.core.sharding.named import grid_of
from xlashard.geometry import MeshGrid
from xlashard.hlo.collectives import Collective
from xlashard.support.formatting import typed


def describe_replications(program: Compilation) -> tuple[ReplicationReport, ...]:
    """Find values with more copies than requested, most wasted bytes first."""
    mesh = program.mesh
    if mesh is None or len(program.devices) == 1:
        return ()
    reports = [
        *_arguments(program, mesh),
        *_results(program, mesh),
        *_open_dims(program, mesh),
        *_constraints(program, mesh),
    ]
    return tuple(sorted(reports, key=lambda r: -r.wasted_bytes))


def _arguments(program: Compilation, mesh: Mesh) -> Iterator[ReplicationReport]:
    """Yield the arguments of which a `ReplicationWarning` warns, if an axis divides them."""
    least = settings.FLAGS.warn_replicated * 2**20
    for value in program.arguments:
        if least and value.nbytes >= least and decided_by(value) == "partitioner":
            assert value.sharding is not None
            if value.sharding.rank_tiling(value.aval.ndim).is_replicated:
                yield from _report("argument", value, range(value.aval.ndim), mesh.axis_names)


def _results(program: Compilation, mesh: Mesh) -> Iterator[ReplicationReport]:
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


def _is_like_an_argument(program: Compilation, value: ProgramValue) -> bool:
    """Return True if an argument of the same shape and dtype has the sharding of a result."""
    type_ = value.aval.shape, value.aval.dtype
    shardings = (a.sharding for a in program.arguments if (a.aval.shape, a.aval.dtype) == type_)
    own = value.sharding
    return any(
        own is not None and s is not None and own.is_equivalent_to(s, value.aval.ndim)
        for s in shardings
    )


def _requested(program: Compilation) -> list[Sharding | None]:
    """Return the sharding requested of each result: at the boundary, or by a final constraint."""
    requested = [value.requested for value in program.results]
    if program.jaxpr is not None:
        jaxpr = program.jaxpr
        for i, constraint in result_constraints(jaxpr, program.mesh):
            if requested[i] is None and is_open(constraint):
                requested[i] = constraint
    return requested


def result_constraints(jaxpr: Any, mesh: Mesh | None) -> Iterator[tuple[int, NamedSharding]]:
    """Yield the results of a closed jaxpr that a constraint makes, with its sharding on a mesh."""
    makers = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name in CONSTRAINTS}
    for i, variable in enumerate(jaxpr.outvars):
        eqn = makers.get(variable) if isinstance(variable, Hashable) else None
        sharding = None if eqn is None else constraint_of(eqn, mesh)
        if sharding is not None:
            yield i, sharding


def _open_dims(program: Compilation, mesh: Mesh) -> Iterator[ReplicationReport]:
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


def _constraints(program: Compilation, mesh: Mesh) -> Iterator[ReplicationReport]:
    """Yield constraints that close sharded dimensions, where the program gathers for them.

    The partitioner may gather at the constraint, or before an operation that precedes it. A gather
    is attributed to a constraint if it runs along an axis that the constraint closes, and if its
    line is that of one of these operations, or its value is the argument that they begin with.
    """
    gathers = [c for c in program.collectives if c.kind == "all-gather"]
    if program.jaxpr is None or not gathers:
        return
    grid = grid_of(mesh)
    placed = [(value.path, value.sharding) for value in program.arguments]
    for closed in find_closed_dimensions(program.jaxpr, placed, mesh):
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
            source=program.sources.line(closed.frames),
        )


def _is_forced(gather: Collective, closed: ClosedDimension, grid: MeshGrid) -> bool:
    along = {part.name for part in gather.axes(grid) or ()}
    if not along & closed.axes:
        return False
    if not gather.frames:
        return gather.op_name in closed.arguments
    return (gather.frames[0].file, gather.frames[0].line) in closed.lines


def is_needlessly_replicated(program: Compilation, value: ProgramValue) -> bool:
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
