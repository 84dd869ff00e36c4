"""Parser of HLO text.

Through jaxlib, XLA's own objects lack called computations, replica groups and source lines; every
PJRT plugin returns the text. It is parsed line by line, and an instruction is split into its type,
its opcode, its operands and its attributes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Self

from xlashard.lazily import dataclass


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of one array.

    Attributes:
        dtype: As HLO writes it: `f32`, `bf16`, `pred`.
        dims: Its shape; the largest one, where it is not fixed.
        nbytes: Its elements without the padding of its layout, in bytes.
    """

    dtype: str
    dims: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name, without the percent sign.
        type: The text of its type, with layouts.
        opcode: Its opcode.
        operands: The text between its parentheses.
        attributes: The text after the parentheses.
        is_root: Whether its value is that of the computation.
    """

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str
    is_root: bool = False

    @property
    def operand_names(self) -> list[str]:
        """Return the names of its operands."""
        return _operand_names(self.operands)

    @property
    def element(self) -> int | None:
        """Return the tuple index of a `get-tuple-element`."""
        match = re.search(r"\bindex=(\d+)", self.attributes)
        return int(match[1]) if match else None

    @property
    def parameter_number(self) -> int:
        """Return the argument number of a `parameter`."""
        return int(self.operands) if self.operands.isdecimal() else 0

    @property
    def call_target(self) -> str:
        """Return the target of a `custom-call`; empty if unknown."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def attribute(self, name: str) -> str | None:
        """Return the text from an attribute's value on, or None where it is not given."""
        match = re.search(rf"(?:^|[\s,{{]){name}=", self.bare_attributes)
        return self.bare_attributes[match.end() :] if match else None

    def called(self) -> list[tuple[str, str]]:
        """Return the computations that attributes name, each with the attribute."""
        if "=" not in self.attributes:
            return []
        return [
            (attribute, name)
            for attribute, names in _CALLED.findall(self.bare_attributes)
            for name in re.findall(r"[\w.\-]+", names)
        ]

    @property
    def bare_attributes(self) -> str:
        """Return the attributes before metadata, backend configuration or frontend attributes."""
        return _TEXT_OF_OTHERS.split(self.attributes, maxsplit=1)[0]


