"""Facts of a report as short texts: lines, operations, types and paths."""

import re
from collections.abc import Sequence
from pathlib import Path

from xlashard.pjit.report.parts import CollectiveReport, SourceLine, ValueReport
from xlashard.wording import typed

_LONGEST_FILE = 28
"""Of longer paths of files the last two parts are shown, in letters."""


def line_text(source: SourceLine) -> str:
    """`model.py:12`, with as much of the path as lies under the working folder."""
    path = Path(source.file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if len(path.parts) > 2 and (path.is_absolute() or len(str(path)) > _LONGEST_FILE):
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
    backward = ", backward" if "transpose(jvp" in op_name else ""
    start = _group(op_name)
    if start is None:
        return _last(op_name) + backward
    first, *others = op_name[start + 1 : -1].split(":")
    return f"{_last(first)} and {len(others)} more{backward}"


def _group(op_name: str) -> int | None:
    """Where a last part `(a:b:c)` begins, in which XLA lists what it made one operation of."""
    depth = 0
    for place in reversed(range(len(op_name))):
        depth += {")": 1, "(": -1}.get(op_name[place], 0)
        if depth == 0:
            is_part = op_name[place] == "(" and op_name[:place].endswith("/")
            return place if is_part and ":" in op_name[place:] else None
    return None


def _last(op_name: str) -> str:
    """The last part of a name; an einsum goes by its subscripts."""
    *outer, last = op_name.split("/")
    scope = re.sub(r"^(?:\w+\()*|\)*$", "", outer[-1]) if outer else ""
    return scope if "->" in scope else last


def groups_text(collective: CollectiveReport) -> str:
    """The axes, or the groups with the first of them: `4 groups of 2 devices: 0,3 …`."""
    groups = collective.groups
    if not groups:
        return collective.along
    first = ",".join(map(str, groups[0][:4])) + (",…" if len(groups[0]) > 4 else "")
    return f"{collective.along}: {first}{' …' if len(groups) > 1 else ''}"


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
    return typed(dtype, value.shape)


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


def sharding_text(value: ValueReport) -> str:
    """How a value is dealt out, and on how many devices each part is: `P('data') ×4`."""
    if not value.used:
        return "not used"
    return f"{value.spec} ×{value.copies}" if value.copies > 1 else value.spec


_DECIDED = {
    "caller": "you",
    "argument": "the argument",
    "default": "default",
    "partitioner": "the partitioner",
    "function": "the function",
    "unknown": "",
}


def decided(value: ValueReport) -> str:
    """Who decided how a value lies; empty where nobody did, or nobody knows."""
    return _DECIDED[value.decided_by] if value.used else ""
