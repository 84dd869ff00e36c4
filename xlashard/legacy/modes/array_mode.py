"""The three worlds of the era: what kind of arrays its functions take and give."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax

from xlashard._jax.legacy_flags import ThreadValue
from xlashard.array import Array
from xlashard.errors import ArgumentError
from xlashard.legacy.modes import config_flags as flags


@dataclass(frozen=True)
class ArrayMode:
    """How values of parallel functions are meant.

    Attributes:
        jax_array: All are Arrays and global; the other field says nothing then.
        output_gda: Without `jax_array`: results are `GlobalDeviceArray`s, and not this process's
            part of them (`DeviceArray`, `ShardedDeviceArray`).
    """

    jax_array: bool = True
    output_gda: bool = False

    @property
    def returns_gda(self) -> bool:
        """Whether results are GlobalDeviceArrays."""
        return self.output_gda and not self.jax_array

    @property
    def returns_host_local(self) -> bool:
        """Whether results are this process's part of what was computed."""
        return not self.output_gda and not self.jax_array


@dataclass(frozen=True)
class CallFlags:
    """All that the flags say of a call.

    Attributes:
        world: The world that it is in.
        checks_meshes: Whether the mesh in force is compared with those of its arguments.
        logs_runs: Whether the run is logged.
    """

    mode: ArrayMode
    checks_meshes: bool = False
    logs_runs: bool = False

    @property
    def bypasses_fast_path(self) -> bool:
        """Whether calls that were seen before must come to Python again."""
        return self.checks_meshes or self.logs_runs


_WORLDS = {(a, g): ArrayMode(a, g) for a in (False, True) for g in (False, True)}


def current_array_mode() -> ArrayMode:
    """The world that the flags say for this thread. Ask once, where a call comes in.

    Example:
        >>> from xlashard import legacy
        >>> with legacy.jax_array(False), legacy.parallel_functions_output_gda(True):
        ...     print(current_array_mode().returns_gda)
        True
    """
    key = flags.jax_array.value, flags.parallel_functions_output_gda.value
    return _WORLDS[key]


def as_jax_arrays(tree: Any) -> Any:
    """Return a tree whose arrays are JAX's own if `jax_array` is on.

    In the era all arrays were of one class then, those of `jax.numpy` and of `pjit` alike.

    Args:
        tree: A pytree; its Arrays are replaced by JAX's arrays over the same buffers.
    """
    if not current_array_mode().jax_array:
        return tree
    return jax.tree.map(lambda x: x.to_jax() if type(x) is Array else x, tree)


def current_call_flags() -> CallFlags:
    """All that the flags say in this thread. Ask once, where a call comes in.

    With `jax_array` the other flag of the world says nothing, and is left out.
    """
    mode = current_array_mode()
    mode = _WORLDS[True, False] if mode.jax_array else mode
    return CallFlags(mode, flags.enable_checks.value, flags.distributed_debug.value)


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