_CALLED = re.compile(
    r"\b(calls|to_apply|called_computations|body|condition|select|scatter|branch_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TEXT_OF_OTHERS = re.compile(r",?\s*(?:metadata=\{|backend_config=|frontend_attributes=\{)")


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a program's source.

    Attributes:
        file: The file's path.
        line: The line, from 1 on.
        function: The function around it, where that is known.
    """

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True)
class Computation:
    """A list of instructions.

    Attributes:
        name: Its name, without the percent sign.
        instructions: Its instructions by name, in their order.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction | None:
        """Return the instruction whose value is the computation's."""
        return next((i for i in self.instructions.values() if i.is_root), None)

    @cached_property
    def targets(self) -> frozenset[str]:
        """Return the targets of its custom calls."""
        calls = (i for i in self.instructions.values() if i.opcode == "custom-call")
        return frozenset(target for call in calls if (target := call.call_target))

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Return the instructions that use each value, in their order."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operand_names):
                users.setdefault(name, []).append(instruction)
        return users


@dataclass(frozen=True)
class HloText:
    """One module.

    Attributes:
        header: The line with its name and its attributes.
        computations: By name.
        entry: The name of the computation that runs; empty if the text has none.
        tables: Tables of source lines, by their title and the number of the row.
    """

    header: str
    computations: Mapping[str, Computation]
    entry: str
    tables: Mapping[str, Mapping[int, str]]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of one module; lines of an unknown form are skipped."""
        computations: dict[str, Computation] = {}
        tables: dict[str, dict[int, str]] = {}
        entry = ""
        table: dict[int, str] | None = None
        current: Computation | None = None
        lines = iter(text.splitlines())
        header = next(lines)
        for line in lines:
            if current is not None:
                if line.startswith("}"):
                    current = None
                elif (instruction := _instruction(line)) is not None:
                    if "#" in instruction.operands:
                        _write_out_elements(current, instruction)
                    current.instructions[instruction.name] = instruction
            elif (title := line.strip()) in _TABLES:
                table = tables.setdefault(title, {})
            elif match := _COMPUTATION.match(line):
                current = computations.setdefault(match[2], Computation(match[2]))
                entry = match[2] if match[1] else entry
            elif table is not None and (number := title.partition(" "))[0].isdecimal():
                table[int(number[0])] = number[2]
        return cls(header, computations, entry, tables)

    @cached_property
    def trip_counts(self) -> dict[tuple[str, str], int | None]:
        """Return the cache of `call_graph.trip_count`, keyed by computation and loop."""
        return {}

    @cached_property
    def num_partitions(self) -> int:
        """Return the number of devices per replica of the program."""
        return self._header_number("num_partitions")

    @cached_property
    def num_replicas(self) -> int:
        """Return the number of replicas of the program."""
        return self._header_number("replica_count")

    def _header_number(self, name: str) -> int:
        match = re.search(rf"\b{name}=(\d+)", self.header)
        return int(match[1]) if match else 1

    def op_name(self, instruction: Instruction) -> str:
        """Return JAX's name of the operation: `f/jvp()/while/body/dot`; empty if unknown."""
        match = _OP_NAME.search(_metadata(instruction))
        return re.sub(r"\\(.)", r"\1", match[1]) if match else ""

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """Return the lines that the operation comes from, the innermost first."""
        metadata = _metadata(instruction)
        if frame := re.search(r"\bstack_frame_id=(\d+)", metadata):
            return self._stack(int(frame[1]))
        file = re.search(r'\bsource_file="((?:[^"\\]|\\.)*)"', metadata)
        line = re.search(r"\bsource_line=(\d+)", metadata)
        return (Frame(file[1], int(line[1])),) if file and line else ()

    def _stack(self, frame: int) -> tuple[Frame, ...]:
        stack: list[Frame] = []
        rows = self.tables.get("StackFrames", {})
        # The printer counts parents from 1 for "no parent", so that the first is its own.
        offset = 1 if _row_number(rows.get(1, ""), "parent_frame_id") == 1 else 0
        while frame in rows and len(stack) <= len(rows):
            stack.append(self._frame(_row_number(rows[frame], "file_location_id")))
            frame = _row_number(rows[frame], "parent_frame_id") - offset
        return tuple(stack)

    def _frame(self, location: int) -> Frame:
        row = self.tables.get("FileLocations", {}).get(location, "")
        name = self.tables.get("FileNames", {}).get(_row_number(row, "file_name_id"), "")
        function = self.tables.get("FunctionNames", {}).get(_row_number(row, "function_name_id"))
        return Frame(_unquoted(name), _row_number(row, "line"), _unquoted(function or ""))


_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_METADATA = re.compile(r"\bmetadata=\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\}")


def _metadata(instruction: Instruction) -> str:
    match = _METADATA.search(instruction.attributes)
    return match[1] if match else ""


def _row_number(row: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", row)
    return int(match[1]) if match else 0


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text.strip().strip('"'))


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")


def split_modules(text: str) -> list[str]:
    """Return the text of each module in the text of one or more."""
    starts = [match.start() for match in re.finditer(r"^HloModule\b", text, re.MULTILINE)]
    return [text[a:b] for a, b in pairwise([*starts, len(text)])]


def _write_out_elements(computation: Computation, instruction: Instruction) -> None:
    """Add the get-tuple-elements that a short writing, `%loop#1`, leaves out."""
    for name in instruction.operand_names:
        whole, *indices = name.split("#")
        for index in indices:
            element = f"{whole}#{index}"
            source = computation.instructions.get(whole)
            types = element_types(source.type) if source is not None else ()
            if element not in computation.instructions and int(index) < len(types):
                computation.instructions[element] = Instruction(
                    element, types[int(index)], "get-tuple-element", f"%{whole}", f"index={index}"
                )
            whole = element


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    start = match.end()
    end = _closed(line, start) if line.startswith("(", start) else line.find(" ", start)
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if opcode is None:
        return None
    close = _closed(line, opcode.end() - 1)
    operands = line[opcode.end() : close - 1]
    return Instruction(
        match[2], line[start:end], opcode[1], operands, line[close:].lstrip(", "), bool(match[1])
    )


_BRACKET = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')


def _closed(line: str, start: int) -> int:
    """Return the place past the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _BRACKET.finditer(line, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return len(line)


def _operand_names(operands: str) -> list[str]:
    if "%" in operands:
        return _NAME.findall(operands)
    # Printed without percent signs: the name is the last word of each operand.
    words = [operand.split() for operand in operands.split(",")]
    return [w[-1] for w in words if w and re.fullmatch(r"[A-Za-z_][\w.\-]*", w[-1])]


_LEVEL = re.compile(r"[()\[\]{},]|/\*.*?\*/")


@lru_cache(maxsize=4096)
def element_types(text: str) -> tuple[str, ...]:
    """Return the texts of the elements of a tuple's type; the type itself if it is no tuple.

    Example:
        >>> element_types("(s32[]{:T(128)}, (f32[4,8]{1,0}, u32[]))")
        ('s32[]{:T(128)}', '(f32[4,8]{1,0}, u32[])')
    """
    if not text.startswith("("):
        return (text,)
    elements: list[str] = []
    depth, start = 0, 1
    for match in _LEVEL.finditer(text):
        mark = match[0]
        if mark[0] == "/":
            start = match.end() if not text[start : match.start()].strip() else start
        elif mark == "," and depth == 1:
            elements.append(text[start : match.start()].strip())
            start = match.end()
        elif mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth == 0:
                elements.append(text[start : match.start()].strip())
                break
    return tuple(filter(None, elements))


_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([^\]]*)\](\{[^}]*\})?")


def array_types(text: str) -> list[ArrayType]:
    """Return the arrays of a type, those of tuples in order, without tokens.

    Example:
        >>> [(str(t), t.nbytes) for t in array_types("(bf16[8,4]{1,0:T(8,128)}, s32[])")]
        [('bf16[8,4]', 64), ('s32[]', 4)]
    """
    arrays = _ARRAY.findall(text)
    return [_array_type(*parts) for parts in arrays if parts[0] not in ("token", "opaque")]


def _array_type(dtype: str, dims: str, layout: str) -> ArrayType:
    sizes = tuple(int(number) for number in re.findall(r"\d+", dims))
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["8"])[0])
    if bits < 8:
        # Small integers take a byte each, unless their layout packs them.
        packed = re.search(r"E\((\d+)\)", layout)
        bits = int(packed[1]) if packed else 8
    return ArrayType(dtype, sizes, -(-math.prod(sizes) * bits // 8))
