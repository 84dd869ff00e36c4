"""Array modes: the class of arrays that the functions of 2022 and 2023 take and return."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax

from xlashard._jax.legacy_api import ThreadValue
from xlashard.array import Array
from xlashard.errors import ArgumentError
from xlashard.legacy.modes import config_flags as flags


@dataclass(frozen=True)
class ArrayMode:
    """Array class of the arguments and results of parallel functions.

    Attributes:
        jax_array: True if all arrays are global `jax.Array`s; `output_gda` then has no effect.
        output_gda: With `jax_array` off, True if results are `GlobalDeviceArray`s, and False if
            they are host-local (`DeviceArray`, `ShardedDeviceArray`).
    """

    jax_array: bool = True
    output_gda: bool = False

    @property
    def returns_gda(self) -> bool:
        """Return True if results are GlobalDeviceArrays."""
        return self.output_gda and not self.jax_array

    @property
    def returns_host_local(self) -> bool:
        """Return True if results are host-local: this process's part of each array."""
        return not self.output_gda and not self.jax_array


@dataclass(frozen=True)
class CallFlags:
    """Values of the flags that affect one call.

    Attributes:
        mode: The array mode.
        checks_meshes: True if the mesh in force is compared with the meshes of the arguments.
        logs_runs: True if each run is logged.
    """

    mode: ArrayMode
    checks_meshes: bool = False
    logs_runs: bool = False

    @property
    def bypasses_fast_path(self) -> bool:
        """Return True if repeat calls must enter Python instead of the C++ dispatcher."""
        return self.checks_meshes or self.logs_runs


_WORLDS = {(a, g): ArrayMode(a, g) for a in (False, True) for g in (False, True)}


def current_array_mode() -> ArrayMode:
    """Return the array mode that the flags select in this thread.

    Read it once per call, at the entry point.

    Example:
        >>> from xlashard import legacy
        >>> with legacy.jax_array(False), legacy.parallel_functions_output_gda(True):
        ...     print(current_array_mode().returns_gda)
        True
    """
    key = flags.jax_array.value, flags.parallel_functions_output_gda.value
    return _WORLDS[key]


def as_jax_arrays(tree: Any) -> Any:
    """Return a tree whose Arrays are converted to JAX's own class if `jax_array` is on.

    With `jax_array` on, `jax.numpy` and `pjit` returned arrays of one class.

    Args:
        tree: A pytree; its Arrays are replaced by JAX's arrays over the same buffers.
    """
    if not current_array_mode().jax_array:
        return tree
    return jax.tree.map(lambda x: x.to_jax() if type(x) is Array else x, tree)


def current_call_flags() -> CallFlags:
    """Return the call flags of this thread.

    Read them once per call, at the entry point. With `jax_array` on, `output_gda` has no effect
    and is False here.
    """
    mode = current_array_mode()
    mode = _WORLDS[True, False] if mode.jax_array else mode
    return CallFlags(mode, flags.enable_checks.value, flags.distributed_debug.value)


class PositionalSemantics(Enum):
    """Meaning of the shape of an argument or result."""

    LOCAL = 0
    """The shape is host-local: the part of the array that this process holds."""
    GLOBAL = 1
    """The shape is that of the global array."""


class _PositionalValue:
    """Holder of the thread-local attribute `val`."""

    def __init__(self) -> None:
        # Repeat calls bypass Python, so the value must be part of the dispatcher's cache key.
        self._val = ThreadValue("xlashard_positional_semantics", PositionalSemantics.LOCAL)

    @property
    def val(self) -> PositionalSemantics:
        """The semantics in force in this thread."""
        return self._val.get()

    @val.setter
    def val(self, value: PositionalSemantics) -> None:
        if not isinstance(value, PositionalSemantics):
            raise ArgumentError(
                f"_positional_semantics.val={value!r} is invalid: expected LOCAL or GLOBAL; write "
                "maps._PositionalSemantics.GLOBAL"
            )
        self._val.set(value)


POSITIONAL = _PositionalValue()
"""Value of `maps._positional_semantics`, whose `val` programs assign.

It has an effect only while `jax_array` is off.
"""


@contextmanager
def positional_semantics(value: PositionalSemantics) -> Iterator[None]:
    """Set the positional semantics of this thread for the duration of a block.

    Args:
        value: `LOCAL` or `GLOBAL`.

    Raises:
        ArgumentError: `value` is not a `PositionalSemantics`.

    Example:
        >>> with positional_semantics(PositionalSemantics.GLOBAL):
        ...     POSITIONAL.val.name
        'GLOBAL'
    """
    before = POSITIONAL.val
    POSITIONAL.val = value
    try:
        yield
    finally:
        POSITIONAL.val = before
