"""What a program sends between TPU devices: how long it takes, and who asked for it."""

from dataclasses import dataclass, field

from xlashard.pjit.report.communication import Sources, added_up, describe_kind
from xlashard.pjit.report.parts import CollectiveReport
from xlashard.program.collectives import Collective
from xlashard.sharding import Mesh
from xlashard.sharding.named import grid_of
from xlashard.tpu.preflight.compilation import Compilation
from xlashard.tpu.preflight.flow import Flow
from xlashard.tpu.preflight.layouts import Layouts
from xlashard.tpu.preflight.megascale import whole_collectives
from xlashard.tpu.preflight.origins import Judge, Judgement
from xlashard.tpu.preflight.parts import TrafficReport
from xlashard.tpu.preflight.wires import Wire, Wires
from xlashard.tpu.topologies import Topology


@dataclass
class _Alike:
    """Collectives that do the same for the same reason."""

    collectives: list[Collective] = field(default_factory=list)
    seconds: float = 0.0
    dcn_bytes: float = 0.0
    ici_bytes: float = 0.0

    def add(self, collective: Collective, wire: Wire) -> None:
        self.collectives.append(collective)
        self.seconds += collective.times * wire.total_seconds
        self.dcn_bytes += collective.times * wire.dcn_bytes
        self.ici_bytes += collective.times * wire.sent_bytes


def describe_traffic(
    compilation: Compilation, topology: Topology, mesh: Mesh
) -> tuple[TrafficReport, ...]:
    """The collectives of a program, those that take longest first.

    Args:
        compilation: The program, also one that does not fit.
        topology: What it was compiled for.
        mesh: Its mesh.
    """
    module, grid = compilation.module, grid_of(mesh)
    lowered = compilation.lowered
    call = lowered._traced._call
    paths = call.traced.arg_names
    jaxpr = call.traced.jaxpr
    sources = Sources.of(jaxpr.debug_info.func_src_info)
    placed = lowered._order.placement.in_shardings
    layouts = Layouts(jaxpr, tuple(zip(paths, placed, strict=True)), mesh)
    said = tuple(sharding is not None for sharding in lowered._order.placement.out_shardings)
    collectives = tuple(whole_collectives(module, mesh))
    judge = Judge(Flow(module), layouts, grid, sources, said, collectives)
    wires = Wires(topology, mesh)
    alike: dict[tuple[CollectiveReport, Judgement], _Alike] = {}
    for collective in judge.collectives:
        judgement = judge.judge(collective)
        described = describe_kind(collective, grid, frozenset(paths), sources)
        alike.setdefault((described, judgement), _Alike()).add(collective, wires.of(collective))
    reports = [_report(described, why, found) for (described, why), found in alike.items()]
    return tuple(sorted(reports, key=lambda r: (-r.seconds, -r.collective.sent_bytes)))


def _report(described: CollectiveReport, why: Judgement, found: _Alike) -> TrafficReport:
    return TrafficReport(
        collective=added_up(described, found.collectives),
        network="dcn" if found.dcn_bytes > found.ici_bytes else "ici",
        seconds=found.seconds,
        origin=why.origin,
        asked_for=why.asked_for,
        remedy=why.remedy,
    )
