"""Global state of JAX: settings, transfer guards, and caches to clear with its own.

Transfer guards are checked once where a transfer begins, in terms of the caller's arguments. The
transfer itself then runs unguarded: its implementation is internal.
"""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import jax
import numpy as np

from xlashard._jax.private import config, guard_lib, lib_jax, read_lazily, util
from xlashard.errors import TransferGuardError

if TYPE_CHECKING:
    UNSET: Any
    """Value of a setting that a thread has not set."""
else:
    __getattr__ = read_lazily(globals(), {"UNSET": lambda: lib_jax.config.unset})

# These settings repeat the mesh in force.
_MESHES = ("mesh_context_manager", "abstract_mesh_context_manager")


def trace_context() -> Any:
    """Return the settings that affect tracing and lowering, as a hashable value."""
    return config.trace_context(), jax.config.jax_use_shardy_partitioner


def changed_settings(before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Return name and both values of each setting that differs between two trace contexts.

    The mesh in force is left out.
    """
    old, new = _by_name(before), _by_name(after)
    # A setting that was created in between is in one context only.
    both = [name for name in new if name in old and name not in _MESHES]
    return [(name, old[name], new[name]) for name in both if old[name] != new[name]]


def entered_meshes(context: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the meshes of `with mesh:` in a trace context, and the abstract one of `set_mesh`."""
    old, new = map(_by_name(context).get, _MESHES)
    return old or (), None if new is None or new.empty else new


def _by_name(context: Any) -> dict[str, Any]:
    settings, shardy = context
    named = zip(config.trace_context_names(), settings, strict=False)
    return {**dict(named), "jax_use_shardy_partitioner": shardy}


WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))
"""Dtypes that JAX has only under `jax_enable_x64`."""


def unsupported(avals: Iterable[Any]) -> Iterator[Any]:
    """Return the abstract values that JAX has only under `jax_enable_x64`, unless it is on."""
    wide = frozenset() if jax.enable_x64.value else WIDE
    return (aval for aval in avals if aval.dtype in wide)


def dispatch_flag(name: str, default: Any = False) -> Any:
    """Return a new thread-local flag that is part of the dispatch key.

    Args:
        name: Its name in jaxlib.
        default: Its value in threads that set none.
    """
    return lib_jax.config.Config(name, default, include_in_jit_key=True)


def follow_settings(flag: Any, settings: Sequence[Any]) -> None:
    """Turn a flag of `dispatch_flag` on while any of some settings of JAX is on."""

    def follow_global() -> None:
        flag.set_global(any(setting.get_global() for setting in settings))

    def follow_thread() -> None:
        unset = all(setting.get_local() is lib_jax.config.unset for setting in settings)
        flag.set_local(
            lib_jax.config.unset if unset else any(setting.value for setting in settings)
        )

    for setting in settings:
        setting._add_hooks(
            hook_before(setting._update_global_hook, follow_global),
            hook_before(setting._update_thread_local_hook, follow_thread),
        )


def hook_before(
    hook: Callable[[Any], None] | None, function: Callable[[], None]
) -> Callable[[Any], None]:
    """Return a hook of a setting that calls another hook, if any, and then a function."""

    def both(value: Any) -> None:
        if hook is not None:
            hook(value)
        function()

    return both


