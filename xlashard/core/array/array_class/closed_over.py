"""Names of closed-over arrays in errors."""

from typing import Any

from xlashard._jax.runtime.tracebacks import callers
from xlashard._jax.trace.closure_names import find_variable_name, function_name
from xlashard.core.array.array_class.base import check_alive_as, handle_of, type_text
from xlashard.core.array.placement.read import holds_value
from xlashard.errors import NotAddressableError


def closure_variable_name(function: Any, array: Any) -> str | None:
    """Return a function's expression for an array, or for its buffer handle.

    Args:
        function: A Python function, a method, a partial, or a wrapper of one.
        array: The array.
    """
    return find_variable_name(function, array, handle_of)


def check_constant(handle: Any) -> None:
    """Check that a handle that a function of JAX closes over can become a constant.

    Raises:
        DeletedError: The handle is deleted.
        NotAddressableError: Its value is not wholly in this process.
    """
    check_alive_as(lambda: _closed_over(handle), handle)
    if not holds_value(handle):
        raise NotAddressableError(  # no-catalogue: needs several processes
            f"{_closed_over(handle)}, {type_text(handle)}, cannot become a constant of a program "
            "of JAX, as its value is not wholly in this process: pass it to the function as an "
            "argument"
        )


def _closed_over(handle: Any) -> str:
    names = _in_callers(handle)
    if names is None:
        return "an array that a traced function closes over"
    function, variable = names
    return f"{variable}, an array that {function} closes over"


def _in_callers(array: Any) -> tuple[str, str] | None:
    """Return the function compiled on this thread that closes over an array, and its variable."""
    for frame in callers():
        for value in list(frame.f_locals.values()):
            if not callable(value) or isinstance(value, type):
                continue
            module = getattr(value, "__module__", None) or ""
            # Functions of JAX and of this package are no user's.
            if module.split(".")[0] not in ("jax", "jaxlib", __name__.split(".")[0]):
                variable = closure_variable_name(value, array)
                if variable is not None:
                    return function_name(value), variable
    return None
