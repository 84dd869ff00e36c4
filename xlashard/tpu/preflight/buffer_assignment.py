"""Parse the text of XLA's buffer assignment and live ranges, and find the buffers at the peak.

The texts have no stable format. Unknown lines and unknown attributes of an allocation are ignored.

The compiler writes the live range of each value, as instruction numbers, and its offset in the
heap. Values with overlapping live ranges at the same offset are one buffer under several names:
in-place updates, and loop state with its initial value.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

HBM, HOST = 0, 5
"""Memory space numbers in layouts: `S(5)`; layouts omit the number of HBM."""


type ShapeIndex = tuple[int, ...]
"""Index into a nested tuple; empty for the whole value."""


@dataclass(frozen=True, slots=True)
class BufferValue:
    """A value in an allocation.

    Attributes:
        name: Instruction that produces the value.
        index: Shape index of the value.
        size: Bytes, including the padding of its layout.
        offset: Offset in the allocation.
        type: Type on one device, with its layout.
        is_phi: Whether the value is a phi, such as loop state.
    """

    name: str
    index: ShapeIndex
    size: int
    offset: int
    type: str
    is_phi: bool = False


@dataclass(frozen=True, slots=True)
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
        values: Values assigned to the allocation.
    """

    number: int
    size: int
    memory: int = HBM
    parameter: int | None = None
    index: ShapeIndex = ()
    holds_result: bool = False
    constant: bool = False
    values: tuple[BufferValue, ...] = field(default=(), repr=False)

    @property
    def is_temporary(self) -> bool:
        """True for neither argument, result nor constant."""
        return self.parameter is None and not self.holds_result and not self.constant


def read_buffers(text: str) -> tuple[Allocation, ...]:
    """Parse a buffer assignment.

    Args:
        text: One line per allocation, each followed by one line per value.

    Example:
        >>> text = '''
        ... allocation 0: size 512, page 0, parameter 1, shape |f32[8]| at ShapeIndex {}:
        ...  value: <3 p.1 @0> (size=512,offset=0): f32[8]{0:T(128)}
        ... '''
        >>> [(a.size, a.parameter, a.values[0].name) for a in read_buffers(text)]
        [(512, 1, 'p.1')]
    """
    return tuple(_allocations(text.splitlines()))


_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*)$")


_VALUE = re.compile(
    r"^\s*value: <\d+ (?P<name>[^\s{<>]+)(?:\{(?P<index>[\d,\s]*)\})?(?P<joins> \(phi\))?[^>]*>"
    r" \(size=(?P<size>\d+),\s*offset=(?P<offset>\d+)\): (?P<type>.*)$"
)


def _allocations(lines: Iterable[str]) -> Iterator[Allocation]:
    current: Allocation | None = None
    values: list[BufferValue] = []
    for line in lines:
        if found := _ALLOCATION.match(line):
            if current is not None:
                yield replace(current, values=tuple(values))
            current, values = _allocation(int(found[1]), int(found[2]), found[3]), []
        elif found := _VALUE.match(line):
            values.append(_value(found))
    if current is not None:
        yield replace(current, values=tuple(values))


def _value(found: re.Match[str]) -> BufferValue:
    return BufferValue(
        name=found["name"],
        index=_shape_index(found["index"]),
        size=int(found["size"]),
        offset=int(found["offset"]),
        type=found["type"].strip(),
        is_phi=found["joins"] is not None,
    )


def _allocation(number: int, size: int, attributes: str) -> Allocation:
    # Remove types, which stand between bars and may have any length.
    words = re.sub(r"\|[^|]*\|", "||", attributes).rstrip(":")
    memory = re.search(r"\bcolor (\d+)", words)
    parameter = re.search(r"\bparameter (\d+)", words)
    index = re.search(r"\bShapeIndex \{([\d,\s]*)\}", words)
    return Allocation(
        number=number,
        size=size,
        memory=int(memory[1]) if memory else HBM,
        parameter=int(parameter[1]) if parameter else None,
        index=_shape_index(index[1] if index else None),
        holds_result="maybe-live-out" in words or "output shape is" in words,
        constant=re.search(r"\bconstant\b", words) is not None,
    )


def _shape_index(text: str | None) -> ShapeIndex:
    return tuple(map(int, re.findall(r"\d+", text or "")))


type LiveIntervals = Mapping[tuple[str, ShapeIndex], tuple[int, int]]
"""First and last instruction of each live range, by instruction and shape index."""


