"""Calls that a frame waits for, read from its source: into JAX, and of compiled functions.

Nothing is called and no frame is changed: another thread inspects one that may hang.
"""

import ast
import builtins
import inspect
import linecache
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import jax

from xlashard.core.processes.process_facts import RUNTIME

# Calls and assignments that a search follows from the value that is awaited.
_FOLLOWED = 8


def current_call(frame: FrameType) -> ast.Call | None:
    """Return the call expression that a frame is executing, parsed from its source."""
    code = frame.f_code
    positions = next(islice(code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None or None in positions:
        return None
    first, last, start, end = (number or 0 for number in positions)
    lines = [linecache.getline(code.co_filename, line) for line in range(first, last + 1)]
    if not all(lines):
        return None
    # Columns are byte offsets.
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    try:
        parsed = ast.parse(b"".join(encoded).decode().strip(), mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return None
    return parsed if isinstance(parsed, ast.Call) else None


def waits_for_device(frame: FrameType) -> bool:
    """Return whether a frame is executing a call into JAX or a call that reads a JAX array.

    Compiled functions, `x.block_until_ready()` and `float(x)` have no Python frame of their own.
    """
    call = current_call(frame)
    if call is None:
        return False
    function = _value(call.func, frame)
    if _of_runtime(function):
        return True
    owner = _value(call.func.value, frame) if isinstance(call.func, ast.Attribute) else None
    values = [owner, *(_value(argument, frame) for argument in call.args)]
    return any(isinstance(value, jax.Array) for value in values)


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """Resolve an expression to its value without calling anything."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if expression.id in names:
                return names[expression.id]
    if isinstance(expression, ast.Attribute):
        owner = _value(expression.value, frame)
        if isinstance(owner, ModuleType):
            return vars(owner).get(expression.attr)
        return inspect.getattr_static(owner, expression.attr, None)
    return None


def _of_runtime(function: Any) -> bool:
    # A compiled function reports the module of the function that it was made from.
    modules = {getattr(type(function), "__module__", "")}
    if not hasattr(type(function), "__wrapped__") and not isinstance(function, type):
        modules.add(getattr(function, "__module__", "") or "")
    return any(str(module).partition(".")[0] in RUNTIME for module in modules)


def awaited_program(frame: FrameType | None) -> str:
    """Return the compiled function whose result a frame awaits, with the line of its call.

    The value may have been assigned before: `loss = step(state)`, then `float(loss)`.

    Returns:
        Such as `step (train.py:12)`; empty if it is unknown.
    """
    call = None if frame is None else current_call(frame)
    if frame is None or call is None:
        return ""
    line = frame.f_lineno
    for _ in range(_FOLLOWED):
        function = _value(call.func, frame)
        if _is_program(function):
            name = getattr(function, "__name__", "") or ast.unparse(call.func)
            return f"{name} ({Path(frame.f_code.co_filename).name}:{line})"
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        makers = (_find_maker(operand, line, frame) for operand in (*owner, *call.args))
        maker = next((pair for pair in makers if pair is not None), None)
        if maker is None:
            return ""
        call, line = maker
    return ""


def _is_program(function: Any) -> bool:
    """Return True for a compiled function; functions of JAX's modules are plain ones."""
    root = str(getattr(type(function), "__module__", "")).partition(".")[0]
    return root in RUNTIME and callable(function) and not isinstance(function, jax.Array)


def _find_maker(operand: ast.expr, line: int, frame: FrameType) -> tuple[ast.Call, int] | None:
    """Return the call that made an operand, in the expression or in an assignment, and its line."""
    while isinstance(operand, ast.Attribute | ast.Subscript | ast.Starred):
        operand = operand.value
    if isinstance(operand, ast.Call):
        return operand, line
    if not isinstance(operand, ast.Name):
        return None
    calls = []
    for node in _list_scope(frame):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            value = node.value
            while isinstance(value, ast.Attribute | ast.Subscript):
                value = value.value
            is_target = any(isinstance(p, ast.Name) and p.id == operand.id for p in parts)
            if is_target and isinstance(value, ast.Call):
                calls.append((value, node.lineno))
    before = [pair for pair in calls if pair[1] < line]
    # In a loop the last iteration may have assigned it, below.
    return max(before or calls, key=lambda pair: pair[1], default=None)


_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda


def _list_scope(frame: FrameType) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a frame's function, without those of functions inside."""
    code = frame.f_code
    scope: ast.AST | None = _parse_file("".join(linecache.getlines(code.co_filename)))
    if scope is not None and code.co_name != "<module>":
        enclosing = (
            node
            for node in ast.walk(scope)
            if isinstance(node, _FUNCTIONS)
            and getattr(node, "name", "<lambda>") == code.co_name
            and node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)
        )
        scope = max(enclosing, key=lambda node: node.lineno, default=None)
    waiting = [] if scope is None else [*ast.iter_child_nodes(scope)]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _FUNCTIONS):
            waiting += ast.iter_child_nodes(node)


@lru_cache(maxsize=4)
def _parse_file(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None
