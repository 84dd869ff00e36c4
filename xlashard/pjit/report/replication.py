"""Values that are held more often than anyone said they should be."""

import math
from collections.abc import Iterable, Iterator, Sequence

from xlashard.geometry import MeshGrid
from xlashard.pjit.report.closings import Closing, find_closings, result_constraints
from xlashard.pjit.report.communication import Sources
from xlashard.pjit.report.parts import ReplicationKind, ReplicationReport
from xlashard.pjit.report.values import Program, Value, spec_text
from xlashard.program import Collective, is_open
from xlashard.sharding import Mesh, NamedSharding, Sharding
from xlashard.sharding.named import grid_of
from xlashard.wording import typed


def describe_replications(
    program: Program, collectives: Sequence[Collective], sources: Sources
) -> tuple[ReplicationReport, ...]:
    """Finds them, those first that waste most."""
    mesh = program.mesh
    if mesh is None or len(program.plan.devices) == 1:
        return ()
    found = [
        *_results(program, mesh),
        *_open_dims(program, mesh),
        *_constraints(program, collectives, mesh, sources),
    ]
    return tuple(sorted(found, key=lambda r: -r.wasted_bytes))


def _results(program: Program, mesh: Mesh) -> Iterator[ReplicationReport]:
    """Results of which nothing was said and that no axis cuts, though it cuts an argument.

    One that lies as an argument of its shape and dtype does is what it was meant to be.
    """
    dealt = _axes_of((*program.arguments, *program.closed_over))
    for value, requested in zip(program.results, _requested(program), strict=True):
        if requested is None and not _is_like_an_argument(program, value):
            dims = tuple(range(value.aval.ndim))
            report = _report("result", value, dims, [a for a in mesh.axis_names if a in dealt])
            if report is not None:
                yield report


def _axes_of(values: Iterable[Value]) -> set[str]:
    named = (v.sharding for v in values if isinstance(v.sharding, NamedSharding))
    return {axis for sharding in named for axis in sharding.normal_spec.axes}


def _is_like_an_argument(program: Program, value: Value) -> bool:
    """Whether a result lies as an argument of the same shape and dtype does."""
    type_ = value.aval.shape, value.aval.dtype
    alike = (a.sharding for a in program.arguments if (a.aval.shape, a.aval.dtype) == type_)
    mine = value.sharding
    return any(
        mine is not None and s is not None and mine.is_equivalent_to(s, value.aval.ndim)
        for s in alike
    )


def _requested(program: Program) -> list[Sharding | None]:
    """Return the sharding requested of each result: at the boundary, or by a final constraint."""
    requested = [value.said for value in program.results]
    if program.call is not None:
        jaxpr = program.call.traced.jaxpr
        for i, constraint in result_constraints(jaxpr):
            if requested[i] is None and is_open(constraint):
                requested[i] = constraint
    return requested


def _open_dims(program: Program, mesh: Mesh) -> Iterator[ReplicationReport]:
    """Yield arguments and results with an unconstrained dimension that came out whole."""
    shardings = [*(value.placed for value in program.arguments), *_requested(program)]
    for value, said in zip((*program.arguments, *program.results), shardings, strict=True):
        sharding = value.sharding
        if not isinstance(said, NamedSharding) or not is_open(said) or sharding is None:
            continue
        counts = sharding.rank_tiling(value.aval.ndim).counts
        dims = said.normal_spec.for_rank(value.aval.ndim)
        whole = tuple(i for i, axes in enumerate(dims) if axes is None and counts[i] == 1)
        report = _report("open dimension", value, whole, mesh.axis_names)
        if report is not None:
            yield report


def _report(
    kind: ReplicationKind, value: Value, dims: Sequence[int], axes: Iterable[str]
) -> ReplicationReport | None:
    """What dimensions of a value lose by not being cut by axes; None if these couldn't."""
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    counts, sizes = sharding.rank_tiling(value.aval.ndim).counts, sharding.mesh.shape
    free = {a: sizes[a] for a in axes if sizes[a] > 1 and a not in sharding.normal_spec.axes}
    able = {
        d: fitting for d in dims if (fitting := _fitting(value.aval.shape[d] // counts[d], free))
    }
    if not able:
        return None
    cut = max(math.prod(free[a] for a in fitting) for fitting in able.values())
    fitting = {a for names in able.values() for a in names}
    return ReplicationReport(
        kind=kind,
        path=value.path,
        spec=spec_text(sharding),
        dims=tuple(able),
        axes=tuple(a for a in free if a in fitting),
        wasted_bytes=value.device_bytes - value.device_bytes // cut,
    )


def _fitting(size: int, axes: dict[str, int]) -> list[str]:
    """Axes by which a size divides, one after the other."""
    fitting = []
    for name, count in axes.items():
        if size and size % count == 0:
            fitting.append(name)
            size //= count
    return fitting


def _constraints(
    program: Program, collectives: Sequence[Collective], mesh: Mesh, sources: Sources
) -> Iterator[ReplicationReport]:
    """Constraints that close dimensions which were cut, and for which the program gathers.

    The partitioner may gather at the constraint, or before the operations on the way to it. So a
    gather counts if it runs along an axis that the constraint closes, and deals with the value of
    one of those operations, told by its line, or with the argument that they begin with.
    """
    gathers = [c for c in collectives if c.kind == "all-gather"]
    if program.call is None or not gathers:
        return
    grid = grid_of(mesh)
    placed = [(value.path, value.sharding) for value in program.arguments]
    for closing in find_closings(program.call.traced.jaxpr, placed):
        forced = [c for c in gathers if _is_forced(c, closing, grid)]
        if not forced:
            continue
        names = {part.name for c in forced for part in c.axes(grid) or ()}
        yield ReplicationReport(
            kind="constraint",
            path=typed(closing.aval.dtype, closing.aval.shape),
            spec=spec_text(closing.sharding),
            dims=closing.dims,
            axes=tuple(a for a in mesh.axis_names if a in names & closing.axes),
            wasted_bytes=sum(c.times * (c.result_bytes - c.operand_bytes) for c in forced),
            source=sources.line(closing.frames),
        )


def _is_forced(gather: Collective, closing: Closing, grid: MeshGrid) -> bool:
    along = {part.name for part in gather.axes(grid) or ()}
    if not along & closing.axes:
        return False
    if not gather.frames:
        return gather.op_name in closing.arguments
    return (gather.frames[0].file, gather.frames[0].line) in closing.lines


def could_be_cut(program: Program, value: Value) -> bool:
    """Whether every device holds a value whole, though a mesh axis would divide it."""
    mesh, sharding = program.mesh, value.sharding
    if mesh is None or sharding is None or sharding.num_devices == 1:
        return False
    if not sharding.rank_tiling(value.aval.ndim).is_replicated:
        return False
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    return any(_fitting(size, sizes) for size in value.aval.shape)
