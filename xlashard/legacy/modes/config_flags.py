"""Flags of 2022 and 2023, and the array mode and the positional semantics of a call.

Flags are set by environment, `config.update`, command line or context manager.

| flag | default | meaning |
|---|---|---|
| `jax_array` | True | all arrays are `jax.Array`s, and all values of `pjit` are global |
| `jax_parallel_functions_output_gda` | False | without `jax_array`: results are global arrays |
| `jax_pmap_no_rank_reduction` | False | buffers of results of `pmap` keep the mapped dimension |
| `jax_spmd_mode` | `allow_jit` | eager operations on arrays that span processes are refused |
| `jax_enable_checks` | JAX's own | the mesh in force is compared with that of each global array |
| `jax_distributed_debug` | JAX's own | each run of a program over several devices is logged |
| those of `IGNORED` | JAX's of 2022 | none: accepted, as programs of 2022 read and set them |

The environment variable of a flag is its name in capitals. Calls read the flags once, at their
entry point, through `current_array_mode()`.
"""

import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import jax

from xlashard._jax import legacy_api
from xlashard._jax.runtime.global_state import dispatch_flag, follow_settings
from xlashard.core.array import Array
from xlashard.core.array.array_class.base import type_text
from xlashard.errors import ArgumentError, ConfigError, NotAddressableError
from xlashard.legacy.entries.toplevel import IGNORED
from xlashard.support.tracebacks import short_tracebacks

_WORDS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


def _truth(name: str, value: Any) -> bool:
    word = str(int(value)) if isinstance(value, bool) else str(value).strip().lower()
    if word not in _WORDS:
        raise ConfigError(
            f"{name}={value!r} is invalid: expected True or False; write "
            f"jax.config.update({name!r}, True), or export {name.upper()}=1"
        )
    return _WORDS[word]


_SPMD_MODES = ("allow_jit", "allow_pjit", "allow_all")


def _spmd_mode(value: Any) -> str:
    if value not in _SPMD_MODES:
        raise ConfigError(
            f"jax_spmd_mode={value!r} is invalid: expected one of "
            f"{', '.join(map(repr, _SPMD_MODES))}; write jax.config.update('jax_spmd_mode', "
            "'allow_all')"
        )
    return value


def _flag(name: str, default: bool, about: str) -> legacy_api.Flag:
    text = os.environ.get(name.upper(), "").strip()
    return legacy_api.new_flag(
        name, _truth(name, text) if text else default, about, partial(_truth, name)
    )


jax_array = _flag("jax_array", True, "All arrays are jax.Arrays; values of pjit are global.")
parallel_functions_output_gda = _flag(
    "jax_parallel_functions_output_gda",
    False,
    "With jax_array off, pjit returns GlobalDeviceArrays.",
)
pmap_no_rank_reduction = _flag(
    "jax_pmap_no_rank_reduction",
    False,
    "Buffers of arrays with a PmapSharding keep the mapped dimension.",
)
spmd_mode = legacy_api.new_flag(
    "jax_spmd_mode",
    _spmd_mode(os.environ.get("JAX_SPMD_MODE", "").strip() or _SPMD_MODES[0]),
    "Computations that may take arrays that span processes: all, jax.jit and pjit, or pjit.",
    _spmd_mode,
)
_IGNORED = tuple(
    _flag(name, default, "Has no effect: accepted as programs of 2022 set it.")
    for default, names in IGNORED.items()
    for name in names
)

enable_checks = legacy_api.own_flag("jax_enable_checks")
distributed_debug = legacy_api.own_flag("jax_distributed_debug")

OWN = (jax_array, parallel_functions_output_gda, pmap_no_rank_reduction, spmd_mode, *_IGNORED)
"""The flags that today's JAX lacks."""

# With one of these on, repeat calls enter Python too.
follow_settings(dispatch_flag("xlashard_legacy_is_watched"), (enable_checks, distributed_debug))


def show_flags() -> None:
    """Add the flags to `jax.config`, as attributes, for `update` and for absl."""
    legacy_api.show(OWN)


def hide_flags() -> None:
    """Remove the flags from `jax.config`; their values stay."""
    legacy_api.hide(OWN)


