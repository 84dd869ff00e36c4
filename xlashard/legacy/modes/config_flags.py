"""The flags of the era: by environment variable, `config.update`, the command line and contexts.

| flag | if nobody says | meaning |
|---|---|---|
| `jax_array` | True | all arrays are `jax.Array`s, and all values of `pjit` are global |
| `jax_parallel_functions_output_gda` | False | without `jax_array`: results are global arrays |
| `jax_pmap_no_rank_reduction` | False | buffers of arrays of the era's `pmap` keep its dimension |
| `jax_spmd_mode` | `allow_jit` | kept and checked; computations are allowed in each mode |
| `jax_enable_checks` | JAX's own | the mesh in force is compared with that of each global array |
| `jax_distributed_debug` | JAX's own | each run of a program over many devices is logged |

The environment variable of a flag is its name in capitals. Whoever wants to know what is in force
asks `worlds.current_array_mode()`, once, where a call comes in.
"""

import difflib
import os
import sys
from typing import Any

import jax

from xlashard._jax import legacy_flags
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import ConfigError

_WORDS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


def _reader(name: str) -> Any:
    def read(value: Any) -> bool:
        return _truth(name, value)

    return read


def _truth(name: str, value: Any) -> bool:
    word = str(int(value)) if isinstance(value, bool) else str(value).strip().lower()
    if word not in _WORDS:
        raise ConfigError(
            f"{name} is {value!r}; it must be True or False: write "
            f"jax.config.update({name!r}, True), or export {name.upper()}=1"
        )
    return _WORDS[word]


_SPMD_MODES = ("allow_jit", "allow_pjit", "allow_all")


def _spmd_mode(value: Any) -> str:
    if value not in _SPMD_MODES:
        raise ConfigError(
            f"jax_spmd_mode is {value!r}; expected one of {', '.join(map(repr, _SPMD_MODES))}: "
            "write jax.config.update('jax_spmd_mode', 'allow_all')"
        )
    return value


def _flag(name: str, default: bool, about: str) -> legacy_flags.Flag:
    said = os.environ.get(name.upper(), "").strip()
    return legacy_flags.new_flag(
        name, _truth(name, said) if said else default, about, _reader(name)
    )


jax_array = _flag("jax_array", True, "All arrays are jax.Arrays; values of pjit are global.")
parallel_functions_output_gda = _flag(
    "jax_parallel_functions_output_gda",
    False,
    "Without jax_array, pjit gives GlobalDeviceArrays.",
)
pmap_no_rank_reduction = _flag(
    "jax_pmap_no_rank_reduction",
    False,
    "Buffers of arrays with a PmapSharding keep the dimension that pmap dealt out.",
)
spmd_mode = legacy_flags.new_flag(
    "jax_spmd_mode",
    _spmd_mode(os.environ.get("JAX_SPMD_MODE", "").strip() or _SPMD_MODES[0]),
    "Which computations may take arrays that span processes; today all may.",
    _spmd_mode,
)
enable_checks = legacy_flags.own_flag("jax_enable_checks")
distributed_debug = legacy_flags.own_flag("jax_distributed_debug")

OWN = (jax_array, parallel_functions_output_gda, pmap_no_rank_reduction, spmd_mode)
"""The flags that today's JAX does not have."""

# Whoever turns one of these on wants to see every call, also those that were seen before.
legacy_flags.tell_calls_apart_by((enable_checks, distributed_debug), "xlashard_legacy_is_watched")


def show_flags() -> None:
    """Puts the era's flags on `jax.config`: as attributes, for `update` and for absl."""
    legacy_flags.show(OWN)


def hide_flags() -> None:
    """Takes them off again; their values stay."""
    legacy_flags.hide(OWN)


class Config:
    """`jax.config`, and the era's flags besides; it needs nothing installed.

    Example:
        >>> from xlashard.legacy import config
        >>> config.update("jax_array", True)
        >>> config.jax_array
        True
    """

    def update(self, name: str, value: Any) -> None:
        """Sets a flag for all threads.

        Args:
            name: The flag's name, such as `jax_array`.
            value: True or False; 0, 1 and the words of environment variables count as well.

        Raises:
            ConfigError: There is no such flag, or it can't have such a value.
        """
        with short_tracebacks:
            flag = _OWN_BY_NAME.get(name)
            if flag is not None:
                legacy_flags.set_everywhere(flag, value)
                return
            _check_known(name)
            jax.config.update(name, value)

    def read(self, name: str) -> Any:
        """The value of a flag in this thread.

        Raises:
            ConfigError: There is no such flag.
        """
        with short_tracebacks:
            if name in _OWN_BY_NAME:
                return _OWN_BY_NAME[name].value
            _check_known(name)
            return getattr(jax.config, name)

    def config_with_absl(self) -> None:
        """Lets `absl.app.run` read the flags from the command line: `--jax_array=0`."""
        legacy_flags.define_for_absl(OWN)

    def parse_flags_with_absl(self) -> None:
        """Reads the flags from the command line now, for programs without `absl.app.run`."""
        legacy_flags.parse_with_absl(OWN, sys.argv)

    def __getattr__(self, name: str) -> Any:
        flag = _OWN_BY_NAME.get(name)
        return getattr(jax.config, name) if flag is None else flag.value

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(jax.config), *_OWN_BY_NAME})


_OWN_BY_NAME = {flag.name: flag for flag in OWN}

config = Config()
"""The settings of JAX and of the era."""


def _check_known(name: str) -> None:
    if name in jax.config.values:
        return
    known = [*_OWN_BY_NAME, *jax.config.values]
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    advice = f"did you mean {close[0]!r}?" if close else "dir(legacy.config) lists them"
    raise ConfigError(f"there is no flag {name!r}: {advice}")