class Transfer(Enum):
    """Kind of a transfer, by source and destination; the value is JAX's spelling."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_DEVICE = "device_to_device"
    DEVICE_TO_HOST = "device_to_host"


class TransferGuards(NamedTuple):
    """Level of the transfer guard for each kind of transfer; None where it is unset."""

    host_to_device: str | None
    device_to_device: str | None
    device_to_host: str | None

    def level(self, transfer: Transfer) -> str | None:
        """Return the level of a kind of transfer."""
        return getattr(self, transfer.value)

    def request(
        self, action: Literal["disallow", "log"], transfer: Transfer, *, explicit: bool
    ) -> bool:
        """Return True if a transfer is forbidden or has to be logged.

        Args:
            action: The action in question.
            transfer: The kind of transfer.
            explicit: True if the transfer was requested by name.
        """
        level = self.level(transfer)
        return level == f"{action}_explicit" or (level == action and not explicit)


_FREE = (None, "allow")
_host_to_device = jax.transfer_guard_host_to_device
_device_to_device = jax.transfer_guard_device_to_device
_device_to_host = jax.transfer_guard_device_to_host


def active_guards() -> TransferGuards | None:
    """Return the guards of this thread; None, in little time, if all transfers are free."""
    to_device, between, to_host = (
        _host_to_device.value,
        _device_to_device.value,
        _device_to_host.value,
    )
    if to_device in _FREE and between in _FREE and to_host in _FREE:
        return None
    return TransferGuards(to_device, between, to_host)


def inside_device_get() -> bool:
    """Return True inside of `jax.device_get`, which requests a transfer explicitly."""
    return guard_lib.thread_local_state().explicit_device_get


class Clearable(Protocol):
    """Cache that can be emptied: an instance, or a function under `lru_cache`."""

    def cache_clear(self) -> None:
        """Empty the cache."""


class BoundedCache:
    """Cache of values by hashable keys; the oldest are dropped when it is full.

    Args:
        most: Number of values that are kept.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._values: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Values such as devices cannot be copied; a copy of the owner begins with an empty cache.
        return BoundedCache, (self._most,)

    def get(self, key: Hashable) -> Any:
        """Return the value of a key; None where the cache has none."""
        return self._values.get(key)

    def add(self, key: Hashable, value: Any = True) -> None:
        """Keep the value of a key."""
        # Without a lock: a signal handler or a finalizer may come here meanwhile.
        values = self._values
        if len(values) >= self._most:
            for old in list(values)[: len(values) - self._most + 1]:
                values.pop(old, None)
        values[key] = value

    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, made where the cache has none."""
        value = self._values.get(key)
        if value is None:
            value = make()
            self.add(key, value)
        return value

    def drop(self, key: Hashable) -> None:
        """Forget the value of a key."""
        self._values.pop(key, None)

    def cache_clear(self) -> None:
        """Forget every value."""
        self._values = {}


def cached_by_jaxpr[T](function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a function of a jaxpr that computes each result once, and drops it with the jaxpr.

    A function that calls itself for the jaxprs inside one is linear in their depth by this: each
    level of nested calls is visited once, and not again by all levels around it.
    """

    @lru_cache(maxsize=1)
    def cache() -> Callable[[Any], T]:
        return util.weakref_lru_cache(function, trace_context_in_key=False)

    @wraps(function)
    def compute(jaxpr: Any) -> T:
        return cache()(jaxpr)

    return compute


class _Caches:
    """The caches of this package that are alive, as one cache."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, cache: Clearable) -> None:
        self._alive.add(cache)

    def cache_clear(self) -> None:
        for cache in list(self._alive):
            cache.cache_clear()


_CACHES = _Caches()


def cleared_with_jax[C: Clearable](cache: C) -> C:
    """Let `jax.clear_caches()` empty a cache too while it is alive. Also a decorator."""
    _CACHES.add(cache)
    return cache


def clear_caches_with_jax() -> None:
    """Let `jax.clear_caches()` empty the caches of `cleared_with_jax`."""
    util.register_cache(_CACHES, "xlashard")


_log = logging.getLogger("xlashard.transfer")


def _direction_text(direction: Transfer) -> str:
    return direction.value.replace("_", "-")


def check_transfer(
    guards: TransferGuards, direction: Transfer, what: str, explicit_form: str = ""
) -> None:
    """Check that the guards allow a transfer, and log it if they request that.

    Args:
        guards: The guards.
        direction: Direction of the transfer.
        what: Description of the value in errors.
        explicit_form: Code that would make the transfer explicit, if it is implicit.

    Raises:
        TransferGuardError: A guard forbids it.
    """
    explicit = not explicit_form
    if guards.request("disallow", direction, explicit=explicit):
        setting = f"jax.transfer_guard_{direction.value}"
        instead = f"{explicit_form}, or " if explicit_form else ""
        raise TransferGuardError(
            f"disallowed {_direction_text(direction)} transfer of {what}, by "
            f"{setting}({guards.level(direction)!r}): write {instead}"
            f"`with {setting}('allow'):` around it"
        )
    if guards.request("log", direction, explicit=explicit):
        kind = "explicit" if explicit else "implicit"
        _log.warning("%s transfer of %s, %s", _direction_text(direction), what, kind)


def guarded(
    guards: TransferGuards | None, direction: Transfer, what: str, explicit_form: str = ""
) -> AbstractContextManager[Any]:
    """Return a context in which a transfer runs, if there are no guards or they allow it."""
    if guards is None:
        return _NOTHING
    check_transfer(guards, direction, what, explicit_form)
    return jax.transfer_guard("allow")


def allow_transfers() -> AbstractContextManager[Any]:
    """Return a context for internal transfers, which guards let pass."""
    return _NOTHING if active_guards() is None else jax.transfer_guard("allow")


# Making a context costs as much as some of the operations that need one.
_NOTHING = nullcontext()
