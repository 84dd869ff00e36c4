"""Global state of JAX: settings, transfer guards, and caches to clear with its own."""

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, NamedTuple, Protocol

from jax._src import config, util
from jax._src.lib import guard_lib

# Of these, what is different says nothing more than the mesh in force does.
_MESHES = ("mesh_context_manager", "abstract_mesh_context_manager")


def trace_context() -> Any:
    """A hashable value that differs whenever such a setting does."""
    return config.trace_context(), config.use_shardy_partitioner.value


def changed_settings(before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """The name and both values of each setting in which two trace contexts differ.

    The mesh in force is none of them.
    """
    said, says = _by_name(before), _by_name(after)
    # One that was made in between is in one of them.
    both = [name for name in says if name in said and name not in _MESHES]
    return [(name, said[name], says[name]) for name in both if said[name] != says[name]]


def _by_name(context: Any) -> dict[str, Any]:
    settings, shardy = context
    named = zip(config.trace_context_names(), settings, strict=False)
    return {**dict(named), "jax_use_shardy_partitioner": shardy}


def is_tracing_forbidden() -> bool:
    """True under `jax.no_tracing`."""
    return config.no_tracing.value


def is_x64_enabled() -> bool:
    """True if 64-bit numbers stay what they are (`jax_enable_x64`)."""
    return config.enable_x64.value


def explains_cache_misses() -> bool:
    """True if JAX was asked to say why it traces and compiles (`jax_explain_cache_misses`)."""
    return config.explain_cache_misses.value


class Transfer(Enum):
    """From where to where; the value is how JAX's settings and its texts spell it."""

    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_DEVICE = "device_to_device"
    DEVICE_TO_HOST = "device_to_host"


class TransferGuards(NamedTuple):
    """The level for each transfer; None where nobody set one."""

    host_to_device: str | None
    device_to_device: str | None
    device_to_host: str | None

    def level(self, transfer: Transfer) -> str | None:
        """The level for one transfer."""
        return getattr(self, transfer.value)

    def refuse(self, transfer: Transfer, *, explicit: bool) -> bool:
        """Whether a transfer is forbidden; an explicit one is what somebody asked for by name."""
        level = self.level(transfer)
        return level == "disallow_explicit" or (level == "disallow" and not explicit)

    def log(self, transfer: Transfer, *, explicit: bool) -> bool:
        """Whether a transfer is to be written down."""
        level = self.level(transfer)
        return level == "log_explicit" or (level == "log" and not explicit)


_FREE = (None, "allow")
_host_to_device = config.transfer_guard_host_to_device
_device_to_device = config.transfer_guard_device_to_device
_device_to_host = config.transfer_guard_device_to_host


def active_guards() -> TransferGuards | None:
    """The guards; None, at once, where all transfers are free."""
    to_device, between, to_host = (
        _host_to_device.value,
        _device_to_device.value,
        _device_to_host.value,
    )
    if to_device in _FREE and between in _FREE and to_host in _FREE:
        return None
    return TransferGuards(to_device, between, to_host)


def inside_device_get() -> bool:
    """Whether this thread is in a call of `jax.device_get`, which asks for a transfer by name."""
    return guard_lib.thread_local_state().explicit_device_get


class Clearable(Protocol):
    """Anything that can forget: an instance of a cache, or a function under `lru_cache`."""

    def cache_clear(self) -> None:
        """Forgets everything."""


class BoundedCache:
    """Cache of values by hashable keys; it is emptied when it is full.

    Args:
        size: The number of values that it holds.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, made where the cache has none."""
        value = self._values.get(key)
        if value is None:
            value = make()
            if len(self._values) >= self._size:
                self._values = {}
            self._values[key] = value
        return value

    def cache_clear(self) -> None:
        """Forget every value."""
        self._values = {}


def cached_by_jaxpr[T](function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a function of a jaxpr that computes each result once, and drops it with the jaxpr.

    A function that calls itself for the jaxprs inside one is linear in their depth by this: each
    level of nested calls is visited once, and not again by all levels around it.
    """
    return util.weakref_lru_cache(function, trace_context_in_key=False)


def cleared_with_jax[C: Clearable](cache: C) -> C:
    """Lets `jax.clear_caches()` empty a cache too, while it lives. Also a decorator."""
    util.register_cache(cache, f"xlashard: {cache!r}")
    return cache
