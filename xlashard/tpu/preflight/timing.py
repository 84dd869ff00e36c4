"""How long a program takes: a roofline of its own counts, beside the compiler's estimate."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from xlashard.program.collectives import Collective, along_text
from xlashard.sharding import Mesh
from xlashard.sharding.named import grid_of
from xlashard.tpu.generations import Generation
from xlashard.tpu.preflight.clocks import clock_of
from xlashard.tpu.preflight.compilation import Compilation
from xlashard.tpu.preflight.megascale import whole_collectives
from xlashard.tpu.preflight.parts import AxisTraffic, Bound, TimeEstimate
from xlashard.tpu.preflight.schedule import scheduled_seconds
from xlashard.tpu.preflight.wires import Wire, Wires
from xlashard.tpu.preflight.work import count_work
from xlashard.tpu.topologies import Topology


def estimate_time(compilation: Compilation, topology: Topology, mesh: Mesh) -> TimeEstimate:
    """How long one execution of a program takes, from below, and what it waits for.

    Each resource is taken at its peak and by itself: the matrix units by the dtype that is
    multiplied, HBM, the links of each dimension of the torus (collectives on the same dimension one
    after the other, those on others beside them), the network between slices. The longest of these
    is the roofline: no schedule is faster. The compiler's estimate runs through its schedule
    with the cycles that it notes for each operation; for element-wise operations on large arrays
    those are two to four times what HBM's bandwidth asks for.

    Args:
        compilation: The program, also one that does not fit.
        topology: What it was compiled for.
        mesh: Its mesh.
    """
    module = compilation.module
    work = count_work(module)
    wires = Wires(topology, mesh)
    collectives = [(c, wires.of(c)) for c in whole_collectives(module, mesh)]
    generation = topology.generation
    bandwidth = generation.device_hbm_bandwidth
    clock = clock_of(generation)
    rooms: dict[Bound, float] = {
        "compute": compute_seconds(work.multiplied, generation),
        "hbm": work.hbm_bytes / bandwidth,
        "ici": _busiest(collectives),
        "dcn": sum(c.times * wire.dcn_seconds for c, wire in collectives),
    }
    bound = max(rooms, key=lambda name: rooms[name])
    return TimeEstimate(
        flops=work.flops,
        flops_by_dtype=tuple(sorted(work.multiplied.items(), key=lambda item: -item[1])),
        hbm_bytes=work.hbm_bytes,
        traffic=_traffic(collectives, mesh),
        compute_seconds=rooms["compute"],
        hbm_seconds=rooms["hbm"],
        ici_seconds=rooms["ici"],
        dcn_seconds=rooms["dcn"],
        roofline_seconds=rooms[bound],
        bound=bound,
        compiler_seconds=None
        if clock is None
        else scheduled_seconds(module, collectives, clock.hertz, bandwidth),
        unknown_loops=work.unknown_loops,
        elementwise_flops=work.elementwise,
        transcendentals=work.transcendental,
        unknown_calls=tuple(sorted(work.unknown_calls.items())),
    )


def compute_seconds(multiplied: Mapping[str, float], generation: Generation) -> float:
    """How long the matrix units take at their peak.

    Args:
        multiplied: FLOP by dtype; `bfloat16 x6` are six passes.
        generation: Of the chips.
    """
    peaks = dict(generation.device_peak_flops)
    seconds = 0.0
    for dtype, flops in multiplied.items():
        name, _, passes = dtype.partition(" x")
        seconds += flops * int(passes or 1) / _peak(name, peaks)
    return seconds


def _peak(dtype: str, peaks: Mapping[str, float]) -> float:
    """The peak of a dtype; of one that the chip doesn't multiply, that of what it becomes."""
    family = dtype.partition("_")[0]
    others = {"uint8": "int8", "int4": "int8", "uint4": "int8"}
    names = (dtype, family, others.get(family, "bfloat16"), "bfloat16")
    return next(peaks[name] for name in names if name in peaks)


def _busiest(collectives: Iterable[tuple[Collective, Wire]]) -> float:
    """The time of the dimension whose links have most to do."""
    busy: dict[str, float] = defaultdict(float)
    for collective, wire in collectives:
        for dimension in wire.dimensions:
            busy[dimension] += collective.times * wire.seconds
    return max(busy.values(), default=0.0)


def _traffic(collectives: Iterable[tuple[Collective, Wire]], mesh: Mesh) -> tuple[AxisTraffic, ...]:
    grid = grid_of(mesh)
    sums: dict[tuple[str, str], list[float]] = {}
    for collective, wire in collectives:
        along = along_text(collective, grid)
        for network, sent, seconds in (
            ("ici", wire.sent_bytes, wire.seconds),
            ("dcn", wire.dcn_bytes, wire.dcn_seconds),
        ):
            if sent:
                total = sums.setdefault((along, network), [0.0, 0.0])
                total[0] += collective.times * sent
                total[1] += collective.times * seconds
    found = [
        AxisTraffic(along, "dcn" if network == "dcn" else "ici", round(sent), seconds)
        for (along, network), (sent, seconds) in sums.items()
    ]
    return tuple(sorted(found, key=lambda t: (-t.seconds, -t.sent_bytes, t.along)))
