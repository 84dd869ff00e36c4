"""Which call a thread is in that is no function of Python, and so has no frame of its own."""

import ast
import builtins
import inspect
import linecache
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

import jax

_RUNTIME = ("jax", "jaxlib", "xlashard")


def current_call(frame: FrameType) -> ast.Call | None:
    """The call expression that a frame is in, from its source."""
    code = frame.f_code
    positions = next(islice(code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None or None in positions:
        return None
    first, last, start, end = (number or 0 for number in positions)
    lines = [linecache.getline(code.co_filename, line) for line in range(first, last + 1)]
    if not all(lines):
        return None
    # Columns are counted in bytes.
    encoded = [line.encode() for line in lines]
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][start:]
    try:
        parsed = ast.parse(b"".join(encoded).decode().strip(), mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return None
    return parsed if isinstance(parsed, ast.Call) else None


def waits_for_device(frame: FrameType) -> bool:
    """Whether a frame is in a call of JAX's, or in one that reads an array of it.

    A compiled function, `x.block_until_ready()` and `float(x)` are such; they have no frames.
    """
    call = current_call(frame)
    if call is None:
        return False
    function = _value(call.func, frame)
    if _of_runtime(function):
        return True
    owner = _value(call.func.value, frame) if isinstance(call.func, ast.Attribute) else None
    given = (_value(argument, frame) for argument in call.args)
    return isinstance(owner, jax.Array) or any(isinstance(one, jax.Array) for one in given)


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """What a name stands for; nothing is called to find out."""
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
    # A compiled function says of itself that it is of the module of what it was made from.
    modules = {getattr(type(function), "__module__", "")}
    if not hasattr(type(function), "__wrapped__") and not isinstance(function, type):
        modules.add(getattr(function, "__module__", "") or "")
    return any(str(module).partition(".")[0] in _RUNTIME for module in modules)
