"""Which temporaries are alive when a program's heap is fullest.

The compiler's text says from which instruction to which each value lives, and where in the heap
each has its place. Values that share a place while both are alive are one value under several
names: what an operation writes over its operand, the state of a loop and what goes into it.
"""

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from xlashard.pjit.report.communication import Sources
from xlashard.program.hlo import HloText
from xlashard.tpu.preflight.buffers import HBM, Allocation, BufferValue, ShapeIndex
from xlashard.tpu.preflight.operations import Operations
from xlashard.tpu.preflight.parts import TemporaryReport

type LiveRanges = Mapping[tuple[str, ShapeIndex], tuple[int, int]]
"""By instruction and part of its value, the first and the last instruction that it is alive at."""


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a heap while something is in it.

    Attributes:
        offset: Where it begins.
        size: Bytes.
        start: From which instruction on.
        end: Until which.
        values: What is there, one after the other.
    """

    offset: int
    size: int
    start: int
    end: int
    values: tuple[BufferValue, ...]


@dataclass(frozen=True)
class Held:
    """A place that is taken when the heap is fullest.

    Attributes:
        nbytes: Its bytes, without those that a larger one around it has already.
        values: What is there, under all its names.
    """

    nbytes: int
    values: tuple[BufferValue, ...]

    @property
    def is_table(self) -> bool:
        """Whether it is the table of a tuple, in which the addresses of its elements are."""
        return all(value.type.startswith("(") for value in self.values)


def read_live_ranges(text: str) -> LiveRanges:
    """Reads when values are alive, from the text that the compiler writes.

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


_RANGE = re.compile(r"^\s*([^\s{}:]+)\{([\d,\s]*)\}:\s*(\d+)-(\d+)\s*$", re.MULTILINE)


def describe_temporaries(
    allocations: Sequence[Allocation], ranges: LiveRanges, module: HloText, sources: Sources
) -> tuple[TemporaryReport, ...]:
    """The temporaries that are alive when the heap is fullest, alike ones as one, largest first.

    Args:
        allocations: What the program keeps in memory.
        ranges: When values are alive.
        module: The compiled module.
        sources: Which lines to show.

    Returns:
        Together they never take more than the heap. What is missing are gaps between them, and a
        few hundred bytes for each tuple.
    """
    operations = Operations(module)
    heaps = (a for a in allocations if a.is_temporary and a.memory == HBM)
    alike: dict[TemporaryReport, list[TemporaryReport]] = {}
    for held in (held for heap in heaps for held in held_at_peak(heap, ranges)):
        if held.is_table:
            continue
        report = _describe(held, operations, sources)
        alike.setdefault(replace(report, name="", device_bytes=0), []).append(report)
    together = [
        replace(found[0], device_bytes=sum(r.device_bytes for r in found), count=len(found))
        for found in alike.values()
    ]
    return tuple(sorted(together, key=lambda r: -r.device_bytes))


def _describe(held: Held, operations: Operations, sources: Sources) -> TemporaryReport:
    module = operations.module
    value = min(held.values, key=lambda v: _strangeness(v, operations))
    owner = operations.owner(value.name, value.index)
    return TemporaryReport(
        name=owner.name if value.joins and owner is not None else value.name,
        type=_LAYOUT.sub("", value.type),
        device_bytes=held.nbytes,
        op_name="" if owner is None else module.op_name(owner),
        source=None if owner is None else sources.line(module.frames(owner)),
    )


_LAYOUT = re.compile(r"\{[^{}]*\}")


def _strangeness(value: BufferValue, operations: Operations) -> tuple[bool, bool]:
    """Sorts the names of one place: first an operation that JAX has named."""
    made = operations.instruction(value.name)
    return value.joins, made is None or not operations.module.op_name(made)


def held_at_peak(allocation: Allocation, ranges: LiveRanges) -> list[Held]:
    """What is in a heap when most of it is taken, by place."""
    spans = list(spans_of(allocation.values, ranges))
    if not spans:
        return []
    peak = _peak(spans)
    alive = [span for span in spans if span.start <= peak <= span.end]
    return list(_without_overlaps(alive, peak, ranges))


def spans_of(values: Iterable[BufferValue], ranges: LiveRanges) -> Iterator[Span]:
    """Places with what is in them one after the other and without a gap."""
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
                yield Span(offset, size, start, end, tuple(together))
                start, end, together = other, last, []
            together.append(value)
            end = max(end, last)
        yield Span(offset, size, start, end, tuple(together))


def _peak(spans: Sequence[Span]) -> int:
    """When most of the heap is taken.

    The sum of what is alive is no less than what is taken, so only times at which it is larger
    than the most that was found need a closer look.
    """
    start, end, offset, size = (
        np.array([get(span) for span in spans], np.int64)
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
    """How many bytes places take together, those that overlap once."""
    order = np.argsort(offset)
    begin, end = offset[order], offset[order] + size[order]
    reached = np.maximum.accumulate(np.concatenate([[0], end[:-1]]))
    return int(np.maximum(end - np.maximum(begin, reached), 0).sum())


def _without_overlaps(alive: Sequence[Span], peak: int, ranges: LiveRanges) -> Iterator[Held]:
    """Places by size, each without what the ones before it have of it."""
    taken: list[tuple[int, int]] = []
    for span in sorted(alive, key=lambda s: (-s.size, s.offset)):
        free = _free(taken, span.offset, span.offset + span.size)
        for piece in free:
            insort(taken, piece)
        nbytes = sum(end - begin for begin, end in free)
        if nbytes:
            yield Held(nbytes, tuple(v for v in span.values if _is_alive(v, peak, ranges)))


def _is_alive(value: BufferValue, time: int, ranges: LiveRanges) -> bool:
    start, end = ranges[value.name, value.index]
    return start <= time <= end


def _free(taken: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The pieces of a place that no other has taken, which lie apart and in their order."""
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
