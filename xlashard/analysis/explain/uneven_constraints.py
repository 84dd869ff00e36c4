"""Find constraints that shard a dimension which they do not divide."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from xlashard._jax.trace.origins import source_frames
from xlashard.analysis.explain.descriptions import spec_text
from xlashard.analysis.explain.explained_program import (
    ExplainedProgram,
    ProgramValue,
    SourceLocator,
)
from xlashard.analysis.explain.findings import Column, Findings
from xlashard.analysis.explain.model import SourceLine
from xlashard.core.pjit.shardings.uneven import UnevenConstraint, uneven_constraints
from xlashard.hlo.module import Frame
from xlashard.wording import typed


@dataclass(frozen=True)
class UnevenReport:
    """Dimension that a constraint shards, and that does not divide evenly.

    Inside of the program the partitioner pads it. A result is not sharded so.

    Attributes:
        type: Type of the constrained value: `float32[10,6]`.
        spec: Sharding of the constraint.
        dim: The dimension.
        size: Its size.
        axes: Names of the mesh axes that shard it; empty if unknown.
        shards: Number of tiles along it.
        shard_size: Size of a padded tile.
        padded_size: Size of the padded dimension.
        empty_shards: Number of tiles that hold padding alone.
        device_bytes: Bytes of the padded tile on one device.
        padding_bytes: Bytes of padding in one copy of the value, all uneven dimensions together.
        whole_bytes: Bytes on one device if the uneven dimensions stay whole.
        result: Path of the result of the program that the constraint makes, or empty.
        result_spec: Sharding of that result in the compiled program, or empty.
        source: Line of the constraint.
    """

    type: str
    spec: str
    dim: int
    size: int
    axes: tuple[str, ...]
    shards: int
    shard_size: int
    padded_size: int
    empty_shards: int
    device_bytes: int
    padding_bytes: int
    whole_bytes: int
    result: str
    result_spec: str
    source: SourceLine | None


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


def _uneven_reason(u: UnevenReport) -> str:
    """Format the dimension, its tiles, and what became of a result."""
    along = f" along {', '.join(u.axes)}" if u.axes else ""
    empty = f", {u.empty_shards} of padding alone" if u.empty_shards else ""
    result = f"; {u.result} is {u.result_spec} instead" if u.result else ""
    tiles = f"{u.shards} tiles of {u.shard_size}{along}{empty}"
    return f"dimension {u.dim} of {u.size} padded to {u.padded_size}, {tiles}{result}"


UNEVEN = Findings[UnevenReport](
    field="uneven",
    find=describe_uneven,
    title="Constraints that do not divide",
    note="XLA pads them; pad_to_mesh pads first",
    summary="{count}, padded by XLA inside of the program",
    columns=(
        Column("value", lambda u: u.type, "code"),
        Column("sharding", lambda u: u.spec, "code"),
        Column(
            ">padding",
            lambda u: u.padding_bytes,
            "bytes",
            "Bytes of padding in one copy of the value",
        ),
        Column("why", _uneven_reason),
        Column("line", lambda u: u.source, "line"),
    ),
    printed={">padding": "{padding}", "value": "{value} as {sharding}", "why": "{line}{why}"},
)
"""Section of the constraints that do not divide a dimension."""
