"""XLA's buffer assignment, read from its text: what a program keeps in memory, and where.

The text is made for people, and grows with XLA. A line of an unknown form is left out, and so is
what an allocation is said to be beyond what is known here.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

HBM, HOST = 0, 5
"""Numbers of two kinds of memory, as layouts have them: `S(5)`; HBM's is never written."""

type ShapeIndex = tuple[int, ...]
"""Which part of a tuple, of nested tuples one number for each; empty for the whole."""


@dataclass(frozen=True, slots=True)
class BufferValue:
    """A value in an allocation.

    Attributes:
        name: The instruction that makes it.
        index: Which part of the instruction's value.
        size: Bytes, with the padding of its layout.
        offset: Where in the allocation it begins.
        type: Its type on one device, with its layout.
        is_phi: Whether it is one of several values, by the way the program went: a loop's state.
    """

    name: str
    index: ShapeIndex
    size: int
    offset: int
    type: str
    is_phi: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of memory that is there as long as the program runs.

    Attributes:
        number: Of the allocation.
        size: Bytes.
        memory: The number of the memory: `HBM`, `HOST`, others for those on the chip.
        parameter: The argument that it holds, as the module counts them; None for none.
        index: Which part of that argument; of arguments that travel as one tuple, which one.
        holds_result: Whether a result is in it at the end.
        constant: Whether it holds a constant.
        values: What is put there.
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
        """Whether it holds neither an argument nor a result nor a constant."""
        return self.parameter is None and not self.holds_result and not self.constant


def read_buffers(text: str) -> tuple[Allocation, ...]:
    """Reads the text of a buffer assignment.

    Args:
        text: With a line for each allocation, and after it one for each value.

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


def _allocation(number: int, size: int, said: str) -> Allocation:
    # Types stand between bars and may be of any length; nothing in them counts here.
    words = re.sub(r"\|[^|]*\|", "||", said).rstrip(":")
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
