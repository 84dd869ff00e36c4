"""Find the operation that made a forbidden NaN or infinity."""

from collections.abc import Sequence
from typing import Any

import jax

from xlashard._jax.runtime.execute import NonFinite, debug_flag, unchecked
from xlashard._jax.trace.origins import find_nan_origin
from xlashard.errors import NonFiniteError
from xlashard.pjit.arguments import bare


def explained(
    error: NonFiniteError, name: str, body: Any, values: Sequence[Any], paths: Sequence[str]
) -> NonFiniteError:
    """Return the error with the function's name, and with the operation if it can be found.

    Args:
        error: The error of the run.
        name: The function.
        body: The jaxpr of its arguments; None if it was not kept.
        values: Its arguments, which are not donated.
        paths: Their paths.
    """
    kind = error.kind
    flag, origin = debug_flag(kind), _origin(body, values, paths)
    return NonFiniteError(
        f"{error.result} of {name} holds {kind}, which {flag} forbids: {origin}; "
        f"`with jax.{flag.removeprefix('jax_')}(False):` lets it pass",
        result=error.result,
        kind=kind,
    )


def _origin(body: Any, values: Sequence[Any], paths: Sequence[str]) -> str:
    """Describe the origin of the value."""
    forbidden = NonFinite()
    args = [bare(value) for value in values]
    for arg, path in zip(args, paths, strict=True):
        kind = forbidden.kind_in(arg)
        if kind is not None:
            return f"{path} holds {kind} already"
    arrays = [arg for arg in args if isinstance(arg, jax.Array)]
    is_local = all(array.is_fully_addressable for array in arrays)
    if body is None or body.effects or not is_local:
        return (
            "call the function inside `with jax.disable_jit():` to stop at the operation that "
            "makes it"
        )
    try:
        with unchecked():
            origin = find_nan_origin(body, args, lambda x: forbidden.kind_in(bare(x)))
    except Exception as error:  # an error of this second run; the first one counts
        return (
            f"the operation that makes it is unknown, since operations run one by one fail: {error}"
        )
    if origin is None:
        return (
            "its operations make no such value when run one by one, so that it comes from XLA's "
            "fusion of them, or from a constant"
        )
    source = f" at {origin.source}" if origin.source else ""
    rounds = "".join(f", in round {count} of a {loop}" for loop, count in origin.rounds)
    return f"`{origin.primitive}` makes {origin.kind}{source}{rounds}"
