"""Format facts of a report for table cells: lines, operations, types and paths."""

import re
from collections.abc import Sequence
from pathlib import Path

from xlashard.pjit.report.model import CollectiveReport, SourceLine, ValueReport
from xlashard.wording import typed

_LONGEST_FILE = 28
"""Longer paths of files are cut to their last two parts; in characters."""


def line_text(source: SourceLine) -> str:
    """Format a line as `model.py:12`, with its path relative to the working folder."""
    path = Path(source.file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if len(path.parts) > 2 and (path.is_absolute() or len(str(path)) > _LONGEST_FILE):
        path = Path(*path.parts[-2:])
    return f"{path}:{source.line}"


def operation_text(op_name: str) -> str:
    """Return the operation at the end of its JAX name.

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
    """Return the start of a final `(a:b:c)`, the operations that XLA merged into one."""
    depth = 0
    for place in reversed(range(len(op_name))):
        depth += {")": 1, "(": -1}.get(op_name[place], 0)
        if depth == 0:
            is_part = op_name[place] == "(" and op_name[:place].endswith("/")
            return place if is_part and ":" in op_name[place:] else None
    return None


def _last(op_name: str) -> str:
    """Return the last part of a name, or the subscripts of an einsum."""
    *outer, last = op_name.split("/")
    scope = re.sub(r"^(?:\w+\()*|\)*$", "", outer[-1]) if outer else ""
    return scope if "->" in scope else last


def groups_text(collective: CollectiveReport) -> str:
    """Format the axes, or the groups with the first one: `4 groups of 2 devices: 0,3 …`."""
    groups = collective.groups
    if not groups:
        return collective.along
    first = ",".join(map(str, groups[0][:4])) + (",…" if len(groups[0]) > 4 else "")
    return f"{collective.along}: {first}{' …' if len(groups) > 1 else ''}"


def types_text(collective: CollectiveReport) -> str:
    """Format types of operands and results: `f32[8,16] → f32[16,16]`."""
    one, other = map(_types, (collective.operands, collective.results))
    return one if one == other else f"{one} → {other}"


def _types(types: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(types))
    if len(distinct) == 1:
        return distinct[0] if len(types) == 1 else f"{len(types)} × {distinct[0]}"
    return f"{distinct[0]} and {len(types) - 1} more"


_LETTERS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_type(value: ValueReport) -> str:
    """Format a type as in a jaxpr: `f32[8,16]`."""
    letters = re.match(r"[a-z]*", value.dtype)
    word = letters[0] if letters else ""
    dtype = _LETTERS.get(word, word) + value.dtype[len(word) :]
    return typed(dtype, value.shape)


def short_path(path: str, most: int) -> str:
    """Shorten a path to a maximum length if possible, by omitting keys in the middle.

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
    """Format a sharding with the copies of each shard: `P('data') ×4`."""
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


def decided_text(value: ValueReport) -> str:
    """Format the origin of a value's sharding; empty if unknown."""
    return _DECIDED[value.decided_by] if value.used else ""
