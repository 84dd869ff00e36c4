"""The compiler's schedule, run through with its own estimates of each operation.

TPU's compiler notes for most operations how many cycles it thinks that they take, and for
collectives nothing. Its module is scheduled: the operations of a computation run in their order,
and what is asynchronous runs from its start to its done beside them.

How fast the cores of a TPU tick, for the compiler's estimates, which it gives in cycles.

How long a program takes: a roofline of its own counts, beside the compiler's estimate.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from xlashard.program.collectives import Collective, along_text
from xlashard.program.hlo import Computation, HloText, Instruction
from xlashard.program.loops import trip_count
from xlashard.sharding import Mesh
from xlashard.sharding.named import grid_of
from xlashard.tpu.generations import Generation
from xlashard.tpu.preflight.compilation import Compilation
from xlashard.tpu.preflight.cost.cost_analysis import analyze_cost, hbm_bytes
from xlashard.tpu.preflight.cost.network_model import (
    NetworkCost,
    NetworkModel,
    multislice_collectives,
    rendezvous_name,
)
from xlashard.tpu.preflight.report.preflight_model import AxisTraffic, Bound, TimeEstimate
from xlashard.tpu.topologies import Topology


@dataclass(frozen=True)
class MatrixUnits:
    """What a device multiplies in a cycle.

    Attributes:
        flops_per_cycle: FLOP of bfloat16 of one TensorCore.
        source: Where that is from.
    """

    flops_per_cycle: int
    source: str


def _arrays(count: int, size: int, source: str) -> MatrixUnits:
    return MatrixUnits(2 * count * size * size, source)


_DOCS = "https://cloud.google.com/tpu/docs/system-architecture-tpu-vm"
_DERIVED = (
    "no public figure of the units agrees with the peak; libtpu 0.0.50 estimates large products at "
    "{} FLOP for each cycle, which four units of 256 x 256 can do and two can't"
)
_UNITS = {
    "v2": _arrays(1, 128, f"one unit of 128 x 128: {_DOCS}"),
    "v3": _arrays(2, 128, f"two units of 128 x 128: {_DOCS}"),
    "v4": _arrays(4, 128, f"four units of 128 x 128: {_DOCS}"),
    "v5e": _arrays(4, 128, f"four units of 128 x 128: {_DOCS}"),
    "v5p": _arrays(4, 128, f"four units of 128 x 128: {_DOCS}"),
    "v6e": _arrays(4, 256, _DERIVED.format("434,000")),
    "tpu7x": _arrays(4, 256, _DERIVED.format("422,000")),
}


@dataclass(frozen=True)
class CoreClock:
    """The clock of a generation's cores.

    Attributes:
        hertz: Cycles per second.
        source: How that is known.
    """

    hertz: float
    source: str


def core_clock(generation: Generation) -> CoreClock | None:
    """The clock at which a generation reaches its peak; None where that isn't known.

    It is the peak of its bfloat16 arithmetic by what its matrix units do in a cycle: 0.70 GHz for
    v2, 0.94 for v3, 1.05 for v4, 1.5 for v5e, 1.75 for v5p and v6e, 2.2 for tpu7x. Where two cores
    work as one device the compiler's cycles are those of the two side by side.
    """
    units = _UNITS.get(generation.name)
    peak = dict(generation.peak_flops).get("bfloat16")
    if units is None or peak is None:
        return None
    hertz = peak / generation.cores_per_chip / units.flops_per_cycle
    return CoreClock(hertz, f"its bfloat16 peak by its matrix units; {units.source}")


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ENDS = "AsyncCollectiveDone"
_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


def scheduled_seconds(
    module: HloText,
    collectives: Sequence[tuple[Collective, NetworkCost]],
    hertz: float,
    hbm_bandwidth: float,
) -> float | None:
    """How long one execution takes by the compiler's estimates; None where it gives none.

    A collective takes the time of its wires: all of it where it stands in the way, and where it is
    asynchronous what of it the operations before its done don't hide. Those that need the same
    links wait for each other.

    Args:
        module: The compiled program.
        collectives: Those of the program, and what each takes of the links.
        hertz: The clock of the cores.
        hbm_bandwidth: Bytes per second, for copies between memories.
    """
    if module.entry not in module.computations:
        return None
    if not any(
        _CYCLES.search(instruction.attributes)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    ):
        return None
    return _Timeline(module, collectives, hertz, hbm_bandwidth).of(module.entry)


class _Timeline:
    def __init__(
        self,
        module: HloText,
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
        """How long one run of a computation takes."""
        if name not in self._seconds:
            run = _ComputationRun(self, self._module.computations[name])
            self._seconds[name] = run.seconds()
        return self._seconds[name]

    def cycles(self, instruction: Instruction) -> float:
        """The compiler's estimate of an instruction, in seconds."""
        found = _CYCLES.search(instruction.attributes)
        return int(found[1]) / self._hertz if found else 0.0

    def copying(self, computation: Computation, instruction: Instruction) -> float:
        """How long a copy between memories takes."""
        return hbm_bytes(self._module, computation, instruction) / self._hbm_bandwidth

    def cost(self, computation: Computation, instruction: Instruction) -> NetworkCost | None:
        """What an instruction takes of the links."""
        return self._network_costs.get(computation.name, {}).get(instruction.name)

    def fused(
        self, instruction: Instruction
    ) -> tuple[Computation | None, Mapping[str, NetworkCost]]:
        """The computation of a fusion, and the collectives in it."""
        inner = self.callees(instruction)
        if not inner:
            return None, {}
        return inner[0], self._network_costs.get(inner[0].name, {})

    def callees(self, instruction: Instruction) -> list[Computation]:
        """The computations that an instruction calls, but for the condition of a loop."""
        computations = self._module.computations
        return [
            computations[name]
            for attribute, name in instruction.called()
            if attribute != "condition" and name in computations
        ]

    def trips(self, computation: Computation, loop: Instruction) -> int:
        """How often a loop runs."""
        found = trip_count(self._module, computation, loop)
        return 1 if found is None else found


