"""Parse the text of XLA's buffer assignment.

The text has no stable format. Unknown lines and unknown attributes of an allocation are ignored.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

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
