"""The compiler's schedule, run through with its own estimates of each operation.

TPU's compiler notes for most operations how many cycles it thinks that they take, and for
collectives nothing. Its module is scheduled: the operations of a computation run in their order,
and what is asynchronous runs from its start to its done beside them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from xlashard.program.collectives import Collective
from xlashard.program.hlo import Computation, HloText, Instruction
from xlashard.program.loops import trip_count
from xlashard.tpu.preflight.hbm import hbm_bytes
from xlashard.tpu.preflight.megascale import meeting
from xlashard.tpu.preflight.wires import Wire

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ENDS = "AsyncCollectiveDone"
_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


def scheduled_seconds(
    module: HloText,
    collectives: Sequence[tuple[Collective, Wire]],
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
        collectives: Sequence[tuple[Collective, Wire]],
        hertz: float,
        hbm_bandwidth: float,
    ) -> None:
        self._module = module
        self._hertz = hertz
        self._hbm_bandwidth = hbm_bandwidth
        self._wires: dict[str, dict[str, Wire]] = defaultdict(dict)
        for collective, wire in collectives:
            self._wires[collective.computation][collective.name] = wire
        self._seconds: dict[str, float] = {}

    def of(self, name: str) -> float:
        """How long one run of a computation takes."""
        if name not in self._seconds:
            run = _Run(self, self._module.computations[name])
            self._seconds[name] = run.seconds()
        return self._seconds[name]

    def cycles(self, instruction: Instruction) -> float:
        """The compiler's estimate of an instruction, in seconds."""
        found = _CYCLES.search(instruction.attributes)
        return int(found[1]) / self._hertz if found else 0.0

    def copying(self, computation: Computation, instruction: Instruction) -> float:
        """How long a copy between memories takes."""
        return hbm_bytes(self._module, computation, instruction) / self._hbm_bandwidth

    def wire(self, computation: Computation, instruction: Instruction) -> Wire | None:
        """What an instruction takes of the links."""
        return self._wires.get(computation.name, {}).get(instruction.name)

    def fused(self, instruction: Instruction) -> tuple[Computation | None, Mapping[str, Wire]]:
        """The computation of a fusion, and the collectives in it."""
        inner = self.callees(instruction)
        if not inner:
            return None, {}
        return inner[0], self._wires.get(inner[0].name, {})

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


class _Run:
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
        wire = timeline.wire(self._computation, instruction)
        if wire is not None:
            apart = opcode.endswith("-start")
            starts = instruction.name if apart else meeting(instruction)
            self._collective(wire, starts)
        elif opcode == "recv":
            # It is done when what was sent has come.
            self._received[instruction.name] = meeting(instruction)
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

    def _collective(self, wire: Wire, starts: str) -> None:
        links = (*wire.dimensions, "dcn") if wire.dcn_bytes else wire.dimensions
        begin = max([self._now, *(self._busy[link] for link in links)])
        end = begin + wire.total_seconds
        for link in links:
            self._busy[link] = end
        if starts:
            self._pending[starts] = end
        else:
            self._now = end

    def _fusion(self, fusion: Instruction) -> None:
        inner, wires = self._timeline.fused(fusion)
        self._now += self._timeline.cycles(fusion)
        if inner is None:
            return
        for name, wire in wires.items():
            instruction = inner.instructions[name]
            spread = "AsyncCollectiveStart" in inner.targets
            self._collective(wire, _channel(instruction) if spread else "")
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
