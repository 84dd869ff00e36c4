"""Temporaries that are live at the peak of a program's heap.

The compiler writes the live range of each value, as instruction numbers, and its offset in the
heap. Values with overlapping live ranges at the same offset are one buffer under several names:
in-place updates, and loop state with its initial value.

XLA adds values without an operation in the user's program, such as loop state and copies. They are
attributed to the nearest operation with an op name.
"""

import re
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import numpy as np

from xlashard.pjit.report.communication import SourceLocator
from xlashard.program.hlo.analysis import HloModule
from xlashard.program.hlo.call_graph import BRANCH_ATTRIBUTES
from xlashard.program.hlo.module import Computation, Instruction
from xlashard.tpu.preflight.memory.buffer_assignment import HBM, Allocation, BufferValue, ShapeIndex
from xlashard.tpu.preflight.report.preflight_model import TemporaryReport

_FLOW = frozenset({"while", "conditional", "call", "tuple", "get-tuple-element"})
"""Operations without a value of their own; their op names carry little information."""

_MAKES_ROOM = "AllocateBuffer"

type _Position = tuple[str, ShapeIndex]


@dataclass(frozen=True, eq=False)
class ValueOwners:
    """Maps HLO values to operations of the user's program.

    Attributes:
        module: The compiled module.
    """

    module: HloModule

    def instruction(self, name: str) -> Instruction | None:
        """Return an instruction by its unique name."""
        home = self._homes.get(name)
        return None if home is None else home.instructions[name]

    def owner(self, name: str, index: ShapeIndex = ()) -> Instruction | None:
        """Return the nearest instruction with an op name: itself, a producer, or a consumer.

        Args:
            name: Instruction that produces the value.
            index: Shape index of the value.
        """
        waiting: deque[_Position] = deque([(name, index)])
        seen: set[_Position] = set()
        room: Instruction | None = None
        while waiting:
            position = waiting.popleft()
            found = self.instruction(position[0])
            if position in seen or found is None:
                continue
            seen.add(position)
            if self._has_op_name(found):
                if found.call_target != _MAKES_ROOM:
                    return found
                # Values written to the buffer identify the operation better.
                room = room or found
                continue
            waiting.extend(self._before(found, position[1]))
        return room or self._user(name)

    def _has_op_name(self, instruction: Instruction) -> bool:
        return instruction.opcode not in _FLOW and bool(self.module.op_name(instruction))

    def _user(self, name: str) -> Instruction | None:
        home = self._homes.get(name)
        users = [] if home is None else home.users.get(name, [])
        return next((user for user in users if self._has_op_name(user)), None)

    @cached_property
    def _homes(self) -> dict[str, Computation]:
        computations = self.module.computations.values()
        return {name: home for home in computations for name in home.instructions}

    def _before(self, found: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """Yield the values that a value comes from, most likely first."""
        operands = found.operand_names
        match found.opcode:
            case "tuple" if index and index[0] < len(operands):
                yield operands[index[0]], index[1:]
            case "get-tuple-element" if operands:
                yield operands[0], (found.element or 0, *index)
            case "while":
                yield from self._roots(found, ("body",), index)
                yield from ((name, index) for name in operands[:1])
            case "parameter":
                yield from self._passed(found, index)
            case _:
                yield from self._roots(found, ("calls", "to_apply"), index)
                yield from self._roots(found, BRANCH_ATTRIBUTES, index)
                yield from self._inside(found)
                # Other elements, such as the second element of a start, are the source.
                yield from ((name, ()) for name in operands[:1])

    def _roots(
        self, caller: Instruction, attributes: tuple[str, ...], index: ShapeIndex
    ) -> Iterator[_Position]:
        for attribute, callee in caller.called():
            home = self.module.computations.get(callee)
            if attribute in attributes and home is not None and home.root is not None:
                yield home.root.name, index

    def _inside(self, caller: Instruction) -> Iterator[_Position]:
        """Yield the instructions of a fusion, last first."""
        for attribute, callee in caller.called():
            home = self.module.computations.get(callee)
            if attribute == "calls" and home is not None:
                found = reversed(home.instructions.values())
                yield from ((i.name, ()) for i in found if i.opcode != "parameter")

    def _passed(self, parameter: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """Yield the values passed for a parameter: loop body results first, then initial values."""
        home = self._homes[parameter.name]
        run = self.module.call_sites.get(home.name)
        if run is None or run.caller is None:
            return
        if run.caller.opcode == "while":
            yield from self._roots(run.caller, ("body",), index)
        if operand := run.operand_for(home, parameter):
            yield operand, index


type LiveIntervals = Mapping[tuple[str, ShapeIndex], tuple[int, int]]
"""First and last instruction of each live range, by instruction and shape index."""


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


_RANGE = re.compile(r"^\s*([^\s{}:]+)\{([\d,\s]*)\}:\s*(\d+)-(\d+)\s*$", re.MULTILINE)


def describe_temporaries(
    allocations: Sequence[Allocation],
    ranges: LiveIntervals,
    module: HloModule,
    sources: SourceLocator,
) -> tuple[TemporaryReport, ...]:
    """Return the temporaries that are live at the heap's peak, grouped, largest first.

    Args:
        allocations: Buffer assignment of the program.
        ranges: Live interval of each value.
        module: The compiled module.
        sources: Filter for lines of user code.

    Returns:
        Temporaries whose sum never exceeds the heap. Gaps between buffers, and the pointer tables
        of tuples, are not included.
    """
    operations = ValueOwners(module)
    heaps = (a for a in allocations if a.is_temporary and a.memory == HBM)
    alike: dict[TemporaryReport, list[TemporaryReport]] = {}
    for held in (held for heap in heaps for held in buffers_at_peak(heap, ranges)):
        if held.is_table:
            continue
        report = _describe(held, operations, sources)
        alike.setdefault(replace(report, name="", device_bytes=0), []).append(report)
    together = [
        replace(found[0], device_bytes=sum(r.device_bytes for r in found), count=len(found))
        for found in alike.values()
    ]
    return tuple(sorted(together, key=lambda r: -r.device_bytes))


def _describe(held: PeakBuffer, operations: ValueOwners, sources: SourceLocator) -> TemporaryReport:
    module = operations.module
    value = min(held.values, key=lambda v: _name_preference(v, operations))
    owner = operations.owner(value.name, value.index)
    return TemporaryReport(
        name=owner.name if value.is_phi and owner is not None else value.name,
        type=_LAYOUT.sub("", value.type),
        device_bytes=held.nbytes,
        op_name="" if owner is None else module.op_name(owner),
        source=None if owner is None else sources.line(module.frames(owner)),
    )


_LAYOUT = re.compile(r"\{[^{}]*\}")


def _name_preference(value: BufferValue, operations: ValueOwners) -> tuple[bool, bool]:
    """Return a sort key that prefers values with an op name."""
    made = operations.instruction(value.name)
    return value.is_phi, made is None or not operations.module.op_name(made)


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
