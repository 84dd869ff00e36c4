"""Find shardings that a program names and does not follow."""

from xlashard._jax.trace.origins import source_frames
from xlashard.analysis.explain.descriptions import spec_text
from xlashard.analysis.explain.model import IgnoredReport
from xlashard.analysis.programs.program import Compilation
from xlashard.core.pjit.arguments import Argument
from xlashard.core.pjit.shardings.ignored import IgnoredSharding, find_ignored, find_unplaced
from xlashard.core.pjit.shardings.uneven import tile_bytes
from xlashard.hlo.module import Frame
from xlashard.support.formatting import typed


def describe_ignored(program: Compilation) -> tuple[IgnoredReport, ...]:
    """Describe the shardings that a program does not follow, the largest first."""
    if program.jaxpr is None:
        return ()
    devices = program.devices
    ignored = list(find_ignored(program.jaxpr, devices))
    if len(devices) == 1:
        values = [v for v in program.arguments if v.sharding is None]
        dropped = [Argument(v.path, v.aval, v.current, v.committed) for v in values]
        free = [(v.path, v.aval) for v in program.results if v.requested is None]
        ignored += find_unplaced(dropped, free)
    # A gradient repeats a constraint, at the same line.
    reports = dict.fromkeys(_report(program, finding) for finding in ignored)
    return tuple(sorted(reports, key=lambda r: -r.nbytes))


def _report(program: Compilation, finding: IgnoredSharding) -> IgnoredReport:
    aval, source = finding.aval, None
    if finding.eqn is not None:
        source = program.sources.line([Frame(*frame) for frame in source_frames(finding.eqn)])
    return IgnoredReport(
        kind=finding.kind,
        path=finding.path or typed(aval.dtype, aval.shape),
        spec=spec_text(finding.sharding),
        nbytes=tile_bytes(aval, (1,) * aval.ndim),
        results=finding.results,
        source=source,
    )
