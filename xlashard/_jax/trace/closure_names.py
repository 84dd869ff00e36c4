"""Find the variable by which a function reaches an array that it closes over."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from xlashard._jax.trace.jaxprs import is_host_array

# Longest chain of attributes and items that is followed: self.layer.weight has three.
_DEPTH = 3
_SEARCHED = 10_000


def find_variable_name(
    function: Any, array: Any, unwrap: Callable[[Any], Any] = lambda value: value
) -> str | None:
    """Return a function's expression for an array: `w`, `self.params['w']`, `helper: w`.

    Args:
        function: A Python function, a method, a partial, or a wrapper of one.
        array: An array of the host or of devices.
        unwrap: Returns the object by whose identity arrays are compared.

    Returns:
        None if no closed-over variable, global variable or attribute leads to the array.
    """
    return _Search(array, unwrap).in_function(function, _DEPTH)


class _Search:
    """Search for one array.

    Args:
        array: The array.
        unwrap: As for `find_variable_name`.
    """

    def __init__(self, array: Any, unwrap: Callable[[Any], Any]) -> None:
        self._unwrap = unwrap
        # JAX wraps a closed-over array of the host in an object over the same memory.
        self._array = np.asarray(array) if is_host_array(array) else unwrap(array)
        self._seen: set[int] = set()

    def in_function(self, function: Any, depth: int) -> str | None:
        """Return the name of the first variable of a function that leads to the array."""
        for name, value in _variables(function):
            path = self._path(value, depth)
            if path is not None:
                # For a nested function, its own variable is the most precise.
                return path if isinstance(value, types.FunctionType) else name + path
        return None

    def _path(self, value: Any, depth: int) -> str | None:
        """Return the suffix that leads from a value to the array, or None."""
        array = self._array
        if self._unwrap(value) is array:
            return ""
        both_on_host = isinstance(value, np.ndarray) and isinstance(array, np.ndarray)
        if both_on_host and (value.shape, value.ctypes.data) == (array.shape, array.ctypes.data):
            return ""
        if depth == 0 or id(value) in self._seen or len(self._seen) > _SEARCHED:
            return None
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            inner = self.in_function(value, depth - 1)
            return None if inner is None else f"{function_name(value)}: {inner}"
        for key, leaf in _leaves(value):
            if leaf is not value and (path := self._path(leaf, depth - 1)) is not None:
                return key + path
        for key, attribute in _attributes(value):
            if (path := self._path(attribute, depth - 1)) is not None:
                return f".{key}{path}"
        return None


def function_name(function: Any) -> str:
    """Return the name of a function, or that of its class."""
    return getattr(function, "__name__", type(function).__name__)


def _leaves(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, jax.Array) or not isinstance(value, dict | list | tuple):
        return []
    flat, _ = jax.tree_util.tree_flatten_with_path(value)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, type | types.ModuleType | jax.Array):
        return []
    return list(getattr(value, "__dict__", {}).items())


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the free variables and globals in a function's code with their values."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {n} of the partial", x) for n, x in enumerate(function.args))
        yield from ((f"argument {name} of the partial", x) for name, x in function.keywords.items())
        yield from _variables(function.func)
        return
    if isinstance(function, types.MethodType):
        inner = function.__func__
        names = inner.__code__.co_varnames if isinstance(inner, types.FunctionType) else ()
        yield (names[0] if names else "self"), function.__self__
        yield from _variables(inner)
        return
    if not isinstance(function, types.FunctionType):
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield from _variables(wrapped)
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # unbound so far
            continue
    for name in dict.fromkeys(_names_in(code)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_in(const)
