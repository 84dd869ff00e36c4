"""Functions that accept the arguments which JAX's functions accepted before."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xlashard.errors import RefusedError
from xlashard.legacy.entries.keywords import SIGNATURES, keyword_entries
from xlashard.legacy.module_shims import resolve_source
from xlashard.support.tracebacks import short_tracebacks


class EarlierFunction:
    """Function of JAX that accepts its earlier arguments as well.

    Attributes and methods of the function, such as `lower` and `reduce`, are those of JAX's.

    Args:
        name: The full name of the function.
        function: Today's function.

    Example:
        >>> import jax.numpy as jnp
        >>> clip = EarlierFunction("jax.numpy.clip", jnp.clip)
        >>> clip(jnp.arange(4), a_max=2).tolist()
        [0, 1, 2, 2]
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._signature = SIGNATURES[name]
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with today's arguments."""
        with short_tracebacks:
            if self._signature.is_used(len(args), kwargs):
                args, kwargs = convert_arguments(self._name, args, kwargs)
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce__(self) -> tuple[object, ...]:
        module, _, name = self._name.rpartition(".")
        return resolve_source, (f"{module}:{name}",)

    def __repr__(self) -> str:
        return repr(self._function)


def convert_arguments(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as today's function takes them.

    Args:
        name: The full name of the function.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Raises:
        RefusedError: A keyword was removed from JAX, and its value has no equivalent.

    Example:
        >>> convert_arguments("jax.numpy.sort", ([2, 1], 0, "stable"), {})
        (([2, 1], 0), {})
    """
    signature = SIGNATURES[name]
    named = signature.list_positional(len(args))
    first, last = signature.after, signature.after + len(named)
    named_arguments = {**dict(zip(named, args[first:last], strict=True)), **kwargs}
    args = args[:first] + args[last:] if named else args
    converted: dict[str, Any] = {}
    for keyword, value in named_arguments.items():
        removed = signature.keywords.get(keyword)
        rewritten = {keyword: value} if removed is None else removed.rewrite(value)
        if rewritten is None:
            entry = keyword_entries()[name][keyword]
            raise RefusedError(
                f"{entry.name} was removed from JAX, and {keyword}={value!r} has no equivalent: "
                f"{entry.note}. Write: {entry.today}",
                name=entry.name,
            )
        converted.update(rewritten)
    # Keywords of parameters that are positional today.
    while str(len(args)) in converted:
        args = (*args, converted.pop(str(len(args))))
    return args, converted


def make_method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method or constructor that accepts its earlier arguments.

    Args:
        name: The full name of the method.
        function: Today's function, with the instance or class as its first argument.
    """
    signature = SIGNATURES[name]

    @functools.wraps(function)
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        with short_tracebacks:
            if signature.is_used(len(args), kwargs):
                args, kwargs = convert_arguments(name, args, kwargs)
            return function(owner, *args, **kwargs)

    return call
