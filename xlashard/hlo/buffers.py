"""Buffer assignment of a module: allocations, live ranges, and the buffers at the peak.

The compiler plans one heap per memory. Values with overlapping live ranges at the same offset are
one buffer under several names: in-place updates, and loop state with its initial value.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from operator import attrgetter

import numpy as np

from xlashard.hlo.shapes import HBM, Shape, shape_of
from xlashard.support.lazily import dataclass
from xlashard.support.wire import Message

type ShapeIndex = tuple[int, ...]
"""Index into a nested tuple; empty for the whole value."""


@dataclass(frozen=True)
class BufferValue:
    """A value in an allocation.

    Attributes:
        name: Instruction that produces the value.
        index: Shape index of the value.
        size: Bytes, including the padding of its layout.
        offset: Offset in the allocation.
        shape: Type on one device, with its layout.
        live: First and last step of the heap at which the value is live; None if the compiler does
            not report it, as for arguments, which are live all the time.
    """

    name: str
    index: ShapeIndex
    size: int
    offset: int
    shape: Shape
    live: tuple[int, int] | None = None


@dataclass(frozen=True)
class Allocation:
    """Memory allocated for the whole execution of a program.

    Attributes:
        number: Number of the allocation.
        size: Bytes.
        memory: Memory space: `HBM`, `HOST`, other numbers for on-chip memories.
        parameter: Parameter number in the module; None for other allocations.
        index: Shape index in the parameter, for tupled arguments.
        holds_result: Whether the allocation holds a result.
        constant: Whether the allocation holds a constant.
        thread_local: Whether each thread has its own: registers of a kernel on GPUs.
        values: Values assigned to the allocation.
    """

    number: int
    size: int
    memory: int = HBM
    parameter: int | None = None
    index: ShapeIndex = ()
    holds_result: bool = False
    constant: bool = False
    thread_local: bool = False
    values: tuple[BufferValue, ...] = field(default=(), repr=False)

    @property
    def is_temporary(self) -> bool:
        """True for neither argument, result nor constant."""
        return self.parameter is None and not self.holds_result and not self.constant


@dataclass(frozen=True)
class LiveRange:
    """Heap range in use for an interval of steps.

    Attributes:
        offset: Offset in the heap.
        size: Bytes.
        start: First step of the heap.
        end: Last step.
        values: Values in the range, in order.
    """

    offset: int
    size: int
    start: int
    end: int
    values: tuple[BufferValue, ...]


@dataclass(frozen=True)
class PeakBuffer:
    """Buffer that is live at the peak of the heap.

    Attributes:
        nbytes: Bytes that no larger live buffer covers.
        values: All values in the buffer.
    """

    nbytes: int
    values: tuple[BufferValue, ...]

    @property
    def is_table(self) -> bool:
        """True for the pointer table of a tuple."""
        return all(value.shape.dtype == "tuple" for value in self.values)


def buffers_at_peak(allocation: Allocation) -> list[PeakBuffer]:
    """Return the buffers that are live at the peak of a heap."""
    live_ranges = list(live_ranges_of(allocation.values))
    if not live_ranges:
        return []
    peak = _peak(live_ranges)
    alive = [live_range for live_range in live_ranges if live_range.start <= peak <= live_range.end]
    return list(_without_overlaps(alive, peak))


def bytes_in_use(allocation: Allocation, steps: np.ndarray) -> np.ndarray:
    """Return the bytes of a heap that live buffers cover at some of its steps, and at the peak.

    Args:
        allocation: The heap.
        steps: Steps of the heap, `[steps]`. The one closest to the peak gets the peak.
    """
    live_ranges = list(live_ranges_of(allocation.values))
    if not live_ranges:
        return np.zeros(len(steps), np.int64)
    start, end, offset, size = _columns(live_ranges)
    times = np.array(steps, np.int64)
    peak = _peak(live_ranges)
    times[np.argmin(np.abs(times - peak))] = peak
    alive = ((start <= time) & (end >= time) for time in times)
    return np.array([_covered_bytes(offset[a], size[a]) for a in alive], np.int64)


def live_ranges_of(values: Iterable[BufferValue]) -> Iterator[LiveRange]:
    """Yield heap ranges with the values that occupy them without a gap."""
    places: dict[tuple[int, int], list[tuple[int, int, BufferValue]]] = {}
    for value in values:
        if value.live is not None and value.size:
            places.setdefault((value.offset, value.size), []).append((*value.live, value))
    for (offset, size), uses in places.items():
        uses.sort(key=lambda f: f[:2])
        start, end, first = uses[0]
        together = [first]
        for other, last, value in uses[1:]:
            if other > end:
                yield LiveRange(offset, size, start, end, tuple(together))
                start, end, together = other, last, []
            together.append(value)
            end = max(end, last)
        yield LiveRange(offset, size, start, end, tuple(together))


def _peak(live_ranges: Sequence[LiveRange]) -> int:
    """Return the step at which most of the heap is in use.

    The sum of live sizes bounds the bytes in use, so only times with a larger sum than the best are
    examined.
    """
    start, end, offset, size = _columns(live_ranges)
    times = np.unique(start)
    begun = np.concatenate([[0], np.cumsum(size[np.argsort(start)])])
    over = np.concatenate([[0], np.cumsum(size[np.argsort(end)])])
    sums = (
        begun[np.searchsorted(np.sort(start), times, "right")]
        - over[np.searchsorted(np.sort(end), times, "left")]
    )
    best, peak = -1, 0
    for i in np.argsort(-sums, kind="stable"):
        if sums[i] <= best:
            break
        alive = (start <= times[i]) & (end >= times[i])
        nbytes = _covered_bytes(offset[alive], size[alive])
        if nbytes > best:
            best, peak = nbytes, int(times[i])
    return peak


def _columns(live_ranges: Sequence[LiveRange]) -> Iterator[np.ndarray]:
    """Yield first steps, last steps, offsets and sizes."""
    for get in map(attrgetter, ("start", "end", "offset", "size")):
        yield np.array([get(live_range) for live_range in live_ranges], np.int64)


def _covered_bytes(offset: np.ndarray, size: np.ndarray) -> int:
    """Return the bytes that ranges cover together, counting overlaps once."""
    order = np.argsort(offset)
    begin, end = offset[order], offset[order] + size[order]
    reached = np.maximum.accumulate(np.concatenate([[0], end[:-1]]))
    return int(np.maximum(end - np.maximum(begin, reached), 0).sum())


def _without_overlaps(alive: Sequence[LiveRange], peak: int) -> Iterator[PeakBuffer]:
    """Yield buffers by size, each without the bytes that larger ones cover."""
    occupied: list[tuple[int, int]] = []
    for live_range in sorted(alive, key=lambda s: (-s.size, s.offset)):
        free = _free(occupied, live_range.offset, live_range.offset + live_range.size)
        for piece in free:
            insort(occupied, piece)
        nbytes = sum(end - begin for begin, end in free)
        if nbytes:
            yield PeakBuffer(nbytes, tuple(v for v in live_range.values if _is_alive(v, peak)))


def _is_alive(value: BufferValue, time: int) -> bool:
    return value.live is not None and value.live[0] <= time <= value.live[1]


def _free(occupied: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return the pieces of a range that no other range covers, in order."""
    pieces = []
    at = max(bisect_left(occupied, (begin,)) - 1, 0)
    for other_begin, other_end in occupied[at:]:
        if other_begin >= end:
            break
        if other_begin > begin:
            pieces.append((begin, other_begin))
        begin = max(begin, other_end)
    if begin < end:
        pieces.append((begin, end))
    return pieces


