"""Walk over the compiler's schedule: when each operation runs, and what it waits for.

A compiled module is scheduled: the operations of a computation run in order on the cores, and
asynchronous ones overlap with them from their start to their done. Collectives occupy the links of
the dimensions that they span, copies between memories wait for the HBM bandwidth that the
operations leave, transfers to the host occupy its link. Each computation is walked once; a loop
repeats the time of its body.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from xlashard.hlo.call_graph import trip_count
from xlashard.hlo.collectives import Collective
from xlashard.hlo.module import Computation, HloModule, Instruction
from xlashard.hlo.shapes import HOST
from xlashard.predict.costs.memory_traffic import hbm_bytes, host_bytes
from xlashard.predict.costs.network_model import NetworkCost
from xlashard.predict.costs.operation import OperationModel, OperationTime
from xlashard.predict.costs.rates import Rates

# Asynchronous copies between memories, which wait in one queue for the bandwidth of HBM.
_COPIES = (
    *("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"),
    "fusion-start",  # GPUs copy slices of loops by fusions beside the others.
)
_CALLS = ("async-start", "call-start")
_NETWORKS = ("ici", "dcn")

# Network costs of collectives, by the names of their instructions.
type _Costs = dict[str, NetworkCost]


@dataclass(frozen=True, slots=True)
class ScheduledOperation:
    """An operation in one run of its computation.

    Attributes:
        instruction: The instruction.
        computation: Name of its computation.
        start: Seconds from the start of the computation's run.
        seconds: Time for which it keeps the cores busy, or for which they wait for it.
        resource: What it uses: `matrix`, `vector`, `hbm`, `vmem`, `kernel`, `launch`, `ici`, `dcn`,
            `host`, or `loop` for an operation that runs other computations.
        in_background: Whether it overlaps with the operations after it; then `seconds` is its
            duration, and no time of the cores.
        known: False for a kernel of unknown cost.
    """

    instruction: Instruction
    computation: str
    start: float
    seconds: float
    resource: str
    in_background: bool = False
    known: bool = True


@dataclass(frozen=True)
class StepSchedule:
    """Times of a program on one device.

    Attributes:
        seconds: Time of one execution.
        operations: Operations of each computation, in order.
        runs: Number of runs of each computation.
        core_runs: Number of runs in the order of the cores: without those of asynchronous calls,
            for which the cores wait at most.
        lengths: Seconds of one run of each computation.
        collectives: Collectives of the program with their network costs.
    """

    seconds: float
    operations: Mapping[str, Sequence[ScheduledOperation]]
    runs: Mapping[str, float]
    core_runs: Mapping[str, float]
    lengths: Mapping[str, float]
    collectives: Sequence[tuple[Collective, NetworkCost]]

    def __iter__(self) -> Iterator[tuple[ScheduledOperation, float]]:
        """Yield the operations with their number of runs."""
        for name, operations in self.operations.items():
            for operation in operations:
                yield operation, self.runs.get(name, 0.0)

    def on_cores(self) -> Iterator[tuple[ScheduledOperation, float]]:
        """Yield the operations and waits of the cores with their number of runs."""
        for name, operations in self.operations.items():
            runs = self.core_runs.get(name, 0.0)
            for operation in operations:
                if runs and not operation.in_background and operation.resource != "loop":
                    yield operation, runs

    def by_resource(self) -> dict[str, float]:
        """Return the seconds of the cores by the resource that bounds or delays them."""
        sums: dict[str, float] = defaultdict(float)
        for operation, runs in self.on_cores():
            sums[operation.resource] += runs * operation.seconds
        return dict(sums)


def walk_schedule(
    module: HloModule,
    collectives: Sequence[tuple[Collective, NetworkCost]],
    model: OperationModel[Rates],
    rates: Rates,
) -> StepSchedule:
    """Return the times of the operations of a module.

    Args:
        module: Compiled, scheduled module.
        collectives: Collectives of the program with their network costs.
        model: Times of single operations.
        rates: Rates of the device.
    """
    walk = _Walk(module, collectives, model, rates)
    seconds = walk.time_run(module.entry) if module.entry in module.computations else 0.0
    runs, core_runs = walk.count_runs(), walk.count_runs(asynchronous=False)
    return StepSchedule(seconds, walk.operations, runs, core_runs, walk.lengths, collectives)


class _Walk:
    def __init__(
        self,
        module: HloModule,
        collectives: Sequence[tuple[Collective, NetworkCost]],
        model: OperationModel[Rates],
        rates: Rates,
    ) -> None:
        self.module = module
        self.model = model
        self.rates = rates
        self.operations: dict[str, list[ScheduledOperation]] = {}
        self.lengths: dict[str, float] = {}
        self._called: dict[str, list[tuple[str, float, bool]]] = defaultdict(list)
        self._costs: dict[str, _Costs] = defaultdict(dict)
        for collective, cost in collectives:
            self._costs[collective.computation][collective.name] = cost

    def time_run(self, name: str) -> float:
        """Return the time of one run of a computation."""
        if name not in self.lengths:
            run = _Run(self, self.module.computations[name])
            self.lengths[name] = run.simulate()
            self.operations[name] = run.operations
        return self.lengths[name]

    def find_cost(self, computation: Computation, instruction: Instruction) -> NetworkCost | None:
        """Return the network cost of an instruction."""
        return self._costs.get(computation.name, {}).get(instruction.name)

    def find_fused_costs(self, fusion: Instruction) -> tuple[Computation | None, _Costs]:
        """Return the computation of a fusion, and the network costs of its collectives."""
        inner = self.module.callee(fusion)
        return inner, {} if inner is None else self._costs.get(inner.name, {})

    def time_callees(self, computation: Computation, instruction: Instruction) -> float:
        """Return the time of the computations that an instruction runs."""
        names = [n for n in instruction.repeated_calls if n in self.module.computations]
        times = 1.0
        if instruction.opcode == "while":
            times = float(trip_count(self.module, computation, instruction) or 1)
        elif instruction.opcode == "conditional" and names:
            names = [max(names, key=self.time_run)]
        asynchronous = instruction.opcode in _CALLS
        self._called[computation.name] += [(name, times, asynchronous) for name in names]
        return times * sum(self.time_run(name) for name in names)

    def count_runs(self, *, asynchronous: bool = True) -> dict[str, float]:
        """Return the number of runs of each computation in one execution.

        Args:
            asynchronous: Whether the computations of asynchronous calls count.
        """
        runs: dict[str, float] = defaultdict(float)
        runs[self.module.entry] = 1.0
        # A computation is walked before its caller is done: callers come last.
        for name in reversed(self.lengths):
            for callee, times, apart in self._called[name]:
                if asynchronous or not apart:
                    runs[callee] += runs[name] * times
        return dict(runs)


@dataclass
class _Run:
    """Simulated run of a computation, starting at time 0."""

    walk: _Walk
    computation: Computation
    operations: list[ScheduledOperation] = field(default_factory=list)
    now: float = 0.0
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    pending: dict[str, tuple[float, str]] = field(default_factory=dict)
    copies: deque[tuple[str, float]] = field(default_factory=deque)
    received: dict[str, str] = field(default_factory=dict)

    def simulate(self) -> float:
        """Return the time of the run, including the asynchronous operations that it started."""
        for instruction in self.computation.instructions.values():
            self._start_instruction(instruction)
        last = [end for end, _ in self.pending.values()]
        return max(self.now + sum(s for _, s in self.copies), *self.busy.values(), *last, 0.0)

    def _start_instruction(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        cost = self.walk.find_cost(self.computation, instruction)
        if cost is not None:
            apart = opcode.endswith("-start")
            key = instruction.name if apart else instruction.rendezvous
            self._start_collective(instruction, cost, key)
        elif opcode == "recv":
            # The recv completes when the matching send has arrived.
            self.received[instruction.name] = instruction.rendezvous
        elif opcode == "recv-done":
            self._await(instruction, [self.received.get(name, "") for name in instruction.operands])
        elif opcode == "fusion-start" and self.walk.find_fused_costs(instruction)[1]:
            # XLA's own kernel for a small value: as NCCL, for its times are not published.
            for cost in self.walk.find_fused_costs(instruction)[1].values():
                self._start_collective(instruction, cost, instruction.name)
        elif opcode in _COPIES:
            self._start_copy(instruction)
        elif opcode in _CALLS:
            seconds = self.walk.time_callees(self.computation, instruction)
            self._start_background(instruction, seconds, f"{opcode} {instruction.name}", "vector")
        elif opcode in ("async-update", "call-update"):
            self._rename_pending(instruction)
        elif opcode.endswith("-done"):
            self._await(instruction, instruction.operands)
        elif opcode in ("while", "conditional", "call"):
            self._occupy(instruction, self.walk.time_callees(self.computation, instruction), "loop")
        else:
            self._run_operation(instruction)

    def _run_operation(self, instruction: Instruction) -> None:
        time = self.walk.model.of(self.computation, instruction)
        seconds = time.seconds + self._find_slowdown(time)
        if seconds:
            self._occupy(instruction, seconds, time.bound, time.known)
            self._drain_copies(seconds - time.hbm)
        if instruction.opcode == "fusion":
            self._start_fused_collectives(instruction)

    def _find_slowdown(self, time: OperationTime) -> float:
        """Return the seconds that an operation loses to collectives that run on the same cores.

        NCCL's kernels take some of a GPU's cores; TPUs send without their cores.
        """
        share = self.walk.rates.collective_cores
        if not share or time.bound in ("hbm", "launch"):
            return 0.0
        running = max((end for end, kind in self.pending.values() if kind in _NETWORKS), default=0)
        beside = min(max(running - self.now, 0.0) * (1 - share), time.seconds)
        return beside * share / (1 - share)

    def _occupy(
        self, instruction: Instruction, seconds: float, resource: str, known: bool = True
    ) -> None:
        self._record(instruction, self.now, seconds, resource, known=known)
        self.now += seconds

    def _record(
        self,
        instruction: Instruction,
        start: float,
        seconds: float,
        resource: str,
        *,
        in_background: bool = False,
        known: bool = True,
    ) -> None:
        self.operations.append(
            ScheduledOperation(
                instruction, self.computation.name, start, seconds, resource, in_background, known
            )
        )

    def _start_collective(self, instruction: Instruction, cost: NetworkCost, key: str) -> None:
        # It begins once all of its links are free, and keeps them until its slowest one is done.
        links = (*cost.links, "dcn") if cost.dcn_bytes else cost.links
        resource = cost.resource
        begin = max([self.now, *(self.busy[link] for link in links)])
        end = begin + cost.expected_seconds
        for link in links:
            self.busy[link] = end
        if key:
            self.pending[key] = (end, resource)
            self._record(instruction, begin, end - begin, resource, in_background=True)
        else:
            self._occupy(instruction, end - self.now, resource)

    def _start_fused_collectives(self, fusion: Instruction) -> None:
        inner, costs = self.walk.find_fused_costs(fusion)
        if inner is None:
            return
        for name, cost in costs.items():
            instruction = inner.instructions[name]
            key = _name_channel(instruction) if inner.starts_collective else ""
            self._start_collective(instruction, cost, key)
        if inner.ends_collective:
            self._await(fusion, [_name_channel(i) for i in inner.instructions.values()])

    def _start_copy(self, instruction: Instruction) -> None:
        rates = self.walk.rates
        if nbytes := host_bytes(self.computation, instruction):
            # A copy starts with its result, the other operations with their operands.
            result = instruction.shape.parts[0 if instruction.opcode == "copy-start" else 1]
            way = "to host" if result.arrays[0].memory_space == HOST else "from host"
            self._start_background(instruction, nbytes / rates.host_bytes, way, "host")
            return
        nbytes = hbm_bytes(self.walk.module, self.computation, instruction)
        self.copies.append((instruction.name, nbytes / rates.hbm_bytes))
        self._record(instruction, self.now, nbytes / rates.hbm_bytes, "hbm", in_background=True)

    def _start_background(
        self, instruction: Instruction, seconds: float, unit: str, resource: str
    ) -> None:
        begin = max(self.now, self.busy[unit])
        self.busy[unit] = begin + seconds
        self.pending[instruction.name] = (begin + seconds, resource)
        self._record(instruction, begin, seconds, resource, in_background=True)

    def _drain_copies(self, seconds: float) -> None:
        """Let the copies between memories use the HBM bandwidth of some seconds."""
        while self.copies and seconds > 0:
            name, left = self.copies[0]
            if left > seconds:
                self.copies[0] = (name, left - seconds)
                return
            seconds -= left
            self.copies.popleft()

    def _await(self, instruction: Instruction, names: Sequence[str]) -> None:
        for name in names:
            end, resource = self.pending.pop(name, (0.0, ""))
            if end > self.now:
                waited = end - self.now
                self._occupy(instruction, waited, resource)
                self._drain_copies(waited)
            self._finish_copy(instruction, name)

    def _finish_copy(self, instruction: Instruction, name: str) -> None:
        if not any(waiting == name for waiting, _ in self.copies):
            return
        # Copies end in the order in which they started: one waits for all before it.
        waited = 0.0
        while self.copies:
            done, left = self.copies.popleft()
            waited += left
            if done == name:
                break
        self._occupy(instruction, waited, "hbm")

    def _rename_pending(self, instruction: Instruction) -> None:
        for name in instruction.operands:
            if name in self.pending:
                self.pending[instruction.name] = self.pending.pop(name)


def _name_channel(instruction: Instruction) -> str:
    """Return the channel that copies of one collective in several fusions share."""
    number = instruction.attributes.channel
    return "" if number is None else f"channel {number}"
