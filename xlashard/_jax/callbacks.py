"""The Python functions that a program calls while it runs."""

import functools
from typing import Any

from xlashard._jax.tracing import Jaxpr, equations


def callback_names(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The names of the Python functions that a jaxpr's operations call while it runs."""
    names = []
    for eqn in equations(jaxpr):
        if "callback" in eqn.params:
            names.append(_callback_name(eqn.params["callback"]) or eqn.primitive.name)
        elif eqn.primitive.name == "debug_print":
            names.append(f"jax.debug.print({eqn.params['fmt']!r})")
    return tuple(dict.fromkeys(names))


def _callback_name(callback: Any) -> str | None:
    """The name of the user's function inside of what JAX made of it."""
    callback = getattr(callback, "callback_func", callback)
    while isinstance(callback, functools.partial):
        callback = callback.func
    # A method of a builtin class has no module.
    if not (getattr(callback, "__module__", None) or "").startswith("jax."):
        return getattr(callback, "__qualname__", type(callback).__name__)
    cells = (cell.cell_contents for cell in getattr(callback, "__closure__", None) or ())
    names = (_callback_name(inner) for inner in cells if callable(inner))
    return next((name for name in names if name is not None), None)