_RANGE = re.compile(r"^\s*([^\s{}:]+)\{([\d,\s]*)\}:\s*(\d+)-(\d+)\s*$", re.MULTILINE)


def read_live_ranges(text: str) -> LiveIntervals:
    """Parse the live ranges that the compiler writes.

    Example:
        >>> text = '''
        ... BufferLiveRange:
        ...   add.4{}:23-38
        ...   copy-start.1{0}:17-20
        ... '''
        >>> read_live_ranges(text)
        {('add.4', ()): (23, 38), ('copy-start.1', (0,)): (17, 20)}
    """
    _, _, rest = text.partition("BufferLiveRange:")
    return {
        (name, tuple(map(int, re.findall(r"\d+", index)))): (int(start), int(end))
        for name, index, start, end in _RANGE.findall(rest)
    }


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Heap range in use for an interval of instructions.

    Attributes:
        offset: Offset in the heap.
        size: Bytes.
        start: First instruction.
        end: Last instruction.
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
        return all(value.type.startswith("(") for value in self.values)


def buffers_at_peak(allocation: Allocation, ranges: LiveIntervals) -> list[PeakBuffer]:
    """Return the buffers that are live at the peak of a heap."""
    live_ranges = list(live_ranges_of(allocation.values, ranges))
    if not live_ranges:
        return []
    peak = _peak(live_ranges)
    alive = [live_range for live_range in live_ranges if live_range.start <= peak <= live_range.end]
    return list(_without_overlaps(alive, peak, ranges))


def live_ranges_of(values: Iterable[BufferValue], ranges: LiveIntervals) -> Iterator[LiveRange]:
    """Yield heap ranges with the values that occupy them without a gap."""
    places: dict[tuple[int, int], list[tuple[int, int, BufferValue]]] = {}
    for value in values:
        lives = ranges.get((value.name, value.index))
        if lives is not None and value.size:
            places.setdefault((value.offset, value.size), []).append((*lives, value))
    for (offset, size), found in places.items():
        found.sort(key=lambda f: f[:2])
        start, end, first = found[0]
        together = [first]
        for other, last, value in found[1:]:
            if other > end:
                yield LiveRange(offset, size, start, end, tuple(together))
                start, end, together = other, last, []
            together.append(value)
            end = max(end, last)
        yield LiveRange(offset, size, start, end, tuple(together))


def _peak(live_ranges: Sequence[LiveRange]) -> int:
    """Return the instruction at which most of the heap is in use.

    The sum of live sizes bounds the bytes in use, so only times with a larger sum than the best are
    examined.
    """
    start, end, offset, size = (
        np.array([get(live_range) for live_range in live_ranges], np.int64)
        for get in map(attrgetter, ("start", "end", "offset", "size"))
    )
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
        taken = _taken(offset[alive], size[alive])
        if taken > best:
            best, peak = taken, int(times[i])
    return peak


def _taken(offset: np.ndarray, size: np.ndarray) -> int:
    """Return the bytes that ranges cover together, counting overlaps once."""
    order = np.argsort(offset)
    begin, end = offset[order], offset[order] + size[order]
    reached = np.maximum.accumulate(np.concatenate([[0], end[:-1]]))
    return int(np.maximum(end - np.maximum(begin, reached), 0).sum())


def _without_overlaps(
    alive: Sequence[LiveRange], peak: int, ranges: LiveIntervals
) -> Iterator[PeakBuffer]:
    """Yield buffers by size, each without the bytes that larger ones cover."""
    taken: list[tuple[int, int]] = []
    for live_range in sorted(alive, key=lambda s: (-s.size, s.offset)):
        free = _free(taken, live_range.offset, live_range.offset + live_range.size)
        for piece in free:
            insort(taken, piece)
        nbytes = sum(end - begin for begin, end in free)
        if nbytes:
            yield PeakBuffer(
                nbytes, tuple(v for v in live_range.values if _is_alive(v, peak, ranges))
            )


def _is_alive(value: BufferValue, time: int, ranges: LiveIntervals) -> bool:
    start, end = ranges[value.name, value.index]
    return start <= time <= end


def _free(taken: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return the pieces of a range that no other range covers, in order."""
    pieces = []
    at = max(bisect_left(taken, (begin,)) - 1, 0)
    for other_begin, other_end in taken[at:]:
        if other_begin >= end:
            break
        if other_begin > begin:
            pieces.append((begin, other_begin))
        begin = max(begin, other_end)
    if begin < end:
        pieces.append((begin, end))
    return pieces
