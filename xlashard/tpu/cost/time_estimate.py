"""Time estimate of a program: a roofline, and the compiler's schedule.

TPU's compiler estimates the cycles of most operations, but not of collectives. Its module is
scheduled: operations of a computation run in order, and asynchronous operations overlap with the
operations between start and done.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from xlashard.hlo.call_graph import trip_count
from xlashard.hlo.collectives import Collective, along_text
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.sharding import Mesh
from xlashard.sharding.named import grid_of
from xlashard.tpu.cost.cost_analysis import analyze_cost, repeated_calls
from xlashard.tpu.cost.hbm_traffic import hbm_bytes
from xlashard.tpu.cost.network_model import (
    NetworkCost,
    NetworkModel,
    rendezvous_name,
)
from xlashard.tpu.generations import Generation
from xlashard.tpu.preflight.compilation import Compilation
from xlashard.tpu.preflight.report.preflight_model import AxisTraffic, Bound, TimeEstimate
from xlashard.tpu.topologies import Topology

_MATRIX_UNITS = {
    # https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
    "v2": (1, 128),
    "v3": (2, 128),
    "v4": (4, 128),
    "v5e": (4, 128),
    "v5p": (4, 128),
    # No public figure agrees with the peak. libtpu 0.0.50 estimates large products at 434,000 and
    # 422,000 FLOP per cycle, which four units of 256 x 256 can do and two can't.
    "v6e": (4, 256),
    "tpu7x": (4, 256),
}
"""Number of matrix units of a TensorCore, and their rows and columns."""


def core_clock(generation: Generation) -> float | None:
    """Return the cycles per second at which a generation reaches its peak, or None if unknown.

    The clock is the bfloat16 peak divided by the FLOP per cycle of the matrix units: 0.70 GHz for
    v2, 0.94 for v3, 1.05 for v4, 1.5 for v5e, 1.75 for v5p and v6e, 2.2 for tpu7x. The compiler
    counts cycles of a megacore for both cores together.
    """
    units = _MATRIX_UNITS.get(generation.name)
    peak = dict(generation.peak_flops).get("bfloat16")
    if units is None or peak is None:
        return None
    count, size = units
    return peak / generation.cores_per_chip / (2 * count * size * size)


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ENDS = "AsyncCollectiveDone"
_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


def scheduled_seconds(
    module: HloModule,
    collectives: Sequence[tuple[Collective, NetworkCost]],
    hertz: float,
    hbm_bandwidth: float,
) -> float | None:
    """Return the time of one execution by the compiler's estimates, or None without estimates.

    A synchronous collective takes its full network time; an asynchronous one takes the part that
    the operations before its done don't hide. Collectives on the same links run in sequence.

    Args:
        module: The compiled module.
        collectives: Collectives of the program with their network costs.
        hertz: Clock of the cores.
        hbm_bandwidth: Bytes per second, for copies between memories.
    """
    if module.entry not in module.computations:
        return None
    if not any(
        _CYCLES.search(instruction.attributes.backend_config)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    ):
        return None
    return _Timeline(module, collectives, hertz, hbm_bandwidth).of(module.entry)


class _Timeline:
    def __init__(
        self,
        module: HloModule,
        collectives: Sequence[tuple[Collective, NetworkCost]],
        hertz: float,
        hbm_bandwidth: float,
    ) -> None:
        self._module = module
        self._hertz = hertz
        self._hbm_bandwidth = hbm_bandwidth
        self._network_costs: dict[str, dict[str, NetworkCost]] = defaultdict(dict)
        for collective, cost in collectives:
            self._network_costs[collective.computation][collective.name] = cost
        self._seconds: dict[str, float] = {}

    def of(self, name: str) -> float:
        """Return the time of one run of a computation."""
        if name not in self._seconds:
            run = _ComputationRun(self, self._module.computations[name])
            self._seconds[name] = run.seconds()
        return self._seconds[name]

    def cycles(self, instruction: Instruction) -> float:
        """Return the compiler's estimate of an instruction, in seconds."""
        found = _CYCLES.search(instruction.attributes.backend_config)
        return int(found[1]) / self._hertz if found else 0.0

    def copying(self, computation: Computation, instruction: Instruction) -> float:
        """Return the time of a copy between memories."""
        return hbm_bytes(self._module, computation, instruction) / self._hbm_bandwidth

    def cost(self, computation: Computation, instruction: Instruction) -> NetworkCost | None:
        """Return the network cost of an instruction."""
        return self._network_costs.get(computation.name, {}).get(instruction.name)

    def fused(
        self, instruction: Instruction
    ) -> tuple[Computation | None, Mapping[str, NetworkCost]]:
        """Return the computation of a fusion, and the network costs of its collectives."""
        inner = self.callees(instruction)
        if not inner:
            return None, {}
        return inner[0], self._network_costs.get(inner[0].name, {})

    def callees(self, instruction: Instruction) -> list[Computation]:
        """Return the called computations of an instruction, without loop conditions."""
        computations = self._module.computations
        return [computations[name] for name in repeated_calls(instruction) if name in computations]

    def trips(self, computation: Computation, loop: Instruction) -> int:
        """Return the trip count of a loop."""
        found = trip_count(self._module, computation, loop)
        return 1 if found is None else found


