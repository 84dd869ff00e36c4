"""What a type checker knows of a pjit-ed function: it takes what the function takes."""

from collections.abc import Callable
from typing import Any, Concatenate, Protocol, Self, overload

from xlashard.pjit.stages.traced import Lowered, Traced


class Jitted[**P, R](Protocol):
    """A function compiled by `pjit`: called like the one that was given, with the same result."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the program for these arguments, which is compiled at the first such call."""
        ...

    @overload
    def __get__(self, instance: None, owner: Any = None, /) -> Self: ...
    @overload
    def __get__[S, **Q, T](
        self: "Jitted[Concatenate[S, Q], T]", instance: S, owner: Any = None, /
    ) -> Callable[Q, T]: ...

    @property
    def __wrapped__(self) -> Callable[P, R]:
        """The function that was given."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The module for such arguments, or for shapes (`jax.ShapeDtypeStruct`) of them."""
        ...

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The jaxpr for such arguments or shapes."""
        ...

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result, as its tree of `jax.ShapeDtypeStruct`."""
        ...

    def clear_cache(self) -> None:
        """Lets go of every program that was compiled for the function."""
        ...
