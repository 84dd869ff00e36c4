"""Find constraints that shard a dimension which they do not divide."""

from collections.abc import Hashable, Iterator

from xlashard._jax.trace.origins import source_frames
from xlashard.analysis.explain.descriptions import spec_text
from xlashard.analysis.explain.model import UnevenReport
from xlashard.analysis.explain.source_lines import SourceLocator
from xlashard.analysis.programs.program import Compilation, ProgramValue
from xlashard.core.pjit.shardings.uneven import UnevenConstraint, uneven_constraints
from xlashard.hlo.module import Frame
from xlashard.support.formatting import typed


def describe_uneven(program: Compilation) -> tuple[UnevenReport, ...]:
    """Describe the dimensions of constraints that do not divide, most padding first."""
    if program.jaxpr is None or len(program.devices) == 1:
        return ()
    jaxpr = program.jaxpr
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
