"""Programs of JAX users without xlashard, one step of each with its arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class UserProgram:
    """Function as its author jits it, with the arguments of a call.

    Attributes:
        function: The jitted function.
        args: Arguments of a call.
        fun: The Python function, where `jax.jit` with the options makes the function.
        options: Options of `jax.jit`.
    """

    function: Any
    args: tuple[Any, ...]
    fun: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


PROGRAMS: dict[str, Callable[[], UserProgram]] = {}
"""Makers of the programs by name."""


def program(make: Callable[[], Any]) -> Callable[[], Any]:
    """Register a maker that returns `(function, *args)`, or `(jit, fun, options, *args)`."""

    def made() -> UserProgram:
        first, *rest = make()
        if first is not jit:
            return UserProgram(first, tuple(rest))
        fun, options, *args = rest
        return UserProgram(first(fun, **options), tuple(args), fun, options)

    PROGRAMS[make.__name__] = made
    return make


def jit(fun: Callable[..., Any], **options: Any) -> Any:
    """Return `jax.jit` of a function."""
    import jax

    return jax.jit(fun, **options)
