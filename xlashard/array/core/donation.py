"""Track buffer donation, so that errors about deleted arrays can name the call.

The first call of a program marks the arrays that it donates. Repeat calls go from the dispatcher to
PJRT without entering Python and cannot mark anything; but they donate arrays of the shapes, dtypes
and shardings of the first call, which are recorded here.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

# Bounds the memory of a function that is called with ever new shapes.
_KINDS_KEPT = 4096
_SHOWN = 3

type _Kind = tuple[Any, ...]


class DonationTracker:
    """Record of the arrays that a callable donates; it is dropped with the callable.

    Args:
        name: Name of the callable.

    Attributes:
        paths: Path of the argument that donates handles of a kind.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.paths: dict[_Kind, str] = {}
        with _lock:
            _trackers.add(self)

    def note(self, path: str, handle: Any) -> str:
        """Record that the callable donates handles of the type and sharding of this one.

        Args:
            path: Path of the donated argument.
            handle: A handle, which may be deleted.

        Returns:
            Name of the callable with the path of the argument.
        """
        kind = _kind(handle)
        if kind not in self.paths:
            while len(self.paths) >= _KINDS_KEPT:
                self.paths.pop(next(iter(self.paths)), None)
            self.paths[kind] = path
        return self.takes(path)

    def takes(self, path: str) -> str:
        """Return the name with the path of an argument: `update, as state['w']`."""
        return f"{self.name}, as {path}"


_trackers: weakref.WeakSet[DonationTracker] = weakref.WeakSet()
_lock = threading.Lock()


def _kind(handle: Any) -> _Kind:
    return handle.shape, handle.dtype, handle.sharding


def likely_donations(handle: Any) -> list[str]:
    """Return the callables that donate handles like this one, sorted by name."""
    kind = _kind(handle)
    with _lock:
        known = list(_trackers)
    paths = ((tracker, tracker.paths.get(kind)) for tracker in known)
    return sorted(tracker.takes(path) for tracker, path in paths if path is not None)


def deletion_cause(handle: Any, taker: str | None) -> str:
    """Describe why a handle is deleted.

    Args:
        handle: The deleted handle.
        taker: The callable that it was donated to, if known.
    """
    if taker == SHARD:
        return "one of its shards was deleted or donated by itself"
    if taker is not None:
        target = "one of its shards" if taker.startswith(SHARD) else "it"
        taker = taker.removeprefix(SHARD)
        return (
            f"{DELETE} was called on {target}"
            if taker == DELETE
            else f"{target} was donated to {taker}"
        )
    likely = likely_donations(handle)
    if not likely:
        return f"{DELETE} was called on it, or it was donated to a program"
    if len(likely) == 1:
        return f"it was most likely donated to {likely[0]}"
    more = f" ({len(likely) - _SHOWN} more take such arrays)" if len(likely) > _SHOWN else ""
    return f"it was most likely donated to one of: {'; '.join(likely[:_SHOWN])}{more}"


DELETE = "delete()"
"""Marks an array that `delete()` deleted."""

SHARD = "a shard: "
"""Prefix of the mark of an array one of whose shards was deleted or donated."""

SHARDS: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = {}
"""Handles that are one shard of larger Arrays, by id, each with those Arrays."""


def record_shard(handle: Any, whole: Any) -> None:
    """Record that deleting or donating a handle deletes a shard of an Array."""
    key = id(handle)
    # Python clears modules before it frees some handles, so the callback reads no global.
    ended = weakref.ref(handle, lambda _, pop=SHARDS.pop: pop(key, None))
    _, wholes = SHARDS.setdefault(key, (ended, []))
    if all(known() is not whole for known in wholes):
        wholes[:] = [*(known for known in wholes if known() is not None), weakref.ref(whole)]


def arrays_with_shard(handle: Any) -> list[Any]:
    """Return the recorded Arrays of which a handle is one shard."""
    _, wholes = SHARDS.get(id(handle), (None, ()))
    return [whole for known in wholes if (whole := known()) is not None]


def release_shards(values: Iterable[Any], taker: str) -> None:
    """Delete the Arrays that lost a shard because values were deleted or donated.

    Args:
        values: Leaves of donated arguments, whether a program has taken them over or not.
        taker: The callable that they were donated to, or `DELETE`.
    """
    for value in values:
        handle = getattr(value, "_buffers", value)
        if id(handle) in SHARDS and handle.is_deleted():
            for array in arrays_with_shard(handle):
                array._lose_shard(taker)
