"""Names that Python 3.11 to 3.13 removed, and that have no equal there today."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class ArgSpec(NamedTuple):
    """Parameters of a function.

    Attributes:
        args: The names of the positional ones.
        varargs: The name of `*args`, if any.
        keywords: The name of `**kwargs`, if any.
        defaults: The defaults of the last positional ones, if any.
    """

    args: list[str]
    varargs: str | None
    keywords: str | None
    defaults: tuple[Any, ...] | None


def getargspec(func: Callable[..., Any]) -> ArgSpec:
    """Return the parameters of a function without keyword-only ones and annotations.

    Args:
        func: The function.

    Raises:
        ValueError: The function has keyword-only parameters or annotations.

    Example:
        >>> getargspec(lambda x, y=1: x).args
        ['x', 'y']
    """
    full = inspect.getfullargspec(func)
    if full.kwonlyargs or full.annotations:
        raise ValueError(  # no-catalogue: the class that Python raised
            "getargspec: the function has keyword-only parameters or annotations; write "
            "inspect.getfullargspec(func)"
        )
    return ArgSpec(*full[:4])
