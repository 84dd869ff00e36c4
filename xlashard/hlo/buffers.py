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
from xlashard.support.wire import Message, message_type

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


_BUFFER = message_type(
    id=(1, int), defined_at=(3, message_type(index=(3, [int]), instruction=(4, int)))
)
_ALLOCATION = message_type(
    number=(1, int),
    size=(2, int),
    is_thread_local=(3, int),
    is_parameter=(5, int),
    parameter=(6, int),
    holds_result=(7, int),
    memory=(8, int),
    assigned=(9, [message_type(buffer=(1, int), offset=(2, int), size=(3, int))]),
    index=(10, [int]),
    is_constant=(12, int),
)
_TRACE = message_type(
    events=(1, [message_type(kind=(1, int), buffer=(2, int))]), is_whole_module=(2, int)
)
_ASSIGNMENT = message_type(
    buffers=(1, [_BUFFER]), allocations=(3, [_ALLOCATION]), traces=(4, [_TRACE])
)
"""BufferAssignmentProto (xla/service/hlo.proto)."""


def read_allocations(
    assignment: bytes, instructions: Mapping[int, Message], unread: Counter[str]
) -> tuple[Allocation, ...]:
    """Return the allocations of a serialized BufferAssignmentProto.

    Args:
        assignment: The serialized message; empty for no allocations.
        instructions: Instructions of the module by their ids.
        unread: Counts what the reader did not understand.
    """
    message, places = _ASSIGNMENT(assignment), {}
    for buffer in message.buffers:
        instruction = instructions.get(buffer.defined_at.instruction)
        unread["buffer of an unknown instruction"] += instruction is None
        places[buffer.id] = instruction, tuple(buffer.defined_at.index)
    lives, allocations = _lives(message.traces), []
    for allocation in message.allocations:
        values = []
        for part in allocation.assigned:
            instruction, index = places[part.buffer]
            if instruction is not None:
                shape, live = shape_of(instruction.shape).at(index), lives.get(part.buffer)
                value = BufferValue(instruction.name, index, part.size, part.offset, shape, live)
                values.append(value)
        allocations.append(
            Allocation(
                number=allocation.number,
                size=allocation.size,
                memory=allocation.memory,
                parameter=allocation.parameter if allocation.is_parameter else None,
                index=tuple(allocation.index),
                holds_result=bool(allocation.holds_result),
                constant=bool(allocation.is_constant),
                thread_local=bool(allocation.is_thread_local),
                values=tuple(values),
            )
        )
    return tuple(allocations)


def _lives(traces: list[Message]) -> dict[int, tuple[int, int]]:
    """Return the first and last step at which each buffer is live, by the steps of its heap."""
    # Kinds of events are ALLOC = 0, FREE = 1, SHARE_WITH = 2. Buffers that are live at the end have
    # no FREE.
    lives: dict[int, tuple[int, int]] = {}
    for trace in traces:
        if not trace.is_whole_module:
            continue
        for step, event in enumerate(trace.events):
            if event.kind == 1:
                lives[event.buffer] = lives[event.buffer][0], step
            else:
                lives[event.buffer] = step, len(trace.events)
    return lives