def read_allocations(
    assignment: Message, instructions: Mapping[int, Message], unread: Counter[str]
) -> tuple[Allocation, ...]:
    """Return the allocations of a BufferAssignmentProto (xla/service/hlo.proto).

    Args:
        assignment: The message; empty for no allocations.
        instructions: Instructions of the module by their ids.
        unread: Counts what the reader did not understand.
    """
    # BufferAssignmentProto: logical_buffers = 1, buffer_allocations = 3,
    # heap_simulator_traces = 4. LogicalBufferProto: id = 1, defined_at = 3 with
    # shape_index = 3 and instruction_id = 4.
    places = {}
    for buffer in assignment.messages(1):
        place = buffer.message(3)
        instruction = instructions.get(place.number(4))
        unread["buffer of an unknown instruction"] += instruction is None
        places[buffer.number(1)] = instruction, place.numbers(3)
    lives = _lives(assignment.messages(4))
    return tuple(
        # BufferAllocationProto: index = 1, size = 2, is_thread_local = 3,
        # is_entry_computation_parameter = 5, parameter_number = 6, maybe_live_out = 7,
        # color = 8, assigned = 9, parameter_shape_index = 10, is_constant = 12.
        Allocation(
            number=allocation.number(1),
            size=allocation.number(2),
            memory=allocation.number(8),
            parameter=allocation.number(6) if allocation.number(5) else None,
            index=allocation.numbers(10),
            holds_result=bool(allocation.number(7)),
            constant=bool(allocation.number(12)),
            thread_local=bool(allocation.number(3)),
            values=tuple(
                BufferValue(
                    name=instruction.text(1),
                    index=index,
                    size=assigned.number(3),
                    offset=assigned.number(2),
                    shape=shape_of(instruction.data(3)).at(index),
                    live=lives.get(assigned.number(1)),
                )
                # Assigned: logical_buffer_id = 1, offset = 2, size = 3.
                for assigned in allocation.messages(9)
                for instruction, index in [places[assigned.number(1)]]
                if instruction is not None
            ),
        )
        for allocation in assignment.messages(3)
    )


def _lives(traces: list[Message]) -> dict[int, tuple[int, int]]:
    """Return the first and last step at which each buffer is live, by the steps of its heap."""
    # HeapSimulatorTrace: events = 1, whole_module_simulation = 2. Event: kind = 1, buffer_id = 2;
    # kinds are ALLOC = 0, FREE = 1, SHARE_WITH = 2. Buffers that are live at the end have no FREE.
    lives: dict[int, tuple[int, int]] = {}
    for trace in traces:
        if not trace.number(2):
            continue
        events = trace.messages(1)
        for step, event in enumerate(events):
            buffer = event.number(2)
            if event.number(1) == 1:
                lives[buffer] = lives[buffer][0], step
            else:
                lives[buffer] = step, len(events)
    return lives
