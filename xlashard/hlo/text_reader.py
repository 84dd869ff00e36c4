"""Reader of HLO text, for programs of which no proto exists: saved ones, and files of dumps.

XLA's own parser of text is no alternative: that of jaxlib 0.12 ends the process on scheduled
modules with asynchronous computations, which TPU's compiler writes.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import pairwise

from xlashard.geometry.groups import ReplicaGroups, read_groups, read_pairs
from xlashard.geometry.hlo_text import read_aliases
from xlashard.hlo.collective_kinds import has_groups
from xlashard.hlo.module import (
    Attributes,
    Computation,
    Frame,
    HloModule,
    Instruction,
    WindowDimension,
    callees_first,
    groups_or_strange,
)
from xlashard.hlo.shapes import Shape


def split_modules(text: str) -> list[str]:
    """Return the text of each module in the text of one or more."""
    starts = [match.start() for match in re.finditer(r"^HloModule\b", text, re.MULTILINE)]
    return [text[a:b] for a, b in pairwise([*starts, len(text)])]


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")


def read_text(text: str) -> HloModule:
    """Read the text of one module; lines of an unknown form are counted in `unread`."""
    return _TextReader(text).module()


class _TextReader:
    """Header, tables and computations of one module."""

    def __init__(self, text: str) -> None:
        lines = iter(text.splitlines())
        self._header = next(lines)
        self._lines = lines
        self._tables: dict[str, dict[int, str]] = {}
        self._unread: Counter[str] = Counter()
        self._devices = self._number("num_partitions") * self._number("replica_count")

    def module(self) -> HloModule:
        computations: dict[str, Computation] = {}
        entry = ""
        table: dict[int, str] | None = None
        current: Computation | None = None
        for line in self._lines:
            if current is not None:
                if line.startswith("}"):
                    current = None
                else:
                    self._read_instruction(current, line)
            elif (title := line.strip()) in _TABLES:
                table = self._tables.setdefault(title, {})
            elif match := _COMPUTATION.match(line):
                current = computations.setdefault(match[2], Computation(match[2]))
                entry = match[2] if match[1] else entry
            elif table is not None and (number := title.partition(" "))[0].isdecimal():
                table[int(number[0])] = number[2]
            elif title:
                self._unread["line"] += 1
        named = re.match(r"HloModule ([^\s,]*)", self._header)
        return HloModule(
            name=named[1] if named else "",
            computations=callees_first(entry, computations),
            entry=entry,
            num_partitions=self._number("num_partitions"),
            num_replicas=self._number("replica_count"),
            result=self._result(),
            aliases=read_aliases(_attributes(self._header).get("input_output_alias", "")),
            unread=dict(+self._unread),
        )

    def _number(self, name: str) -> int:
        match = re.search(rf"\b{name}=(\d+)", self._header)
        return int(match[1]) if match else 1

    def _result(self) -> Shape | None:
        layout = _attributes(self._header).get("entry_computation_layout", "")
        result = layout[1:-1].rpartition("->")[2]
        return read_shape(result) if result else None

    def _read_instruction(self, computation: Computation, line: str) -> None:
        match = _INSTRUCTION.match(line)
        start = match.end() if match else 0
        end = _closed(line, start) if line.startswith("(", start) else line.find(" ", start)
        opcode = _OPCODE.match(line, end) if match and end > 0 else None
        if match is None or opcode is None:
            self._unread["line"] += bool(line.strip())
            return
        close = _closed(line, opcode.end() - 1)
        operands, rest = line[opcode.end() : close - 1], line[close:].lstrip(", ")
        has_operands = opcode[1] not in ("constant", "parameter")
        names = tuple(_operand_names(operands)) if has_operands else ()
        for name in names:
            if "#" in name:
                _write_out_elements(computation, name)
        shape = read_shape(line[start:end])
        computation.instructions[match[2]] = Instruction(
            name=match[2],
            opcode=opcode[1],
            shape=shape,
            operands=names,
            calls=_calls(opcode[1], rest),
            is_root=bool(match[1]),
            read=partial(self._attributes, opcode[1], shape, operands, rest),
        )

    def _frames(self, metadata: dict[str, str]) -> tuple[Frame, ...]:
        """Return the source lines that metadata specify."""
        if number := metadata.get("stack_frame_id"):
            return self._stack(int(number))
        file, line = _unquoted(metadata.get("source_file", "")), metadata.get("source_line")
        return (Frame(file, int(line)),) if file and line else ()

    def _stack(self, frame: int) -> tuple[Frame, ...]:
        stack: list[Frame] = []
        rows = self._tables.get("StackFrames", {})
        # The printer counts parents from 1 for "no parent", so that the first is its own.
        offset = 1 if _row_number(rows.get(1, ""), "parent_frame_id") == 1 else 0
        while frame in rows and len(stack) <= len(rows):
            stack.append(self._frame(_row_number(rows[frame], "file_location_id")))
            frame = _row_number(rows[frame], "parent_frame_id") - offset
        return tuple(stack)

    def _frame(self, location: int) -> Frame:
        row = self._tables.get("FileLocations", {}).get(location, "")
        name = self._tables.get("FileNames", {}).get(_row_number(row, "file_name_id"), "")
        function = self._tables.get("FunctionNames", {}).get(_row_number(row, "function_name_id"))
        return Frame(_unquoted(name), _row_number(row, "line"), _unquoted(function or ""))

    def _attributes(self, opcode: str, shape: Shape, operands: str, rest: str) -> Attributes:
        attributes = _attributes(rest)
        metadata = _attributes(attributes.get("metadata", "{}")[1:-1], _BLANK)
        frontend = _attributes(attributes.get("frontend_attributes", "{}")[1:-1])
        integers = _integers(operands, shape) if opcode == "constant" else ()
        number = opcode == "parameter" and operands.isdecimal()
        channel, pairs = attributes.get("channel_id"), attributes.get("source_target_pairs")
        strange: list[str] = []
        precision = tuple(re.findall(r"\w+", attributes.get("operand_precision", "")))
        return Attributes(
            op_name=_unquoted(metadata.get("op_name", "")),
            frames=self._frames(metadata),
            parameter_number=int(operands) if number else 0,
            tuple_index=int(attributes["index"]) if "index" in attributes else None,
            integers=integers,
            direction=attributes.get("direction", ""),
            call_target=_unquoted(attributes.get("custom_call_target", "")),
            channel=int(channel) if channel else None,
            groups=groups_or_strange(lambda: self._groups(opcode, attributes), strange),
            pairs=None
            if pairs is None
            else groups_or_strange(
                lambda: read_pairs(pairs), strange, "source-target pairs, taken as none"
            ),
            global_ids=attributes.get("use_global_device_ids") == "true",
            contracting_dims=_numbers(attributes.get("lhs_contracting_dims", "")),
            dim_labels=attributes.get("dim_labels", ""),
            window=_window(attributes.get("window", "")),
            fft_length=_numbers(attributes.get("fft_length", "")),
            slice_sizes=_numbers(attributes.get("slice_sizes", "")),
            window_dims=_numbers(attributes.get("update_window_dims", "")),
            inserted_dims=_numbers(attributes.get("inserted_window_dims", "")),
            precision=precision if set(precision) - {"default"} else (),
            backend_config=_unquoted(attributes.get("backend_config", "")),
            frontend={name: _unquoted(value) for name, value in frontend.items()},
            sharding=attributes.get("sharding", ""),
            control_predecessors=tuple(_NAME.findall(attributes.get("control-predecessors", ""))),
            strange=tuple(strange),
        )

    def _groups(self, opcode: str, attributes: dict[str, str]) -> ReplicaGroups | None:
        text = attributes.get("replica_groups")
        if text is None:
            return ReplicaGroups.everyone(self._devices) if has_groups(opcode) else None
        if "device_ids" in attributes:
            text = f"{text}, device_ids={attributes['device_ids']}"
        return read_groups(text, self._devices)


def _integers(operands: str, shape: Shape) -> tuple[int, ...]:
    """Return the values of a constant of integers; nothing if the text leaves them out."""
    numbers = re.findall(r"-?\d+", operands)
    known = shape.dtype[0] in "su" and len(numbers) == shape.size
    return tuple(map(int, numbers)) if known and (shape.dims or numbers[0] == operands) else ()


_COMMA, _BLANK = re.compile(r"[\s,]*,[\s,]*"), re.compile(r"[\s,]+")
_KEY = re.compile(r"[\s,]*([\w.\-]+)=")
_JSON = json.JSONDecoder()
_MARK = re.compile(r'[\[{(]|[\]})]|"(?:[^"\\]|\\.)*"|[\s,]+')


def _attributes(text: str, separator: re.Pattern[str] = _COMMA) -> dict[str, str]:
    """Return the attributes of a text by name; what stands between them has none."""
    attributes: dict[str, str] = {}
    at = 0
    while at < len(text):
        key = _KEY.match(text, at)
        start = at if key is None else key.end()
        depth, end = 0, len(text)
        if text.startswith('{"', start):
            with suppress(ValueError):
                # The compiler's configuration, which is long.
                _, start_of_next = _JSON.raw_decode(text, start)
                attributes[key[1] if key else ""] = text[start:start_of_next]
                at = start_of_next + 1
                continue
        for mark in _MARK.finditer(text, start):
            if mark[0] in "[{(":
                depth += 1
            elif mark[0] in "]})":
                depth -= 1
            elif depth == 0 and separator.fullmatch(mark[0]):
                end = mark.start()
                break
        if key is not None:
            attributes[key[1]] = text[start:end].rstrip()
        at = end + 1
    return attributes


_CALLED = re.compile(
    r"\b(calls|to_apply|called_computations|body|condition|select|scatter|branch_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TEXT_OF_OTHERS = re.compile(r",?\s*(?:metadata=\{|backend_config=|frontend_attributes=\{)")


def _calls(opcode: str, rest: str) -> tuple[str, ...]:
    """Return the computations that attributes name, in the order of XLA."""
    if "=" not in rest or opcode.endswith(("-update", "-done")):
        # The start of an asynchronous call names the computation.
        return ()
    named = _CALLED.findall(_TEXT_OF_OTHERS.split(rest, maxsplit=1)[0])
    # The text names the condition of a loop before its body.
    named.sort(key=lambda item: item[0] == "condition")
    return tuple(name for _, names in named for name in re.findall(r"[\w.\-]+", names))


def _write_out_elements(computation: Computation, name: str) -> None:
    """Add the get-tuple-elements that a short writing, `%loop#1`, leaves out."""
    whole, *indices = name.split("#")
    for index in map(int, indices):
        element = f"{whole}#{index}"
        source = computation.instructions.get(whole)
        shapes = source.shape.elements if source is not None else ()
        if element not in computation.instructions and index < len(shapes):
            read = partial(Attributes, tuple_index=index)
            computation.instructions[element] = Instruction(
                element, "get-tuple-element", shapes[index], (whole,), (), False, read
            )
        whole = element


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


_ARRAY = re.compile(r"\s*([a-z]+\d*\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_LEVEL = re.compile(r"[()\[\]{},]|/\*.*?\*/")


@lru_cache(maxsize=4096)
def read_shape(text: str) -> Shape:
    """Read the text of a type; an unknown form becomes a dtype of its own.

    Example:
        >>> shape = read_shape("(bf16[3,100]{1,0:T(8,128)(2,1)S(1)}, s32[])")
        >>> str(shape), shape.elements[0].padded_bytes, shape.elements[0].memory_space
        ('(bf16[3,100], s32[])', 2048, 1)
    """
    text = re.sub(r"/\*.*?\*/", "", text).strip()
    if text.startswith("("):
        return Shape("tuple", elements=tuple(map(read_shape, _elements(text))))
    match = _ARRAY.match(text)
    if match is None:
        return Shape(text)
    dtype, dims, layout = match.groups()
    order, _, rest = (layout or "").partition(":")
    tiles = re.search(r"T((?:\([\d,*]+\))+)", rest)
    space, packed = re.search(r"S\((\d+)\)", rest), re.search(r"E\((\d+)\)", rest)
    listed = [] if tiles is None else re.findall(r"\(([^)]*)\)", tiles[1])
    return Shape(
        dtype=dtype,
        dims=_numbers(dims),
        minor_to_major=_numbers(order),
        tiles=tuple(tuple(-1 if n == "*" else int(n) for n in t.split(",")) for t in listed),
        memory_space=int(space[1]) if space else 0,
        element_bits=int(packed[1]) if packed else 0,
    )


def _elements(text: str) -> Iterator[str]:
    """Yield the texts of the elements of a tuple's type."""
    depth, start = 0, 1
    for match in _LEVEL.finditer(text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        if (match[0] == "," and depth == 1) or depth == 0:
            if element := text[start : match.start()].strip():
                yield element
            start = match.end()
        if depth == 0:
            return


def _window(text: str) -> tuple[WindowDimension, ...]:
    fields = _attributes(text[1:-1], _BLANK)
    if "size" not in fields:
        return ()
    rank = fields["size"].count("x") + 1

    def numbers(name: str, default: int) -> list[int]:
        written = fields.get(name)
        return [default] * rank if written is None else [int(n) for n in written.split("x")]

    pads = [int(p.split("_")[0]) for p in fields.get("pad", "x".join("0" * rank)).split("x")]
    rows = zip(
        numbers("size", 1),
        numbers("stride", 1),
        pads,
        numbers("lhs_dilate", 1),
        numbers("rhs_dilate", 1),
        strict=True,
    )
    return tuple(WindowDimension(*row) for row in rows)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def _row_number(row: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", row)
    return int(match[1]) if match else 0


def _unquoted(text: str) -> str:
    text = text.strip()
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text
