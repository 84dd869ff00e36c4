"""Runs a program and records what it prints and computes: `python recorded_run.py RECORD PROGRAM`.

Run as a file, it loads nothing of xlashard, so that a migrated program meets plain JAX. The record
is JSON: lines of output with the lines of the program that printed them, and the variables of its
functions and modules when those return.
"""

import contextlib
import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

# Of each function: enough to find a difference, and little beside a run of thousands of steps.
_RECORDED_RETURNS = 20
_LEAVES = 300
_ELEMENTS = 2**20
_SAMPLES = 64
_TOOL = 4
"""Tool id of `sys.monitoring`; the recorder of removed names takes 3."""


class RecordedOutput:
    """Standard output that notes which line of the program printed.

    Args:
        stream: The stream behind it.
        root: The folder of the program.
    """

    def __init__(self, stream: TextIO, root: str) -> None:
        self._stream = stream
        self._root = root
        self.writes: list[tuple[str, str]] = []

    def write(self, text: str) -> int:
        """Write a text."""
        self.writes.append((text, _place(sys._getframe(1), self._root)))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def lines(self) -> list[tuple[str, str]]:
        """Return the lines, each with the place of its last write."""
        lines = []
        pending = ""
        for text, place in self.writes:
            *whole, rest = (pending + text).split("\n")
            lines += [(line, place) for line in whole]
            pending = rest
        return [*lines, *([(pending, self.writes[-1][1])] if pending else [])]


class Variables:
    """Variables of the program's functions and modules when those return.

    Args:
        root: The folder of the program.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._returns: Counter[CodeType] = Counter()
        self.values: dict[str, Any] = {}
        self.files: set[str] = set()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record while the block runs."""
        monitoring = sys.monitoring
        monitoring.use_tool_id(_TOOL, "recorded_run")
        returns = monitoring.events.PY_RETURN
        monitoring.register_callback(_TOOL, returns, self._returned)
        monitoring.set_events(_TOOL, returns)
        try:
            yield
        finally:
            monitoring.set_events(_TOOL, monitoring.events.NO_EVENTS)
            monitoring.register_callback(_TOOL, returns, None)
            monitoring.free_tool_id(_TOOL)

    def _returned(self, code: CodeType, offset: int, value: Any) -> Any:
        file = _own_file(code.co_filename, self._root)
        is_named = not code.co_name.startswith("<") or code.co_name == "<module>"
        if not file or not is_named or self._returns[code] >= _RECORDED_RETURNS:
            return sys.monitoring.DISABLE
        number = self._returns[code]
        self._returns[code] += 1
        self.files.add(file)
        variables = dict(sys._getframe(1).f_locals)
        if code.co_name != "<module>":
            variables["return"] = value
        for name, each in variables.items():
            if name.startswith("__"):
                continue
            for path, leaf in _leaves(each):
                # The line comes last: it differs in the migrated program.
                key = f"{file} {code.co_qualname} {number} {name}{path}"
                self.values[key] = [leaf, code.co_firstlineno]
        return None


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers, texts and arrays of a tree, with their paths."""
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "tree_util"):
        return
    try:
        leaves = jax.tree_util.tree_flatten_with_path(value)[0][:_LEAVES]
        paths = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    except Exception:  # A node of the program's own, whose flattening fails.
        return
    for path, leaf in paths:
        kind = type(leaf)
        if kind in (bool, int, float, str):
            yield path, leaf
        elif issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer):
            with contextlib.suppress(Exception):  # Deleted, or on another process's devices.
                yield path, _digest(leaf)
        elif kind.__module__ == "numpy":
            with contextlib.suppress(Exception):
                yield path, _digest(leaf)


def _digest(array: Any) -> Any:
    """Return the shape, mean and some elements of an array."""
    import numpy as np

    if array.size > _ELEMENTS:
        return ["array", str(array.dtype), list(array.shape)]
    if not str(array.dtype).startswith(("bool", "int", "uint", "float", "bfloat")):
        return ["array", str(array.dtype), list(array.shape)]
    flat = np.asarray(array).astype(np.float64).ravel()
    some = flat[:: max(1, flat.size // _SAMPLES)][:_SAMPLES]
    means = [float(flat.mean()), float(np.abs(flat).mean())] if flat.size else []
    return ["array", str(array.dtype), list(array.shape), *means, *map(float, some)]


@lru_cache(maxsize=4096)
def _own_file(name: str, root: str) -> str:
    """Return a file of the program relative to its folder; empty for another file."""
    path = os.path.realpath(name)
    is_own = path.startswith(root) and os.path.isfile(path)
    return os.path.relpath(path, root) if is_own else ""


def _place(frame: FrameType | None, root: str) -> str:
    """Return the innermost line of the program, as `train.py:3`."""
    while frame is not None:
        file = _own_file(frame.f_code.co_filename, root)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def main(words: list[str]) -> None:
    """Run the program, in the current folder, and write the record.

    Args:
        words: The file of the record, and a script, or `-m` and a module, with its arguments.
    """
    record, *rest = words
    root = os.path.realpath(os.getcwd()) + os.sep
    is_module = rest[0] == "-m"
    target, *arguments = rest[1:] if is_module else rest
    sys.argv = [target, *arguments]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(target))
    output = sys.stdout = RecordedOutput(sys.stdout, root)  # type: ignore[assignment]
    variables = Variables(root)
    try:
        with variables.recorded():
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                # As `python` does: an absolute path in tracebacks, whatever the folder then.
                runpy.run_path(os.path.abspath(target), run_name="__main__")
    finally:
        sys.stdout = output._stream
        text = {"lines": output.lines(), "values": variables.values, "files": [*variables.files]}
        Path(record).write_text(json.dumps(text))


if __name__ == "__main__":
    main(sys.argv[1:])