class Config:
    """`jax.config` with the flags of 2022 and 2023, usable without installing anything.

    Example:
        >>> from xlashard.legacy import config
        >>> config.update("jax_array", True)
        >>> config.jax_array
        True
    """

    def update(self, name: str, value: Any) -> None:
        """Set a flag for all threads.

        Args:
            name: The flag's name, such as `jax_array`.
            value: True or False; 0, 1 and the texts accepted in environment variables also work.

        Raises:
            ConfigError: Unknown flag, or invalid value.
        """
        with short_tracebacks:
            flag = _OWN_BY_NAME.get(name)
            if flag is not None:
                legacy_api.set_everywhere(flag, value)
                return
            _check_known(name)
            jax.config.update(name, value)

    def read(self, name: str) -> Any:
        """Return the value of a flag in this thread.

        Raises:
            ConfigError: Unknown flag.
        """
        with short_tracebacks:
            _check_known(name)
            return getattr(self, name)

    def config_with_absl(self) -> None:
        """Define the flags for `absl.app.run`, so that `--jax_array=0` works."""
        legacy_api.define_for_absl(OWN)

    def parse_flags_with_absl(self) -> None:
        """Parse the flags from the command line, for programs without `absl.app.run`."""
        legacy_api.parse_with_absl(OWN, sys.argv)

    def __getattr__(self, name: str) -> Any:
        flag = _OWN_BY_NAME.get(name)
        return getattr(jax.config, name) if flag is None else flag.value

    def __setattr__(self, name: str, value: Any) -> None:
        # As programs set `FLAGS.experimental_cpp_pjit`.
        self.update(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(jax.config), *_OWN_BY_NAME})


_OWN_BY_NAME = {flag.name: flag for flag in OWN}


def __getattr__(name: str) -> legacy_api.Flag:
    """Return a flag without an effect by its name, as its entry finds it."""
    if name in _OWN_BY_NAME:
        return _OWN_BY_NAME[name]
    # no-catalogue: Python's own message for a missing attribute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


config = Config()
"""Flags of JAX, and of 2022 and 2023."""


def _check_known(name: str) -> None:
    known = [*_OWN_BY_NAME, *jax.config.values]
    if name in known:
        return
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    advice = f"did you mean {close[0]!r}?" if close else "dir(legacy.config) lists them"
    raise ConfigError(f"unknown flag {name!r}: {advice}")


def check_computation(
    computation: legacy_api.TopLevelComputation, arguments: Sequence[Any]
) -> None:
    """Refuse a computation that the mode does not allow on arrays that span processes.

    Raises:
        NotAddressableError: With the type of the first such array.
    """
    mode = spmd_mode.value
    if mode == "allow_all" or not (computation.is_eager or mode == "allow_pjit"):
        return
    spanning = (x for x in arguments if isinstance(x, jax.Array) and not x.is_fully_addressable)
    array = next(spanning, None)
    if array is None:
        return
    kind = "eager operation" if computation.is_eager else "jax.jit"
    inside = "jax.jit or pjit" if mode == "allow_jit" else "pjit"
    raise NotAddressableError(  # no-catalogue: needs several processes
        f"{kind} {computation.name}: an argument {type_text(array)} spans "
        f"several processes, which jax_spmd_mode={mode!r} does not allow: compute it inside "
        f"{inside}, or write: with jax.spmd_mode('allow_all')"
    )


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


def current_array_mode() -> ArrayMode:
    """Return the array mode that the flags select in this thread.

    Read it once per call, at the entry point.

    Example:
        >>> from xlashard import legacy
        >>> with legacy.jax_array(False), legacy.parallel_functions_output_gda(True):
        ...     print(current_array_mode().returns_gda)
        True
    """
    return ArrayMode(jax_array.value, parallel_functions_output_gda.value)


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
    mode = ArrayMode(mode.jax_array, mode.returns_gda)
    return CallFlags(mode, enable_checks.value, distributed_debug.value)


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
        self._val = dispatch_flag("xlashard_positional_semantics", PositionalSemantics.LOCAL)

    @property
    def val(self) -> PositionalSemantics:
        """The semantics in force in this thread."""
        return self._val.value

    @val.setter
    def val(self, value: PositionalSemantics) -> None:
        if not isinstance(value, PositionalSemantics):
            raise ArgumentError(
                f"_positional_semantics.val={value!r} is invalid: expected LOCAL or GLOBAL; write "
                "maps._PositionalSemantics.GLOBAL"
            )
        self._val.set_local(value)


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
