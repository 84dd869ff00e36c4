"""Find what a program was asked for and does not do, and what it holds whole unasked."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import Any

from xlashard._jax.runtime.shardings import tile_texts
from xlashard._jax.trace.jaxprs import callback_results
from xlashard._jax.trace.origins import Scope, source_frames, source_line
from xlashard._jax.trace.primitive_names import CALLBACKS, CONSTRAINTS
from xlashard.analysis.explain.closed_dimensions import (
    ClosedDimension,
    constraint_of,
    find_closed_dimensions,
)
from xlashard.analysis.explain.descriptions import decided_by, find_aliases, spec_text
from xlashard.analysis.explain.known_faults import find_known_faults
from xlashard.analysis.explain.model import UnmetKind, UnmetRequest
from xlashard.analysis.programs.program import Compilation, ProgramValue
from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.core.program import uneven_shardings as settings
from xlashard.core.program.annotate import is_open
from xlashard.core.program.donation import NO_USE
from xlashard.core.program.ignored_shardings import find_ignored, find_unplaced
from xlashard.core.program.uneven_shardings import tile_bytes, uneven_constraints
from xlashard.core.sharding import (
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from xlashard.core.sharding.gspmd import from_hlo
from xlashard.core.sharding.named import grid_of, spec_entries
from xlashard.errors import GeometryError, ShardingError
from xlashard.geometry import MeshGrid
from xlashard.geometry.spec import resharding_steps
from xlashard.hlo.collectives import Collective
from xlashard.hlo.compiler_log import read_warnings
from xlashard.hlo.module import Frame, Instruction
from xlashard.hlo.shapes import dtype_name
from xlashard.support.formatting import typed

UNSPECIFIED = "unspecified"
"""Request of a value whose sharding neither caller nor function specifies."""


def describe_unmet(program: Compilation) -> tuple[UnmetRequest, ...]:
    """Describe the requests that a program does not follow, most bytes first."""
    # A gradient repeats a constraint, at the same line.
    rows = dict.fromkeys(row for find in _FINDERS for row in find(program))
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _donations(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield the donated arguments whose buffers no result takes over."""
    for value, alias in zip(program.arguments, find_aliases(program), strict=False):
        if value.donated and alias is None:
            refused = program.refusals.get(value.path)
            dropped = NO_USE if value.sharding is None else ""
            yield UnmetRequest(
                kind="donation",
                path=value.path,
                requested="donated",
                actual="not reused",
                nbytes=value.device_bytes,
                reason=dropped if refused is None else refused.reason,
                advice="" if refused is None else refused.advice,
            )


