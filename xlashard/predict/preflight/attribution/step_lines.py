"""Time of a schedule by source line, and its timeline."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from xlashard.analysis.programs.program import Compilation
from xlashard.analysis.programs.source_lines import SourceLine, SourceLocator
from xlashard.analysis.report.texts import operation_text
from xlashard.core.sharding import Mesh
from xlashard.core.sharding.named import grid_of
from xlashard.geometry import MeshGrid
from xlashard.hlo.buffers import bytes_in_use
from xlashard.hlo.collectives import Collective, along_text
from xlashard.hlo.hlo_program import HloProgram
from xlashard.hlo.module import Frame, Instruction
from xlashard.hlo.shapes import HBM
from xlashard.predict.costs.kernel_work import is_kernel
from xlashard.predict.costs.memory_traffic import hbm_bytes
from xlashard.predict.costs.schedule import ScheduledOperation, StepSchedule
from xlashard.predict.preflight.attribution.hlo_dataflow import ValueOwners
from xlashard.predict.preflight.report.preflight_model import TimeEstimate
from xlashard.predict.preflight.report.step_model import (
    CORES,
    FoldedTimeline,
    LineTime,
    Timeline,
    TimelineBlock,
    TimelineSpan,
)

LEAST_SHARE = 0.001
"""Least share of the schedule that a line of its own takes."""

MOST_SPANS = 2000
"""Most operations of a timeline."""

_WAITS = ("ici", "dcn", "host")
_PRODUCTS = ("convolution", "dot")
_POINTS = 400
"""Most points of the memory over time."""

type _Key = tuple[SourceLine | None, str, str]


@dataclass
class _Group:
    op_name: str = ""
    longest: float = 0.0
    runs: float = 0.0
    exposed: float = 0.0
    resources: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        return sum(self.resources.values())

    def line(self, key: _Key, hbm_bytes: float) -> LineTime:
        source, _, kind = key
        bound = max(self.resources, key=lambda name: self.resources[name])
        runs = max(round(self.runs), 1)
        return LineTime(
            source, self.op_name, kind, self.seconds, runs, bound, self.exposed, hbm_bytes
        )


@dataclass(frozen=True, eq=False)
class StepLines:
    """Operations of a schedule by source line.

    Attributes:
        module: The compiled module.
        schedule: Its schedule.
        collectives: Its collectives.
        grid: The mesh.
        sources: Filter for lines of user code.
    """

    module: HloProgram
    schedule: StepSchedule
    collectives: Sequence[Collective]
    grid: MeshGrid
    sources: SourceLocator

    @property
    def lines(self) -> tuple[LineTime, ...]:
        """Time of each line and operation, the longest first, without those of small share."""
        hbm = self._count_hbm_bytes()
        return tuple(group.line(key, hbm[key]) for key, group in self._long.items())

    @property
    def other_seconds(self) -> float:
        """Time of the lines of small share."""
        everything = sum(group.seconds for group in self._groups.values())
        return max(everything - sum(group.seconds for group in self._long.values()), 0.0)

    def timeline(self, other_bytes: int = 0) -> Timeline:
        """Return the timeline, with the memory over time.

        Args:
            other_bytes: HBM that is in use all the time, such as that of the arguments.
        """
        ordered = self._reached()
        numbers = {name: number for number, name in enumerate(ordered)}
        least = self._least_seconds(ordered)
        blocks, left_out = [], 0
        for name in ordered:
            spans, runs = list(self._spans(name, numbers)), self.schedule.runs.get(name, 0.0)
            kept = tuple(s for s in spans if s.block >= 0 or runs * s.seconds >= least)
            left_out += len(spans) - len(kept)
            blocks.append(TimelineBlock(name, self.schedule.lengths[name], kept))
        timeline = Timeline(tuple(blocks), left_out=left_out)
        return replace(timeline, memory=self._memory(timeline, other_bytes))

    @cached_property
    def _groups(self) -> dict[_Key, _Group]:
        groups: dict[_Key, _Group] = defaultdict(_Group)
        for operation, runs in self.schedule.on_cores():
            seconds = runs * operation.seconds
            if not seconds:
                continue
            op_name, key = self._key(operation)
            group = groups[key]
            group.runs += runs
            group.resources[operation.resource] += seconds
            if operation.resource in _WAITS or operation.instruction.opcode.endswith("-done"):
                group.exposed += seconds
            if seconds > group.longest:
                group.longest, group.op_name = seconds, op_name
        return dict(sorted(groups.items(), key=lambda item: -item[1].seconds))

    @cached_property
    def _long(self) -> dict[_Key, _Group]:
        least = LEAST_SHARE * sum(group.seconds for group in self._groups.values())
        return {key: group for key, group in self._groups.items() if group.seconds >= least}

    def _count_hbm_bytes(self) -> dict[_Key, float]:
        """Return the bytes in HBM of each line, with those of copies beside other operations."""
        counts = dict.fromkeys(self._long, 0.0)
        # An operation that runs beside others may be noted again where the cores wait for it.
        once = {(o.computation, o.instruction.name): (o, runs) for o, runs in self.schedule}
        for operation, runs in once.values():
            _, key = self._key(operation)
            if key in counts:
                computation = self.module.computations[operation.computation]
                nbytes = hbm_bytes(self.module, computation, operation.instruction)
                counts[key] += runs * nbytes
        return counts

    @cached_property
    def _keys(self) -> dict[tuple[str, str], tuple[str, _Key]]:
        return {}

    def _key(self, operation: ScheduledOperation) -> tuple[str, _Key]:
        seen = operation.instruction.name, operation.resource
        if seen not in self._keys:
            op_name, frames, kind = self._origin(operation)
            key = self.sources.line(frames), operation_text(op_name), kind
            self._keys[seen] = op_name, key
        return self._keys[seen]

    def _origin(self, operation: ScheduledOperation) -> tuple[str, Sequence[Frame], str]:
        instruction = operation.instruction
        collective = self._collective(operation)
        if collective is not None:
            return *collective.cause, collective.kind
        product = self._product(operation)
        # A fusion takes the time of its product, whatever it is named after.
        named = product if product is not None and product.op_name else None
        owner = named or self._owners.owner(instruction.name)
        kind = "product" if product is not None else self._kind(instruction)
        return ("", (), kind) if owner is None else (owner.op_name, owner.frames, kind)

    def _kind(self, instruction: Instruction) -> str:
        if is_kernel(instruction):
            return "kernel"
        # Asynchronous slices are copies between memories.
        opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
        return opcode if opcode in (instruction.opcode, "async", "call") else "copy"

    def _product(self, operation: ScheduledOperation) -> Instruction | None:
        """Return the matrix product that an operation is or fuses."""
        computation = self.module.computations[operation.computation]
        inner = self.module.inside(computation, operation.instruction)
        return next((each for _, each in inner if each.opcode in _PRODUCTS), None)

    def _collective(self, operation: ScheduledOperation) -> Collective | None:
        """Return the collective that an operation is, or that it waits for."""
        if operation.resource not in ("ici", "dcn"):
            return None
        instruction: Instruction | None = operation.instruction
        while instruction is not None:
            name = instruction.rendezvous or instruction.name
            if (collective := self._by_name.get(name)) is not None:
                return collective
            if instruction.opcode == "fusion":
                return next(self._fused(instruction), None)
            before = instruction.operands[:1]
            instruction = self._owners.instruction(before[0]) if before else None
        return None

    def _fused(self, fusion: Instruction) -> Iterator[Collective]:
        for name in fusion.calls:
            computation = self.module.computations.get(name)
            for inner in () if computation is None else computation.instructions.values():
                channel = inner.attributes.channel
                if channel is not None and channel in self._by_channel:
                    yield self._by_channel[channel]

    @cached_property
    def _by_name(self) -> dict[str, Collective]:
        """Return the collectives by name, and by the rendezvous of a send and its recv."""
        named = {collective.name: collective for collective in self.collectives}
        sends = ((self._owners.instruction(name), c) for name, c in named.items())
        return named | {s.rendezvous or s.name: c for s, c in sends if s is not None}

    @cached_property
    def _by_channel(self) -> dict[int, Collective]:
        pairs = ((self._owners.instruction(c.name), c) for c in self.collectives)
        return {
            i.attributes.channel: c
            for i, c in pairs
            if i is not None and i.attributes.channel is not None
        }

    @cached_property
    def _owners(self) -> ValueOwners:
        return ValueOwners(self.module)

    @cached_property
    def _numbers(self) -> dict[_Key, int]:
        return {key: number for number, key in enumerate(self._long)}

    def _reached(self) -> list[str]:
        """Return the computations with operations, callers first."""
        names = [name for name in self.schedule.operations if self.schedule.runs.get(name)]
        return names[::-1]

    def _least_seconds(self, names: Sequence[str]) -> float:
        times = [
            self.schedule.runs[name] * operation.seconds
            for name in names
            for operation in self.schedule.operations[name]
        ]
        return sorted(times)[-MOST_SPANS] if len(times) > MOST_SPANS else 0.0

    def _spans(self, name: str, numbers: dict[str, int]) -> Iterator[TimelineSpan]:
        for operation in self.schedule.operations[name]:
            block, times = self._called(operation, numbers)
            line = -1 if block >= 0 else self._numbers.get(self._key(operation)[1], -1)
            for track in self._tracks(operation):
                yield TimelineSpan(
                    name=operation.instruction.name,
                    track=track,
                    start=operation.start,
                    seconds=operation.seconds,
                    resource=operation.resource,
                    line=line,
                    block=block,
                    times=times,
                )

    def _called(self, operation: ScheduledOperation, numbers: dict[str, int]) -> tuple[int, int]:
        """Return the block that an operation runs, and how often."""
        if operation.resource != "loop":
            return -1, 1
        lengths = self.schedule.lengths
        names = [n for n in operation.instruction.repeated_calls if n in numbers]
        if not names or not operation.seconds:
            return -1, 1
        name = max(names, key=lambda n: lengths[n])
        return numbers[name], max(round(operation.seconds / lengths[name]), 1)

    def _tracks(self, operation: ScheduledOperation) -> Iterator[str]:
        if not operation.in_background:
            yield CORES
        collective = self._collective(operation)
        is_itself = collective is not None and collective.name == operation.instruction.name
        if collective is not None and (operation.in_background or is_itself):
            yield f"along {along_text(collective, self.grid)}"
        elif operation.in_background:
            yield {"hbm": "HBM copies", "host": "host"}.get(operation.resource, "asynchronous")

    def _memory(self, timeline: Timeline, other: int) -> tuple[tuple[float, int], ...]:
        heaps = [a for a in self.module.allocations if a.is_temporary and a.memory == HBM]
        values = [v for heap in heaps for v in heap.values if v.live is not None]
        folded = FoldedTimeline(timeline)
        starts: dict[str, float] = {}
        for each in folded.spans():
            starts.setdefault(each.span.name, each.start)
        known = sorted((v.live[0], starts[v.name]) for v in values if v.live and v.name in starts)
        if not known or not folded.seconds:
            return ()
        steps = np.array([step for step, _ in known])
        times = np.maximum.accumulate([time for _, time in known])
        last = max(v.live[1] for v in values if v.live)
        samples = np.unique(np.linspace(0, last, _POINTS).round().astype(np.int64))
        used = np.sum([bytes_in_use(heap, samples) for heap in heaps], axis=0)
        places = np.interp(samples, [*steps, last], [*times, folded.seconds])
        return tuple(
            (float(time), int(nbytes) + other) for time, nbytes in zip(places, used, strict=True)
        )


def add_lines(
    time: TimeEstimate,
    compilation: Compilation,
    schedule: StepSchedule,
    mesh: Mesh,
    other_bytes: int = 0,
) -> TimeEstimate:
    """Return a time with its source lines and timeline.

    Args:
        time: Time of the schedule.
        compilation: The program, compiled or rejected for its memory.
        schedule: Its schedule.
        mesh: Mesh of the program.
        other_bytes: HBM that is in use all the time, such as that of the arguments.
    """
    step_lines = StepLines(
        compilation.module,
        schedule,
        compilation.module.collectives_on(mesh),
        grid_of(mesh),
        compilation.sources,
    )
    names = compilation.argument_names
    lines = [replace(x, op_name=names.get(x.op_name, x.op_name)) for x in step_lines.lines]
    return replace(
        time,
        lines=tuple(lines),
        other_lines_seconds=step_lines.other_seconds,
        timeline=step_lines.timeline(other_bytes),
    )
