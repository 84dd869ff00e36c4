"""What a partitioner chose, from the text of the module that it then cuts up."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from xlashard._jax.runtime.shardings import tile_texts
from xlashard.program.hlo import HloText, Instruction, array_types, element_types
from xlashard.program.readback import Side


@dataclass(frozen=True)
class ChosenInText:
    """What the text of a module says, for programs that became no executable.

    Attributes:
        module: The module once each argument and result has its sharding; None if unknown.
        result_type: The type of the compiled program's result, with its layouts.
    """

    module: HloText | None
    result_type: str

    def shardings(self, of: Side, count: int) -> Sequence[str] | None:
        """How values are dealt out, in HLO's syntax."""
        module = self.module
        entry = None if module is None else module.computations.get(module.entry)
        if entry is None:
            return None
        if of == "parameters":
            found = [i for i in entry.instructions.values() if i.opcode == "parameter"]
            found.sort(key=lambda i: int(i.operands))
        else:
            found = [entry.root] if entry.root is not None else []
        texts = [text for instruction in found for text in _shardings(instruction)]
        return texts if len(texts) == count else None

    def memory_kinds(self, count: int) -> Sequence[str | None]:
        """The memory of each result."""
        kinds = ["pinned_host" if "S(5)" in t else None for t in element_types(self.result_type)]
        return kinds if len(kinds) == count else [None] * count


def _shardings(instruction: Instruction) -> list[str]:
    """That of an instruction's value, or those of the elements of a tuple."""
    count = len(element_types(instruction.type))
    said = instruction.attribute("sharding")
    # What bears none is held whole; one is written in place of a tuple of equal ones.
    texts = ["{replicated}"] if said is None else tile_texts(said[: _end(said)])
    return texts * count if len(texts) == 1 else texts


def _end(text: str) -> int:
    """Where the brace at the start of a text closes."""
    depth = 0
    for found in re.finditer(r"[{}]", text):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.end()
    return len(text)


def result_type(header: str) -> str:
    """The type of a module's result, with layouts, from the first line of its text.

    Example:
        >>> result_type("HloModule f, entry_computation_layout={(f32[8]{0})->(s32[], f32[8]{0})}")
        '(s32[], f32[8]{0})'
    """
    _, _, rest = header.partition("entry_computation_layout=")
    _, _, result = rest[1 : _end(rest) - 1].partition("->")
    return result if array_types(result) else ""
