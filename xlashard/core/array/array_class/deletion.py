"""Causes of deleted Arrays: records of donations and of shards, and the words of their errors.

The first call of a program marks the arrays that it donates. Repeat calls go from the dispatcher to
PJRT without entering Python and cannot mark anything; but they donate arrays of the shapes, dtypes
and shardings of the first call, which are recorded here.
"""

import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from xlashard._jax.runtime.global_state import BoundedCache
from xlashard._jax.runtime.transfer import Handle

# Callables that an error names which may have taken the array; it counts the others.
_SHOWN = 3

# Shape, dtype and sharding, which are all that a repeat call has in common with the first.
type _BufferType = tuple[Any, ...]


class DonationTracker:
    """Record of the arrays that a callable donates; it is dropped with the callable.

    Args:
        name: Name of the callable.

    Attributes:
        paths: Path of the argument that donates handles of a kind.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Bounds the memory of a function that is called with ever new shapes.
        self.paths = BoundedCache(4096)
        with _trackers_lock:
            _trackers.add(self)

    def record(self, path: str, handle: Any) -> str:
        """Record that the callable donates handles of the type and sharding of this one.

        Args:
            path: Path of the donated argument.
            handle: A handle, which may be deleted.

        Returns:
            Name of the callable with the path of the argument.
        """
        kind = _read_type(handle)
        if self.paths.get(kind) is None:
            self.paths.add(kind, path)
        return self.name_argument(path)

    def name_argument(self, path: str) -> str:
        """Return the name with the path of an argument: `update, as state['w']`."""
        return f"{self.name}, as {path}"


_trackers: weakref.WeakSet[DonationTracker] = weakref.WeakSet()
_trackers_lock = threading.Lock()


def _read_type(handle: Any) -> _BufferType:
    return handle.shape, handle.dtype, handle.sharding


def _list_likely_consumers(handle: Any) -> list[str]:
    """Return the callables that donate handles like this one, sorted by name."""
    kind = _read_type(handle)
    with _trackers_lock:
        known = list(_trackers)
    paths = ((tracker, tracker.paths.get(kind)) for tracker in known)
    return sorted(tracker.name_argument(path) for tracker, path in paths if path is not None)


def _find_cause(handle: Any, consumer: str | None) -> tuple[str, bool]:
    """Describe why a handle is deleted; return True, too, if it may have been donated to a call.

    Args:
        handle: The deleted handle.
        consumer: The callable that it was donated to, if known.
    """
    if consumer == SHARD:
        return "one of its shards was deleted or donated by itself", False
    if consumer is not None:
        target = "one of its shards" if consumer.startswith(SHARD) else "it"
        consumer = consumer.removeprefix(SHARD)
        if consumer == DELETE:
            return f"{DELETE} was called on {target}", False
        return f"{target} was donated to {consumer}", True
    likely = _list_likely_consumers(handle)
    if not likely:
        return f"{DELETE} was called on it, or it was donated to a program", True
    if len(likely) == 1:
        return f"it was most likely donated to {likely[0]}", True
    more = f" ({len(likely) - _SHOWN} more take such arrays)" if len(likely) > _SHOWN else ""
    return f"it was most likely donated to one of: {'; '.join(likely[:_SHOWN])}{more}", True


DELETE = "delete()"
"""Marks an array that `delete()` deleted."""

SHARD = "a shard: "
"""Prefix of the mark of an array one of whose shards was deleted or donated."""

SHARDS: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = {}
"""Handles that are one shard of larger Arrays, by id, each with those Arrays."""


# Reentrant, as a finalizer or a signal handler may delete an array meanwhile.
shards_lock = threading.RLock()


def record_shards(handles: Iterable[Any], whole: Any) -> None:
    """Record that deleting or donating one of some handles deletes a shard of an Array."""
    ref = weakref.ref(whole)
    with shards_lock:
        for handle in handles:
            key = id(handle)
            known = SHARDS.get(key)
            if known is None:
                # Python clears modules before it frees some handles: the callback reads no global.
                SHARDS[key] = (weakref.ref(handle, partial(SHARDS.pop, key)), [ref])
            elif ref is not known[1][-1]:
                known[1][:] = [r for r in known[1] if r is not ref and r() is not None]
                known[1].append(ref)


def list_arrays_with_shard(handle: Any) -> list[Any]:
    """Return the recorded Arrays of which a handle is one shard."""
    _, wholes = SHARDS.get(id(handle), (None, ()))
    return [whole for known in wholes if (whole := known()) is not None]


def release_shards(values: Iterable[Any], consumer: str) -> None:
    """Delete the Arrays that lost a shard because values were deleted or donated.

    Args:
        values: Leaves of donated arguments, whether a program has taken them over or not.
        consumer: The callable that they were donated to, or `DELETE`.
    """
    for value in values:
        handle = getattr(value, "_buffers", value)
        if id(handle) in SHARDS and handle.is_deleted():
            for array in list_arrays_with_shard(handle):
                array._lose_shard(consumer)


def describe_deleted(name: str, handle: Handle, consumer: str | None) -> str:
    """Describe a deleted array: what deleted it, and what to do instead.

    Args:
        name: The array as errors name it.
        handle: Its handle.
        consumer: The callable that it was donated to, if known.
    """
    how, is_donated = _find_cause(handle, consumer)
    advice = "make it anew"
    if is_donated:
        advice = (
            "use what that call returned, or leave the array out of what it donates "
            "(donate_argnums, donate=True)"
        )
    return f"{name} has been deleted: {how}; {advice}"
