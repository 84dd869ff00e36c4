"""Flags of JAX 0.3 and 0.4 as settings of the same class as JAX's own.

The flags are part of the keys of JAX's caches, so that traces and programs of two modes are never
exchanged. `jax.config` has them only between `show` and `hide`.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from types import CodeType
from typing import Any

import jax
from jax._src import config
from jax._src.lib import _jax

type Flag = Any
"""A setting: `flag.value` is the current value, `flag(value)` a context manager for one thread."""


def new_flag[T: (bool, str)](name: str, default: T, about: str, parse: Callable[[Any], T]) -> Flag:
    """Create a setting that is part of JAX's trace context and dispatch key.

    Args:
        name: Its name.
        default: Its initial value in all threads.
        about: One sentence for the command line's help.
        parse: Parses and checks an assigned value.
    """
    flag = config.State(
        name,
        default,
        about,
        parser=parse,
        default_context_manager_value=True,
        include_in_jit_key=True,
        include_in_trace_context=True,
    )
    # Keep the setting out of JAX's own list.
    config.config_states.pop(name)
    return flag


def set_everywhere(flag: Flag, value: Any) -> None:
    """Set the global value, for all threads without a value of their own."""
    flag._set(value)


class ThreadValue:
    """Thread-local value that is part of the dispatch key.

    Args:
        name: Its name in jaxlib.
        default: Its value in threads that set none.
    """

    def __init__(self, name: str, default: Any) -> None:
        self._state = _jax.config.Config(name, default, include_in_jit_key=True)

    def get(self) -> Any:
        """Return the value of this thread."""
        return self._state.value

    def set(self, value: Any) -> None:
        """Set the value of this thread."""
        self._state.set_local(value)


def own_flag(name: str) -> Flag:
    """Return a setting of JAX."""
    return config.config_states[name]


def show(flags: Sequence[Flag]) -> None:
    """Add settings to `jax.config`: its attributes, `update` and the command line."""
    for flag in flags:
        if flag.name in jax.config._value_holders:
            continue
        jax.config._contextmanager_flags.add(flag.name)
        jax.config.add_option(
            flag.name, flag, type(flag.value), meta_args=[], meta_kwargs={"help": flag.__doc__}
        )
        setattr(config.Config, flag.name, _read_only(flag))
        if jax.config.use_absl:
            _define(flag)


def _read_only(flag: Flag) -> property:
    return property(lambda _: flag.value)


def code_of_reads() -> CodeType:
    """Return the code that runs when a program reads one of these settings from `jax.config`."""
    reader = _read_only(None).fget
    assert reader is not None
    return reader.__code__


def hide(flags: Sequence[Flag]) -> None:
    """Remove settings from `jax.config`; their values stay."""
    for flag in flags:
        if jax.config._value_holders.get(flag.name) is not flag:
            continue
        jax.config._contextmanager_flags.discard(flag.name)
        del jax.config._value_holders[flag.name], jax.config.meta[flag.name]
        delattr(config.Config, flag.name)
        if jax.config.use_absl and flag.name in jax.config.absl_flags.FLAGS:
            delattr(jax.config.absl_flags.FLAGS, flag.name)


def define_for_absl(flags: Sequence[Flag]) -> None:
    """Let `absl.app.run` parse settings and all of JAX's own from the command line."""
    if not jax.config.use_absl:
        jax.config.config_with_absl()
    for flag in flags:
        _define(flag)
    absl_app().call_after_init(lambda: take_from_absl(flags))


def absl_app() -> Any:
    """Import and return `absl.app`.

    Raises:
        ImportError: absl is not installed.
    """
    from absl import app  # an optional package

    return app


def parse_with_absl(flags: Sequence[Flag], arguments: Sequence[str]) -> None:
    """Parse settings and all of JAX's own from a command line, without `absl.app.run`.

    Args:
        flags: The settings.
        arguments: The arguments of the command line.
    """
    jax.config.parse_flags_with_absl()
    for flag in flags:
        _define(flag)
    names = tuple(f"--{sign}{flag.name}" for flag in flags for sign in ("", "no"))
    ours = [a for a in takewhile(lambda a: a != "--", arguments) if a.split("=")[0] in names]
    jax.config.absl_flags.FLAGS(["", *ours], known_only=True)
    take_from_absl(flags)


def take_from_absl(flags: Sequence[Flag]) -> None:
    """Set the values that the command line contained."""
    for flag in flags:
        value = jax.config.absl_flags.FLAGS[flag.name]
        if value.present:
            flag._set(value.value)


def _define(flag: Flag) -> None:
    flags = jax.config.absl_flags
    if flag.name not in flags.FLAGS:
        define: Any = flags.DEFINE_bool if isinstance(flag.value, bool) else flags.DEFINE_string
        define(flag.name, flag.value, help=flag.__doc__)
