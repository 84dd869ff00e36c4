"""Where NaN or infinity in a result comes from, once it is forbidden and found."""

from typing import Any

import jax

from xlashard._jax.runtime.execute import NonFinite, debug_flag, unchecked
from xlashard._jax.trace.jaxprs import has_effects
from xlashard._jax.trace.nan_origin import NanOrigin, find_nan_origin
from xlashard.errors import NonFiniteError
from xlashard.lazily import dataclass
from xlashard.pjit.arguments import bare


@dataclass(frozen=True)
class Run:
    """A run that gave something forbidden.

    Attributes:
        body: The jaxpr of its arguments; None where nobody has it any more.
        values: Its arguments.
        paths: Each as a person would write it.
    """

    body: Any
    values: tuple[Any, ...]
    paths: tuple[str, ...]


def explained(error: NonFiniteError, name: str, run: Run) -> NonFiniteError:
    """The error with the function's name, and with the operation where it can be found.

    Args:
        error: What the run raised.
        name: The function.
        run: The run; none of its arguments was given away.
    """
    kind = error.kind
    flag = debug_flag(kind)
    return NonFiniteError(
        f"{error.result} of {name} holds {kind}, which {flag} forbids: {_origin(run)}; "
        f"`with jax.{flag.removeprefix('jax_')}(False):` lets it pass",
        result=error.result,
        kind=kind,
    )


def _origin(run: Run) -> str:
    """Where it comes from, in words."""
    forbidden = NonFinite()
    args = [bare(value) for value in run.values]
    for arg, path in zip(args, run.paths, strict=True):
        kind = forbidden.kind_in(arg)
        if kind is not None:
            return f"{path} holds {kind} already"
    if run.body is None or has_effects(run.body) or not _all_here(args):
        return (
            "call the function inside `with jax.disable_jit():` to stop at the operation that "
            "makes it"
        )
    try:
        with unchecked():
            found = find_nan_origin(run.body, args, lambda x: forbidden.kind_in(bare(x)))
    except Exception as error:  # whatever is wrong with running it so: the first error counts
        return f"which operation makes it is not known, for run one by one they fail: {error}"
    return _described(found)


def _all_here(args: list[Any]) -> bool:
    """Whether this process can run an operation without the others."""
    return all(not isinstance(arg, jax.Array) or arg.is_fully_addressable for arg in args)


def _described(found: NanOrigin | None) -> str:
    if found is None:
        return (
            "run one by one its operations make none, so it comes of how XLA puts them together, "
            "or of a constant"
        )
    source = f" at {found.source}" if found.source else ""
    rounds = "".join(f", in round {count} of a {loop}" for loop, count in found.rounds)
    return f"`{found.primitive}` makes {found.kind}{source}{rounds}"