class _ComputationRun:
    """One run of a computation, from 0 on."""

    def __init__(self, timeline: _Timeline, computation: Computation) -> None:
        self._timeline = timeline
        self._computation = computation
        self._now = 0.0
        self._busy: dict[str, float] = defaultdict(float)
        self._pending: dict[str, float] = {}
        self._received: dict[str, str] = {}

    def seconds(self) -> float:
        """How long it takes, all that it started included."""
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
            # It is done when what was sent has come.
            self._received[instruction.name] = rendezvous_name(instruction)
        elif opcode == "recv-done":
            self._done([self._received.get(name, "") for name in instruction.operand_names])
        elif opcode == "fusion":
            self._fusion(instruction)
        elif opcode in _COPIES:
            self._start(instruction.name, timeline.copying(self._computation, instruction), "hbm")
        elif opcode == "async-start":
            inner = timeline.callees(instruction)
            took = sum(timeline.of(c.name) for c in inner)
            self._start(instruction.name, took, instruction.name)
        elif opcode.endswith("-done"):
            self._done(instruction.operand_names)
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
        for name in instruction.operand_names:
            if name in self._pending:
                self._pending[instruction.name] = self._pending.pop(name)


def _channel(instruction: Instruction) -> str:
    """What copies of one collective in several fusions have in common."""
    found = instruction.attribute("channel_id")
    number = re.match(r"\d+", found) if found else None
    return f"channel {number[0]}" if number else ""


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
    work = analyze_cost(module)
    network = NetworkModel(topology, mesh)
    collectives = [(c, network.of(c)) for c in multislice_collectives(module, mesh)]
    generation = topology.generation
    bandwidth = generation.device_hbm_bandwidth
    clock = core_clock(generation)
    rooms: dict[Bound, float] = {
        "compute": compute_seconds(work.matmul_flops, generation),
        "hbm": work.hbm_bytes / bandwidth,
        "ici": _busiest(collectives),
        "dcn": sum(c.times * cost.dcn_seconds for c, cost in collectives),
    }
    bound = max(rooms, key=lambda name: rooms[name])
    return TimeEstimate(
        flops=work.flops,
        flops_by_dtype=tuple(sorted(work.matmul_flops.items(), key=lambda item: -item[1])),
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


def compute_seconds(matmul_flops: Mapping[str, float], generation: Generation) -> float:
    """How long the matrix units take at their peak.

    Args:
        matmul_flops: FLOP by dtype; `bfloat16 x6` are six passes.
        generation: Of the chips.
    """
    peaks = dict(generation.device_peak_flops)
    seconds = 0.0
    for dtype, flops in matmul_flops.items():
        name, _, passes = dtype.partition(" x")
        seconds += flops * int(passes or 1) / _peak(name, peaks)
    return seconds


def _peak(dtype: str, peaks: Mapping[str, float]) -> float:
    """The peak of a dtype; of one that the chip doesn't multiply, that of what it becomes."""
    family = dtype.partition("_")[0]
    others = {"uint8": "int8", "int4": "int8", "uint4": "int8"}
    names = (dtype, family, others.get(family, "bfloat16"), "bfloat16")
    return next(peaks[name] for name in names if name in peaks)


def _busiest(collectives: Iterable[tuple[Collective, NetworkCost]]) -> float:
    """The time of the dimension whose links have most to do."""
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