class _ComputationRun:
    """Simulated run of a computation, starting at time 0."""

    def __init__(self, timeline: _Timeline, computation: Computation) -> None:
        self._timeline = timeline
        self._computation = computation
        self._now = 0.0
        self._busy: dict[str, float] = defaultdict(float)
        self._pending: dict[str, float] = {}
        self._received: dict[str, str] = {}

    def seconds(self) -> float:
        """Return the time of the run, including the asynchronous operations that it started."""
        for instruction in self._computation.instructions.values():
            self._step(instruction)
        return max(self._now, *self._busy.values(), *self._pending.values(), 0.0)

    def _step(self, instruction: Instruction) -> None:
        timeline, opcode = self._timeline, instruction.opcode
        cost = timeline.cost(self._computation, instruction)
        if cost is not None:
            apart = opcode.endswith("-start")
            starts = instruction.name if apart else rendezvous_name(instruction)
            self._collective(cost, starts)
        elif opcode == "recv":
            # The recv completes when the matching send has arrived.
            self._received[instruction.name] = rendezvous_name(instruction)
        elif opcode == "recv-done":
            self._done([self._received.get(name, "") for name in instruction.operands])
        elif opcode == "fusion":
            self._fusion(instruction)
        elif opcode in _COPIES:
            self._start(instruction.name, timeline.copying(self._computation, instruction), "hbm")
        elif opcode == "async-start":
            inner = timeline.callees(instruction)
            took = sum(timeline.of(c.name) for c in inner)
            self._start(instruction.name, took, instruction.name)
        elif opcode.endswith("-done"):
            self._done(instruction.operands)
        elif opcode == "async-update":
            self._pass_on(instruction)
        elif opcode == "while":
            once = sum(timeline.of(c.name) for c in timeline.callees(instruction))
            self._now += once * timeline.trips(self._computation, instruction)
        elif opcode == "conditional":
            branches = [timeline.of(c.name) for c in timeline.callees(instruction)]
            self._now += max(branches, default=0.0)
        elif opcode == "call":
            self._now += sum(timeline.of(c.name) for c in timeline.callees(instruction))
        else:
            self._now += timeline.cycles(instruction)

    def _collective(self, cost: NetworkCost, starts: str) -> None:
        links = (*cost.dimensions, "dcn") if cost.dcn_bytes else cost.dimensions
        begin = max([self._now, *(self._busy[link] for link in links)])
        end = begin + cost.total_seconds
        for link in links:
            self._busy[link] = end
        if starts:
            self._pending[starts] = end
        else:
            self._now = end

    def _fusion(self, fusion: Instruction) -> None:
        inner, costs = self._timeline.fused(fusion)
        self._now += self._timeline.cycles(fusion)
        if inner is None:
            return
        for name, cost in costs.items():
            instruction = inner.instructions[name]
            spread = "AsyncCollectiveStart" in inner.targets
            self._collective(cost, _channel(instruction) if spread else "")
        if _ENDS in inner.targets:
            self._done([_channel(i) for i in inner.instructions.values()])

    def _start(self, name: str, seconds: float, resource: str) -> None:
        end = max(self._now, self._busy[resource]) + seconds
        self._busy[resource] = end
        self._pending[name] = end

    def _done(self, names: Sequence[str]) -> None:
        for name in names:
            self._now = max(self._now, self._pending.pop(name, 0.0))

    def _pass_on(self, instruction: Instruction) -> None:
        for name in instruction.operands:
            if name in self._pending:
                self._pending[instruction.name] = self._pending.pop(name)


