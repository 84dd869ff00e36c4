"""Facts of a report as short texts: lines, operations, types and paths."""

import re
from collections.abc import Sequence
from pathlib import Path

from xlashard.pjit.report.parts import CollectiveReport, SourceLine, ValueReport


def line_text(source: SourceLine) -> str:
    """`model.py:12`, with as much of the path as lies under the working folder."""
    path = Path(source.file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    elif len(path.parts) > 2:
        path = Path(*path.parts[-2:])
    return f"{path}:{source.line}"


def operation_text(op_name: str) -> str:
    """The operation at the end of JAX's name for it.

    Example:
        >>> operation_text("step/transpose(jvp())/while/body/bd,df->bf/dot_general")
        'bd,df->bf, backward'
        >>> operation_text("step/jvp()/(reduce_sum:dot_general:dot_general)")
        'reduce_sum and 2 more'
    """
    several = re.search(r"\((\w[^()]*:[^()]*)\)$", op_name)
    if several:
        first, *others = several[1].split(":")
        text = f"{_last(first)} and {len(others)} more"
    else:
        text = _last(op_name)
    return f"{text}, backward" if "transpose(jvp" in op_name else text


def _last(op_name: str) -> str:
    """The last part of a name; an einsum goes by its subscripts."""
    *outer, last = op_name.split("/")
    scope = re.sub(r"^(?:\w+\()*|\)*$", "", outer[-1]) if outer else ""
    return scope if "->" in scope else last


def types_text(collective: CollectiveReport) -> str:
    """What goes in and comes out: `f32[8,16] → f32[16,16]`."""
    one, other = map(_types, (collective.operands, collective.results))
    return one if one == other else f"{one} → {other}"


def _types(types: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(types))
    if len(distinct) == 1:
        return distinct[0] if len(types) == 1 else f"{len(types)} × {distinct[0]}"
    return f"{distinct[0]} and {len(types) - 1} more"


_LETTERS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_type(value: ValueReport) -> str:
    """The type as a jaxpr has it: `f32[8,16]`."""
    letters = re.match(r"[a-z]*", value.dtype)
    word = letters[0] if letters else ""
    dtype = _LETTERS.get(word, word) + value.dtype[len(word) :]
    return f"{dtype}[{','.join(map(str, value.shape))}]"


def short_path(path: str, most: int) -> str:
    """A path of at most so many letters, if it can be: its steps in the middle are left out.

    Example:
        >>> short_path("state['optimizer'][1][0].mu['layers']['mlp']['down']", 32)
        "state…['layers']['mlp']['down']"
    """
    if len(path) <= most:
        return path
    first, *steps = re.findall(r"^[^\[.]+|\[[^\]]*\]|\.\w+", path) or [path]
    kept = ""
    for step in reversed(steps):
        if len(first) + 1 + len(step) + len(kept) > most:
            break
        kept = step + kept
    return f"{first}…{kept}" if kept else path


_DECIDED = {
    "caller": "you",
    "argument": "the argument",
    "given": "you or the argument",
    "default": "default",
    "partitioner": "the partitioner",
    "function": "the function",
}


def decided(value: ValueReport) -> str:
    """Who decided how a value lies; empty for one that lies nowhere."""
    return _DECIDED[value.decided_by] if value.used else ""