def _ignored(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield the shardings that the program names and does not follow."""
    if program.jaxpr is None:
        return
    devices = program.devices
    ignored = list(find_ignored(program.jaxpr, devices))
    if len(devices) == 1:
        values = [v for v in program.arguments if v.sharding is None]
        dropped = [(v.path, v.aval, v.current) for v in values if v.committed]
        free = [(v.path, v.aval) for v in program.results if v.requested is None]
        ignored += find_unplaced(dropped, free)
    for finding in ignored:
        aval = finding.aval
        yield UnmetRequest(
            kind=finding.kind,
            path=finding.path or typed(aval.dtype, aval.shape),
            requested=spec_text(finding.sharding),
            actual=finding.instead(devices[0]),
            nbytes=tile_bytes(aval, (1,) * aval.ndim),
            reason=finding.reason,
            advice=finding.advice,
            source=equation_line(finding.eqn, program),
        )


def _uneven(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield the dimensions of constraints that do not divide, which XLA pads."""
    if program.jaxpr is None or len(program.devices) == 1:
        return
    jaxpr = program.jaxpr
    results = {v: i for i, v in enumerate(jaxpr.outvars) if isinstance(v, Hashable)}
    for constraint in uneven_constraints(jaxpr):
        position = results.get(constraint.eqn.outvars[0])
        result = None if position is None else program.results[position]
        aval = constraint.aval
        for dim in constraint.dims:
            along = f" along {', '.join(name for name, _ in dim.axes)}" if dim.axes else ""
            empty = f", {dim.empty_shards} of padding alone" if dim.empty_shards else ""
            actual = f"padded to {dim.padded_size}, {dim.shards} tiles of {dim.shard_size}"
            if result is not None and result.sharding is not None:
                empty += f"; {result.path} is {spec_text(result.sharding)}"
            yield UnmetRequest(
                kind="uneven constraint",
                path=typed(aval.dtype, aval.shape),
                requested=spec_text(constraint.sharding),
                actual=f"{actual}{along}{empty}",
                nbytes=constraint.padding_bytes,
                reason=f"dimension {dim.dim} of {dim.size} does not divide by {dim.shards}",
                advice="pad it with pad_to_mesh",
                source=equation_line(constraint.eqn, program),
            )


def equation_line(eqn: Any, program: Compilation) -> SourceLine | None:
    """Return the line of an equation that a report shows; None if it is unknown."""
    frames = () if eqn is None else source_frames(eqn)
    return program.sources.line([Frame(*frame) for frame in frames])


def _arguments(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield the arguments of which a `ReplicationWarning` warns, if an axis divides them."""
    least = settings.FLAGS.warn_replicated * 2**20
    for value in program.arguments:
        if least and value.nbytes >= least and decided_by(value) == "partitioner":
            assert value.sharding is not None
            if value.sharding.rank_tiling(value.aval.ndim).is_replicated:
                yield from _whole("argument without sharding", program, value, UNSPECIFIED)


def _results(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield results without a requested sharding that are not sharded over an argument's axis.

    A result with the sharding of an argument of its shape and dtype is as intended, unless a
    callback makes it.
    """
    values = (*program.arguments, *program.closed_over)
    named = (v.sharding for v in values if isinstance(v.sharding, NamedSharding))
    used = {axis for sharding in named for axis in sharding.normal_spec.axes}
    called = frozenset() if program.jaxpr is None else callback_results(program.jaxpr)
    for i, (value, requested) in enumerate(zip(program.results, _requested(program), strict=True)):
        if requested is not None:
            continue
        if i in called:
            yield from _whole("result of a callback", program, value, UNSPECIFIED)
        elif not _is_like_an_argument(program, value):
            yield from _whole("result", program, value, UNSPECIFIED, axes=used)


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
    if program.jaxpr is None:
        return requested
    jaxpr, mesh = program.jaxpr, program.mesh
    makers = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name in CONSTRAINTS}
    for i, variable in enumerate(jaxpr.outvars):
        if requested[i] is None and isinstance(variable, Hashable) and variable in makers:
            requested[i] = constraint_of(makers[variable], mesh)
    return requested


def _open_dims(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield arguments and results with an unconstrained dimension that was left unsharded."""
    shardings = [*(value.lowered_sharding for value in program.arguments), *_requested(program)]
    for value, requested in zip((*program.arguments, *program.results), shardings, strict=True):
        sharding = value.sharding
        if not isinstance(requested, NamedSharding) or not is_open(requested) or sharding is None:
            continue
        counts = sharding.rank_tiling(value.aval.ndim).counts
        dims = requested.normal_spec.for_rank(value.aval.ndim)
        whole = [i for i, axes in enumerate(dims) if axes is None and counts[i] == 1]
        text = spec_text(requested)
        yield from _whole("unconstrained dimension", program, value, text, dims=whole)


_WHY: Mapping[UnmetKind, tuple[str, str]] = {
    "argument without sharding": ("XLA leaves it whole", "in_shardings or device_put"),
    "result": (
        "XLA leaves it whole along {axes}, over which an argument is sharded",
        "out_shardings",
    ),
    "result of a callback": ("a callback returns the whole value", "out_shardings, or shard_map"),
    "unconstrained dimension": ("XLA leaves dimension {dims} whole", "its spec"),
}
"""Reason for a value that is whole on each device, and where to write another sharding."""


def _whole(
    kind: UnmetKind,
    program: Compilation,
    value: ProgramValue,
    requested: str,
    *,
    dims: Sequence[int] | None = None,
    axes: Iterable[str] | None = None,
) -> Iterator[UnmetRequest]:
    """Yield the bytes that a value takes unsharded, if an axis divides one of its dimensions.

    Args:
        kind: Kind of the request.
        program: The program.
        value: The value.
        requested: Its requested sharding.
        dims: Dimensions that could be sharded; None for all.
        axes: Mesh axes that could shard them; None for all.
    """
    sharding, mesh = value.sharding, program.mesh
    if not isinstance(sharding, NamedSharding) or mesh is None or len(program.devices) == 1:
        return
    counts, sizes = sharding.rank_tiling(value.aval.ndim).counts, sharding.mesh.shape
    names = [a for a in mesh.axis_names if axes is None or a in axes]
    unused = [a for a in names if a not in sharding.normal_spec.axes]
    free = {a: sizes[a] for a in unused if sizes.get(a, 1) > 1}
    able = {
        d: fitting
        for d in (range(value.aval.ndim) if dims is None else dims)
        if (fitting := fitting_axes(value.aval.shape[d] // counts[d], free))
    }
    if not able:
        return
    best = max(able, key=lambda d: math.prod(free[a] for a in able[d]))
    cut = math.prod(free[a] for a in able[best])
    reason, place = _WHY[kind]
    fitting = {a for each in able.values() for a in each}
    yield UnmetRequest(
        kind=kind,
        path=value.path,
        requested=requested,
        actual=spec_text(sharding),
        nbytes=value.device_bytes - value.device_bytes // cut,
        reason=reason.format(
            axes=", ".join(a for a in free if a in fitting), dims=", ".join(map(str, able))
        ),
        advice=f"shard dimension {best} over {', '.join(able[best])} by {place}",
    )


def fitting_axes(size: int, axes: Mapping[str, int]) -> list[str]:
    """List the axes of more than one device that a size can be sharded over together."""
    fitting: list[str] = []
    for name, count in axes.items():
        if size and count > 1 and size % count == 0:
            size //= count
            fitting.append(name)
    return fitting


def _closed(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield constraints that close sharded dimensions, where the program gathers for them.

    The partitioner may gather at the constraint, or before an operation that precedes it. A gather
    is attributed to a constraint if it runs along an axis that the constraint closes, and if its
    line is that of one of these operations, or its value is the argument that they begin with.
    """
    mesh = program.mesh
    gathers = [c for c in program.collectives if c.kind == "all-gather"]
    if program.jaxpr is None or mesh is None or not gathers:
        return
    grid = grid_of(mesh)
    placed = [(value.path, value.sharding) for value in program.arguments]
    for closed in find_closed_dimensions(program.jaxpr, placed, mesh):
        forced = [c for c in gathers if _is_forced(c, closed, grid)]
        if not forced:
            continue
        names = {part.name for c in forced for part in c.axes(grid) or ()} & closed.axes
        axes = ", ".join(a for a in mesh.axis_names if a in names)
        dims = ", ".join(map(str, closed.dims))
        yield UnmetRequest(
            kind="constraint that gathers",
            path=typed(closed.aval.dtype, closed.aval.shape),
            requested=spec_text(closed.sharding),
            actual=f"gathered along {axes}",
            nbytes=sum(c.times * (c.result_bytes - c.operand_bytes) for c in forced),
            reason=f"the constraint unshards dimension {dims}",
            advice=f"keep {axes} in its spec, unless the next operation needs the whole value",
            source=program.sources.line(closed.frames),
        )


def _callbacks(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield the callbacks for which the program gathers a sharded value.

    Outside of shard_map one device calls the function, with the whole value, which the partitioner
    gathers on all devices: often along one axis after the other, with an operation in between.
    """
    gathers = [c for c in program.collectives if c.kind == "all-gather"]
    for gather in gathers:
        name = gather.cause[0].rpartition("/")[2]
        if name not in CALLBACKS or program.mesh is None or not gather.results[0].arrays:
            continue
        if any(_precedes(gather, other, other) for other in gathers):
            continue
        steps = [gather]
        while before := [c for c in gathers if _precedes(c, steps[-1], gather)]:
            steps.append(before[0])
        grid = grid_of(program.mesh)
        names = {part.name for c in steps for part in c.axes(grid) or ()}
        array = gather.results[0].arrays[0]
        yield UnmetRequest(
            kind="callback that gathers",
            path=typed(dtype_name(array.dtype), array.dims),
            requested=name,
            actual=f"gathered along {', '.join(a for a in program.mesh.axis_names if a in names)}",
            nbytes=sum(c.times * (c.result_bytes - c.operand_bytes) for c in steps),
            reason="one device calls the function, with the whole value",
            advice="call it in shard_map, once per shard, or pass a sum or a slice of the value",
            source=program.sources.line(gather.cause[1]),
        )


def _precedes(one: Collective, other: Collective, last: Collective) -> bool:
    """Return whether one gather makes the operand of another, for the cause of the last."""
    source, target = ([a.dims for s in x for a in s.arrays] for x in (one.results, other.operands))
    return source == target and (one.frames == last.frames or one.cause == last.cause)


def _warnings(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield the compiler's warnings about operations, where its log is known."""
    mesh = program.mesh
    for warning in read_warnings(program.log) if mesh is not None else ():
        if any("maximal" in text for text in (warning.source, warning.target)):
            continue  # Of a callback, on one device: `_callbacks`.
        operation, array = warning.operation, warning.operation.shape.arrays[:1]
        shape = array[0].dims if array else ()
        ways = [_named(text, program) for text in (warning.source, warning.target) if text]
        if ways and ways[0] is not None:
            # The type is that of a shard.
            counts = ways[0].rank_tiling(len(shape)).counts
            shape = tuple(map(mul, shape, counts))
        dtype = dtype_name(array[0].dtype) if array else operation.opcode
        whole = replace(array[0], dims=shape).nbytes if array else 0
        specs = [
            text if way is None else spec_text(way)
            for way, text in zip(ways, (warning.source, warning.target), strict=False)
        ] or [""]
        source = equation_line(_equation(program, operation, shape, specs[0]), program)
        if not ways:
            text = warning.text.removeprefix("[SPMD] ").rpartition(". ")[0]
            path, op = typed(dtype, shape), operation.op_name.rpartition("/")[2]
            yield UnmetRequest(
                "compiler warning", path, op or operation.opcode, text, whole, "", "", source
            )
            continue
        before, after = specs
        between = _between(ways[0], ways[1], len(shape))
        yield UnmetRequest(
            kind="rematerialization",
            path=typed(dtype, shape),
            requested=after,
            actual=f"replicated on its way from {before}",
            nbytes=whole,
            reason="XLA's involuntary full rematerialization",
            advice=f"constrain it to {between} in between"
            if between
            else f"shard it as {after} where it is made",
            source=source,
        )


def _find_miscompilations(program: Compilation) -> Iterator[UnmetRequest]:
    """Yield the operations that the installed jaxlib is known to compile to wrong values."""
    for fault, eqn in find_known_faults(program):
        aval = eqn.outvars[0].aval
        yield UnmetRequest(
            kind="miscompilation",
            path=typed(aval.dtype, aval.shape),
            requested=fault.primitive,
            actual=fault.what,
            nbytes=tile_bytes(aval, (1,) * aval.ndim),
            reason=f"a fault of jaxlib {fault.jaxlib[0]} to {fault.jaxlib[1]}",
            advice=fault.advice,
            source=equation_line(eqn, program),
        )


def _named(text: str, program: Compilation) -> NamedSharding | None:
    """Return a sharding in HLO's syntax by a spec on the mesh; None if it has none."""
    (tiles,) = tile_texts(text)
    try:
        sharding = from_hlo(tiles, program.devices, program.mesh)
    except (GeometryError, ShardingError):
        return None
    return sharding if isinstance(sharding, NamedSharding) else None


def _between(before: NamedSharding | None, after: NamedSharding | None, ndim: int) -> str:
    """Return the specs between two by which XLA needs no whole value; empty without one."""
    if before is None or after is None:
        return ""
    sides = (s.normal_spec.for_rank(ndim) for s in (before, after))
    steps = resharding_steps(*(tuple(axes or () for axes in side) for side in sides))
    specs = [before.with_spec(PartitionSpec(*spec_entries(dims))) for dims in steps]
    return ", then to ".join(map(spec_text, specs))


def _equation(
    program: Compilation, operation: Instruction, shape: tuple[int, ...], spec: str
) -> Any:
    """Return the equation of an operation; None if it is unknown or one of several lines.

    Args:
        program: The program.
        operation: The operation.
        shape: Shape of its whole result.
        spec: Its sharding, which distinguishes constraints.
    """
    sites = [] if program.jaxpr is None else Scope.of(program.jaxpr).sites()
    equations = [(eqn, site) for _, eqn, site, _ in sites if eqn.outvars]
    for name in (operation.op_name.rpartition("/")[2], operation.opcode.replace("-", "_")):
        candidates = [
            (constraint_of(eqn, program.mesh), site)
            for eqn, site in equations
            if eqn.primitive.name == name and getattr(eqn.outvars[0].aval, "shape", ()) == shape
        ]
        exact = [site for s, site in candidates if s is None or spec_text(s) == spec]
        if len(set(map(source_line, exact))) == 1:
            return exact[0]
    return None


def _is_forced(gather: Collective, closed: ClosedDimension, grid: MeshGrid) -> bool:
    along = {part.name for part in gather.axes(grid) or ()}
    if not along & closed.axes:
        return False
    if not gather.frames:
        return gather.op_name in closed.arguments
    return (gather.frames[0].file, gather.frames[0].line) in closed.lines


_FINDERS: tuple[Callable[[Compilation], Iterator[UnmetRequest]], ...] = (
    _find_miscompilations,
    _arguments,
    _results,
    _open_dims,
    _closed,
    _callbacks,
    _warnings,
    _uneven,
    _ignored,
    _donations,
)