def _channel(instruction: Instruction) -> str:
    """Return the channel that copies of one collective in several fusions share."""
    number = instruction.attributes.channel
    return "" if number is None else f"channel {number}"


def estimate_time(compilation: Compilation, topology: Topology, mesh: Mesh) -> TimeEstimate:
    """Return a lower bound on the time of one execution, and the resource that bounds it.

    Each resource runs at its peak, independent of the others: matrix units by operand dtype, HBM,
    the links of each torus dimension (collectives on the same dimension run in sequence), and the
    network between slices. The longest is the roofline; no schedule is faster. The compiler's
    estimate sums the cycles of its schedule; its estimates of elementwise operations on large
    arrays are two to four times the HBM roofline.

    Args:
        compilation: The program, compiled or rejected for its memory.
        topology: Topology of the program.
        mesh: Mesh of the program.
    """
    module = compilation.module
    work = analyze_cost(module)
    network = NetworkModel(topology, mesh)
    collectives = [(c, network.of(c)) for c in compilation.collectives(mesh)]
    generation = topology.generation
    bandwidth = generation.device_hbm_bandwidth
    clock = core_clock(generation)
    resources: dict[Bound, float] = {
        "compute": compute_seconds(work.matmul_flops, generation),
        "hbm": work.hbm_bytes / bandwidth,
        "ici": _busiest(collectives),
        "dcn": sum(c.times * cost.dcn_seconds for c, cost in collectives),
    }
    bound = max(resources, key=lambda name: resources[name])
    return TimeEstimate(
        flops=work.flops,
        flops_by_dtype=tuple(sorted(work.matmul_flops.items(), key=lambda item: -item[1])),
        hbm_bytes=work.hbm_bytes,
        traffic=_traffic(collectives, mesh),
        compute_seconds=resources["compute"],
        hbm_seconds=resources["hbm"],
        ici_seconds=resources["ici"],
        dcn_seconds=resources["dcn"],
        roofline_seconds=resources[bound],
        bound=bound,
        compiler_seconds=None
        if clock is None
        else scheduled_seconds(module, collectives, clock, bandwidth),
        unknown_loops=work.unknown_loops,
        elementwise_flops=work.elementwise,
        transcendentals=work.transcendental,
        unknown_calls=tuple(sorted(work.unknown_calls.items())),
        not_understood=tuple(sorted(module.not_understood.items())),
    )


def compute_seconds(matmul_flops: Mapping[str, float], generation: Generation) -> float:
    """Return the time of matrix products at peak FLOP/s.

    Args:
        matmul_flops: FLOP by dtype; `bfloat16 x6` counts six passes.
        generation: Generation of the chips.
    """
    peaks = dict(generation.device_peak_flops)
    seconds = 0.0
    for dtype, flops in matmul_flops.items():
        name, _, passes = dtype.partition(" x")
        seconds += flops * int(passes or 1) / _peak(name, peaks)
    return seconds


def _peak(dtype: str, peaks: Mapping[str, float]) -> float:
    """Return the peak of a dtype, or of the dtype that the chip converts it to."""
    family = dtype.partition("_")[0]
    others = {"uint8": "int8", "int4": "int8", "uint4": "int8"}
    names = (dtype, family, others.get(family, "bfloat16"), "bfloat16")
    return next(peaks[name] for name in names if name in peaks)


def _busiest(collectives: Iterable[tuple[Collective, NetworkCost]]) -> float:
    """Return the time of the dimension with the busiest links."""
    busy: dict[str, float] = defaultdict(float)
    for collective, cost in collectives:
        for dimension in cost.dimensions:
            busy[dimension] += collective.times * cost.seconds
    return max(busy.values(), default=0.0)


def _traffic(
    collectives: Iterable[tuple[Collective, NetworkCost]], mesh: Mesh
) -> tuple[AxisTraffic, ...]:
    grid = grid_of(mesh)
    sums: dict[tuple[str, str], list[float]] = {}
    for collective, cost in collectives:
        along = along_text(collective, grid)
        for network, sent, seconds in (
            ("ici", cost.sent_bytes, cost.seconds),
            ("dcn", cost.dcn_bytes, cost.dcn_seconds),
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
