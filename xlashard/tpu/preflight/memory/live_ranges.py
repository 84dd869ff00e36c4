"""Which temporaries are alive when a program's heap is fullest.

The compiler's text says from which instruction to which each value lives, and where in the heap
each has its place. Values that share a place while both are alive are one value under several
names: what an operation writes over its operand, the state of a loop and what goes into it.

Which operation of the user's program a value of the compiled module belongs to.

XLA adds values that no line of the program asks for: the state of a loop, copies, pieces of
transfers. They go by the nearest operation that JAX has named.
"""

import re
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import numpy as np

from xlashard.pjit.report.communication import Sources
from xlashard.program.calls import BRANCHES, Run, runs_of
from xlashard.program.hlo import Computation, HloText, Instruction
from xlashard.tpu.preflight.memory.buffer_assignment import HBM, Allocation, BufferValue, ShapeIndex
from xlashard.tpu.preflight.report.preflight_model import TemporaryReport

_FLOW = frozenset({"while", "conditional", "call", "tuple", "get-tuple-element"})
"""Operations that make no value of their own: the names that JAX gave them say too little."""

_MAKES_ROOM = "AllocateBuffer"

type _Position = tuple[str, ShapeIndex]


@dataclass(frozen=True, eq=False)
class ValueOwners:
    """The operations of a module, for whoever asks whose a value is.

    Attributes:
        module: The compiled module.
    """

    module: HloText

    def instruction(self, name: str) -> Instruction | None:
        """An instruction by its name, which only one has."""
        home = self._homes.get(name)
        return None if home is None else home.instructions[name]

    def owner(self, name: str, index: ShapeIndex = ()) -> Instruction | None:
        """The nearest instruction with a name from JAX: it, else what made it, else what uses it.

        Args:
            name: An instruction that makes a value.
            index: Which part of the value.
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
            if self._is_told(found):
                if found.call_target != _MAKES_ROOM:
                    return found
                # What is put there says more than that there is room for it.
                room = room or found
                continue
            waiting.extend(self._before(found, position[1]))
        return room or self._user(name)

    def _is_told(self, instruction: Instruction) -> bool:
        return instruction.opcode not in _FLOW and bool(self.module.op_name(instruction))

    def _user(self, name: str) -> Instruction | None:
        home = self._homes.get(name)
        users = [] if home is None else home.users.get(name, [])
        return next((user for user in users if self._is_told(user)), None)

    @cached_property
    def _homes(self) -> dict[str, Computation]:
        computations = self.module.computations.values()
        return {name: home for home in computations for name in home.instructions}

    @cached_property
    def _runs(self) -> dict[str, Run]:
        return runs_of(self.module)

    def _before(self, found: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """Where a value comes from, the likeliest first."""
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
                yield from self._roots(found, BRANCHES, index)
                yield from self._inside(found)
                # The second part of what starts a transfer, and so on, are its source.
                yield from ((name, ()) for name in operands[:1])

    def _roots(
        self, caller: Instruction, attributes: tuple[str, ...], index: ShapeIndex
    ) -> Iterator[_Position]:
        for attribute, callee in caller.called():
            home = self.module.computations.get(callee)
            if attribute in attributes and home is not None and home.root is not None:
                yield home.root.name, index

    def _inside(self, caller: Instruction) -> Iterator[_Position]:
        """What a fusion does, the last first."""
        for attribute, callee in caller.called():
            home = self.module.computations.get(callee)
            if attribute == "calls" and home is not None:
                found = reversed(home.instructions.values())
                yield from ((i.name, ()) for i in found if i.opcode != "parameter")

    def _passed(self, parameter: Instruction, index: ShapeIndex) -> Iterator[_Position]:
        """What a computation is given: of a loop what its body gives on, else what came first."""
        home = self._homes[parameter.name]
        run = self._runs.get(home.name)
        if run is None or run.caller is None:
            return
        if run.caller.opcode == "while":
            yield from self._roots(run.caller, ("body",), index)
        if operand := run.operand_for(home, parameter):
            yield operand, index


type LiveIntervals = Mapping[tuple[str, ShapeIndex], tuple[int, int]]
"""By instruction and part of its value, the first and the last instruction that it is alive at."""


@dataclass(frozen=True, slots=True)
class LiveRange:
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
class PeakBuffer:
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


def read_live_ranges(text: str) -> LiveIntervals:
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
    allocations: Sequence[Allocation], ranges: LiveIntervals, module: HloText, sources: Sources
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


def _describe(held: PeakBuffer, operations: ValueOwners, sources: Sources) -> TemporaryReport:
    module = operations.module
    value = min(held.values, key=lambda v: _strangeness(v, operations))
    owner = operations.owner(value.name, value.index)
    return TemporaryReport(
        name=owner.name if value.is_phi and owner is not None else value.name,
        type=_LAYOUT.sub("", value.type),
        device_bytes=held.nbytes,
        op_name="" if owner is None else module.op_name(owner),
        source=None if owner is None else sources.line(module.frames(owner)),
    )


_LAYOUT = re.compile(r"\{[^{}]*\}")


def _strangeness(value: BufferValue, operations: ValueOwners) -> tuple[bool, bool]:
    """Sorts the names of one place: first an operation that JAX has named."""
    made = operations.instruction(value.name)
    return value.is_phi, made is None or not operations.module.op_name(made)


def buffers_at_peak(allocation: Allocation, ranges: LiveIntervals) -> list[PeakBuffer]:
    """What is in a heap when most of it is taken, by place."""
    live_ranges = list(live_ranges_of(allocation.values, ranges))
    if not live_ranges:
        return []
    peak = _peak(live_ranges)
    alive = [live_range for live_range in live_ranges if live_range.start <= peak <= live_range.end]
    return list(_without_overlaps(alive, peak, ranges))


def live_ranges_of(values: Iterable[BufferValue], ranges: LiveIntervals) -> Iterator[LiveRange]:
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
                yield LiveRange(offset, size, start, end, tuple(together))
                start, end, together = other, last, []
            together.append(value)
            end = max(end, last)
        yield LiveRange(offset, size, start, end, tuple(together))


def _peak(live_ranges: Sequence[LiveRange]) -> int:
    """When most of the heap is taken.

    The sum of what is alive is no less than what is taken, so only times at which it is larger
    than the most that was found need a closer look.
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
    """How many bytes places take together, those that overlap once."""
    order = np.argsort(offset)
    begin, end = offset[order], offset[order] + size[order]
    reached = np.maximum.accumulate(np.concatenate([[0], end[:-1]]))
    return int(np.maximum(end - np.maximum(begin, reached), 0).sum())


def _without_overlaps(
    alive: Sequence[LiveRange], peak: int, ranges: LiveIntervals
) -> Iterator[PeakBuffer]:
    """Places by size, each without what the ones before it have of it."""
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
