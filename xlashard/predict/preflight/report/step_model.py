"""Data model of a step's time by source line and of its timeline.

A timeline holds one run of each computation; a loop refers to its body by number. Folded, each loop
takes the time of one iteration.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from xlashard.analysis.programs.source_lines import SourceLine

CORES = "cores"
"""Track of the operations that keep the cores busy, or for which they wait."""


@dataclass(frozen=True)
class LineTime:
    """Time of equal operations of a source line.

    Attributes:
        source: Line of the operations; of an all-gather that of its consumer. None if unknown.
        op_name: JAX name of the longest of them; empty if unknown.
        kind: `product`, `fusion`, `kernel`, `copy`, a kind of collective, or an HLO opcode.
        seconds: Time for which they keep the cores busy, or for which the cores wait for them, in
            one execution.
        runs: Number of runs in one execution.
        bound: Unit that they use or wait for most of the time, as in `TimeEstimate.shares`.
        exposed_seconds: Part of `seconds` for which the cores wait for a network, the host, or a
            copy between memories.
        hbm_bytes: Bytes that they read and write in HBM in one execution.
    """

    source: SourceLine | None
    op_name: str
    kind: str
    seconds: float
    runs: int
    bound: str
    exposed_seconds: float = 0.0
    hbm_bytes: float = 0.0


@dataclass(frozen=True)
class SpillReport:
    """Attention scores that are too large for VMEM, and pass through HBM.

    Attributes:
        type: Type on one device: `f32[4,8,8192,8192]`.
        device_bytes: Bytes on one device, including padding.
        vmem_bytes: VMEM of a device.
        runs: Number of runs in one execution.
        block: Block of queries and of keys whose scores stay in VMEM.
        op_name: JAX name of their product.
        source: Line of the product. None if unknown.
    """

    type: str
    device_bytes: int
    vmem_bytes: int
    runs: int
    block: int
    op_name: str
    source: SourceLine | None


@dataclass(frozen=True)
class TimelineSpan:
    """Operation in one run of its computation.

    Attributes:
        name: HLO instruction.
        track: What it occupies: `cores`, mesh axes (`along data`), `HBM copies`, `host`,
            `asynchronous`.
        start: Seconds from the start of the computation's run.
        seconds: Duration.
        resource: Unit that it uses or waits for: `matrix`, `vector`, `hbm`, `vmem`, `kernel`,
            `launch`, `ici`, `dcn`, `host`; `loop` for one that runs another computation.
        line: Position in `TimeEstimate.lines`; -1 for a shorter one.
        block: Position in `Timeline.blocks` of the computation that it runs, or -1.
        times: Number of runs of that computation.
    """

    name: str
    track: str
    start: float
    seconds: float
    resource: str
    line: int = -1
    block: int = -1
    times: int = 1


@dataclass(frozen=True)
class TimelineBlock:
    """One run of a computation.

    Attributes:
        name: Name of the computation.
        seconds: Duration.
        spans: Its operations, in order.
    """

    name: str
    seconds: float
    spans: tuple[TimelineSpan, ...]


@dataclass(frozen=True)
class Timeline:
    """Schedule of one execution on one device.

    Attributes:
        blocks: The entry computation, then those that loops and branches run.
        memory: HBM in use over the folded time: pairs of seconds and bytes. Empty if the compiler
            reports no live ranges.
        left_out: Number of short operations that it leaves out.
    """

    blocks: tuple[TimelineBlock, ...]
    memory: tuple[tuple[float, int], ...] = ()
    left_out: int = 0


@dataclass(frozen=True)
class FoldedSpan:
    """Operation at its place in the folded timeline.

    Attributes:
        span: The operation.
        start: Seconds of folded time.
        seconds: Folded duration.
        depth: Number of loops around it.
        runs: Number of runs in one execution.
    """

    span: TimelineSpan
    start: float
    seconds: float
    depth: int
    runs: int


@dataclass(frozen=True)
class FoldedTimeline:
    """Timeline in which each loop takes the time of one iteration.

    Attributes:
        timeline: The timeline.
    """

    timeline: Timeline

    @cached_property
    def lengths(self) -> tuple[float, ...]:
        """Folded seconds of one run of each block."""
        lengths: dict[int, float] = {}

        def length(number: int) -> float:
            if number not in lengths:
                block = self.timeline.blocks[number]
                saved = sum(s.seconds - length(s.block) for s in block.spans if s.block >= 0)
                lengths[number] = max(block.seconds - saved, 0.0)
            return lengths[number]

        return tuple(map(length, range(len(self.timeline.blocks))))

    @property
    def seconds(self) -> float:
        """Folded seconds of the step."""
        return self.lengths[0] if self.lengths else 0.0

    def spans(self) -> Iterator[FoldedSpan]:
        """Yield the operations of the entry and of the blocks that it runs."""
        return self._spans(0, 0.0, 0, 1)

    def _spans(self, number: int, begin: float, depth: int, runs: int) -> Iterator[FoldedSpan]:
        place = self._folding(number)
        for span in self.timeline.blocks[number].spans if self.timeline.blocks else ():
            start, end = place(span.start), place(span.start + span.seconds)
            yield FoldedSpan(span, begin + start, end - start, depth, runs)
            if span.block >= 0:
                yield from self._spans(span.block, begin + start, depth + 1, runs * span.times)

    def _folding(self, number: int) -> Callable[[float], float]:
        loops = [
            (s.start, s.seconds, self.lengths[s.block])
            for s in (self.timeline.blocks[number].spans if self.timeline.blocks else ())
            if s.block >= 0
        ]

        def place(time: float) -> float:
            folded = time
            for start, seconds, length in loops:
                if time >= start + seconds:
                    folded -= seconds - length
                elif time > start:
                    folded -= (time - start) * (1 - length / seconds)
            return folded

        return place
