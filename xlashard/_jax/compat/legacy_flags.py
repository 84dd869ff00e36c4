"""Flags of the migration era, as settings of JAX of the same make as its own.

They are part of the keys of JAX's caches from when they are made, so that neither a trace nor a
program of one mode is taken for one of the other. `jax.config` shows them only from `show` to
`hide`.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from types import CodeType
from typing import Any

import jax
from jax._src import config
from jax._src.lib import _jax

_unset = _jax.config.unset

type Flag = Any
"""A setting: `flag.value` is what is in force, `flag(value)` a context for one thread."""


def new_flag[T: (bool, str)](name: str, default: T, about: str, parse: Callable[[Any], T]) -> Flag:
    """Makes a setting that is part of what JAX tells traces and calls apart by.

    Args:
        name: Its name.
        default: Its value in all threads until somebody says otherwise.
        about: One sentence for the help of the command line.
        parse: Reads a value that somebody gives.
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
    # Whoever asks JAX for its settings isn't told of this one.
    config.config_states.pop(name)
    return flag


def set_everywhere(flag: Flag, value: Any) -> None:
    """Sets what is in force in all threads that say nothing else."""
    flag._set(value)


class ThreadValue:
    """A value of each thread that jaxlib's dispatcher tells calls apart by.

    Args:
        name: Its name to jaxlib.
        default: What it is in threads that set none.
    """

    def __init__(self, name: str, default: Any) -> None:
        self._state = _jax.config.Config(name, default, include_in_jit_key=True)

    def get(self) -> Any:
        """The value in this thread."""
        return self._state.value

    def set(self, value: Any) -> None:
        """Sets it in this thread."""
        self._state.set_local(value)


def own_flag(name: str) -> Flag:
    """A setting that JAX has itself."""
    return config.config_states[name]


def add_to_dispatch_key(flags: Sequence[Flag], name: str) -> None:
    """Lets jaxlib's dispatcher know whether any of some of JAX's settings is on.

    Args:
        flags: Settings that JAX's keys don't hold.
        name: What to call that to jaxlib.
    """
    state = _jax.config.Config(name, False, include_in_jit_key=True)

    def follow_global() -> None:
        state.set_global(any(flag.get_global() for flag in flags))

    def follow_thread() -> None:
        unset = all(flag.get_local() is _unset for flag in flags)
        state.set_local(_unset if unset else any(flag.value for flag in flags))

    for flag in flags:
        flag._add_hooks(
            _after(flag._update_global_hook, follow_global),
            _after(flag._update_thread_local_hook, follow_thread),
        )


def _after(first: Callable[[Any], None] | None, then: Callable[[], None]) -> Callable[[Any], None]:
    def hook(value: Any) -> None:
        if first is not None:
            first(value)
        then()

    return hook


def show(flags: Sequence[Flag]) -> None:
    """Puts settings on `jax.config`: as attributes, for `update` and for the command line."""
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
    """Takes settings off `jax.config`; their values stay."""
    for flag in flags:
        if jax.config._value_holders.get(flag.name) is not flag:
            continue
        jax.config._contextmanager_flags.discard(flag.name)
        del jax.config._value_holders[flag.name], jax.config.meta[flag.name]
        delattr(config.Config, flag.name)
        if jax.config.use_absl and flag.name in jax.config.absl_flags.FLAGS:
            delattr(jax.config.absl_flags.FLAGS, flag.name)


def define_for_absl(flags: Sequence[Flag]) -> None:
    """Lets `absl.app.run` read settings from the command line, besides all of JAX's own."""
    if not jax.config.use_absl:
        jax.config.config_with_absl()
    for flag in flags:
        _define(flag)
    absl_app().call_after_init(lambda: take_from_absl(flags))


def absl_app() -> Any:
    """The module of absl that starts programs; nobody needs it who does not ask for it.

    Raises:
        ImportError: absl isn't there.
    """
    from absl import app  # an optional package

    return app


def parse_with_absl(flags: Sequence[Flag], arguments: Sequence[str]) -> None:
    """Reads settings, and all of JAX's own, from a command line that nobody else reads yet.

    Args:
        flags: The settings.
        arguments: Those of the command line.
    """
    jax.config.parse_flags_with_absl()
    for flag in flags:
        _define(flag)
    names = tuple(f"--{sign}{flag.name}" for flag in flags for sign in ("", "no"))
    ours = [a for a in takewhile(lambda a: a != "--", arguments) if a.split("=")[0] in names]
    jax.config.absl_flags.FLAGS(["", *ours], known_only=True)
    take_from_absl(flags)


def take_from_absl(flags: Sequence[Flag]) -> None:
    """Sets what the command line said."""
    for flag in flags:
        said = jax.config.absl_flags.FLAGS[flag.name]
        if said.present:
            flag._set(said.value)


def _define(flag: Flag) -> None:
    flags = jax.config.absl_flags
    if flag.name not in flags.FLAGS:
        define: Any = flags.DEFINE_bool if isinstance(flag.value, bool) else flags.DEFINE_string
        define(flag.name, flag.value, help=flag.__doc__)
