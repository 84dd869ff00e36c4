"""Source lines, operations and paths of a program, as reports write them."""

import re
from pathlib import Path

from xlashard.analysis.programs.source_lines import SourceLine
from xlashard.hlo.collectives import is_rematerialized
from xlashard.support.formatting import CELL

_LONGEST_FILE = 28
"""Longer paths of files are cut to their last two parts; in characters."""


def line_text(source: SourceLine | None) -> str:
    """Format a line as `model.py:12`, or `layers.py:7 from model.py:12` where that is ambiguous.

    The text of None is empty.
    """
    if source is None:
        return ""
    frames = (source, *(source.callers[i] for i in source.distinct))
    return " from ".join([near_text(frame.file, frame.line) for frame in frames])


def relative_path(file: str) -> str:
    """Return a path relative to the working folder, if it lies there."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def near_text(file: str, line: int) -> str:
    """Format a line with its path relative to the working folder, or the end of a long path."""
    if file.startswith(CELL):
        return f"{file}, line {line}"
    path = Path(relative_path(file))
    if len(path.parts) > 2 and (path.is_absolute() or len(str(path)) > _LONGEST_FILE):
        path = Path(*path.parts[-2:])
    return f"{path}:{line}"


def operation_text(op_name: str) -> str:
    """Return the operation at the end of its JAX name.

    Example:
        >>> operation_text("step/transpose(jvp())/while/body/bd,df->bf/dot_general")
        'bd,df->bf, backward'
        >>> operation_text("step/jvp()/(reduce_sum:dot_general:dot_general)")
        'reduce_sum and 2 more'
        >>> operation_text("step/transpose(jvp())/checkpoint/rematted_computation/sin")
        'sin, rematerialized'
    """
    backward = ", backward" if "transpose(jvp" in op_name else ""
    backward = ", rematerialized" if is_rematerialized(op_name) else backward
    start = _group(op_name)
    if start is None:
        return _last(op_name) + backward
    first, *others = op_name[start + 1 : -1].split(":")
    return f"{_last(first)} and {len(others)} more{backward}"


_TRANSFORMS = re.compile(r"^(?:(?:jvp|transpose|vmap|jit)\()*|\)*$")
_STRUCTURE = (
    *("body", "checkpoint", "closed_call", "cond", "eval_jaxpr"),
    *("rematted_computation", "while"),
)


def short_name(op_name: str) -> str:
    """Return the name scopes and the operation of a name, without the transformations.

    Example:
        >>> short_name("jit(step)/transpose(jvp(attention))/while/body/checkpoint/tanh")
        'attention/tanh'
    """
    parts = op_name.partition(";")[0].split("/")[1:]
    kept = (_TRANSFORMS.sub("", part) for part in parts if part not in _STRUCTURE)
    return "/".join(filter(None, kept))


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


def split_steps(path: str) -> list[str]:
    """Return the steps of a path: `state`, `['layers']`, `[0]`, `.mu`."""
    return re.findall(r"^[^\[.]+|\[[^\]]*\]|\.\w+", path)


def short_path(path: str, most: int) -> str:
    """Shorten a path to a maximum length if possible, by omitting keys in the middle.

    Example:
        >>> short_path("state['optimizer'][1][0].mu['layers']['mlp']['down']", 32)
        "state…['layers']['mlp']['down']"
    """
    if len(path) <= most:
        return path
    first, *steps = split_steps(path) or [path]
    kept = ""
    for step in reversed(steps):
        if len(first) + 1 + len(step) + len(kept) > most:
            break
        kept = step + kept
    return f"{first}…{kept}" if kept else path
