"""Whether a pjit's arguments and results are this process's part of an array, or all of it.

Programs of the era assign to `maps._positional_semantics.val`; it is a value of each thread,
`LOCAL` until one is assigned. It counts where `jax_array` is off: see `legacy.pjit`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from xlashard._jax.legacy_flags import ThreadValue
from xlashard.errors import ArgumentError


class PositionalSemantics(Enum):
    """How the shape of an argument or result is meant."""

    LOCAL = 0
    """It is the part of this process; the array has that of every process."""
    GLOBAL = 1
    """It is the whole array."""


class _PositionalValue:
    """`val`, which each thread has its own of."""

    def __init__(self) -> None:
        # Repeat calls don't come to Python: their dispatcher must know of it.
        self._val = ThreadValue("xlashard_positional_semantics", PositionalSemantics.LOCAL)

    @property
    def val(self) -> PositionalSemantics:
        """The semantics in force in this thread."""
        return self._val.get()

    @val.setter
    def val(self, value: PositionalSemantics) -> None:
        if not isinstance(value, PositionalSemantics):
            raise ArgumentError(
                f"_positional_semantics.val must be LOCAL or GLOBAL, not {value!r}: write "
                "maps._PositionalSemantics.GLOBAL"
            )
        self._val.set(value)


POSITIONAL = _PositionalValue()
"""The era's `maps._positional_semantics`: assign `POSITIONAL.val`."""


def semantics_in_force() -> PositionalSemantics:
    """What this thread's programs mean by the shape of an argument or result."""
    return POSITIONAL.val


@contextmanager
def positional_semantics(value: PositionalSemantics) -> Iterator[None]:
    """Another meaning for a block of code, in this thread.

    Args:
        value: The meaning.

    Raises:
        ArgumentError: If it is none.

    Example:
        >>> with positional_semantics(PositionalSemantics.GLOBAL):
        ...     semantics_in_force().name
        'GLOBAL'
    """
    before = POSITIONAL.val
    POSITIONAL.val = value
    try:
        yield
    finally:
        POSITIONAL.val = before
