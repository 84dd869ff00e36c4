"""Who takes over the buffers of arrays: asked when somebody uses an array that is gone.

A program's first call marks the arrays that it takes. Repeat calls go from the dispatcher to
PJRT without entering Python, so they can't mark anything; but they take only arrays such as the
first call took, of one shape, dtype and sharding, and these are remembered here.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

# A function called with ever new shapes must not remember them all.
_KINDS_KEPT = 4096
_SHOWN = 3

type _Kind = tuple[Any, ...]


class DonationTracker:
    """A callable that takes over buffers; it is forgotten when nobody holds it any more.

    Args:
        name: What a person calls it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._paths: dict[_Kind, str] = {}
        with _lock:
            _trackers.add(self)

    def note(self, path: str, handle: Any) -> str:
        """Remembers that it takes handles like this one.

        Args:
            path: The argument by which it does.
            handle: A handle; deleted ones still have what counts.

        Returns:
            Who took it, in words.
        """
        kind = _kind(handle)
        if kind not in self._paths:
            while len(self._paths) >= _KINDS_KEPT:
                self._paths.pop(next(iter(self._paths)), None)
            self._paths[kind] = path
        return self.takes(path)

    def takes(self, path: str) -> str:
        """`update, as state['w']`."""
        return f"{self.name}, as {path}"

    def path_of(self, kind: _Kind) -> str | None:
        """The argument by which it takes handles of a kind, if it does."""
        return self._paths.get(kind)


_trackers: weakref.WeakSet[DonationTracker] = weakref.WeakSet()
_lock = threading.Lock()


def _kind(handle: Any) -> _Kind:
    return handle.shape, handle.dtype, handle.sharding


def likely_donations(handle: Any) -> list[str]:
    """Who takes handles like this one, in words, in the order of their names."""
    kind = _kind(handle)
    with _lock:
        known = list(_trackers)
    found = ((taker, taker.path_of(kind)) for taker in known)
    return sorted(taker.takes(path) for taker, path in found if path is not None)


def deletion_cause(handle: Any, taker: str | None) -> str:
    """Why a handle's buffers are gone, in words.

    Args:
        handle: The handle.
        taker: Who took it, if that is known.
    """
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
"""Stands for the taker of an array whose memory somebody gave back."""

SHARD = "a shard: "
"""Prefix of the taker of an array that lost one of its shards."""

SHARDS: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = {}
"""Handles that are one shard of larger Arrays, by id: each with those Arrays."""


def record_shard(handle: Any, whole: Any) -> None:
    """Record that deleting or donating a handle deletes a shard of an Array."""
    key = id(handle)
    _, wholes = SHARDS.setdefault(key, (weakref.ref(handle, lambda _: SHARDS.pop(key, None)), []))
    if all(known() is not whole for known in wholes):
        wholes[:] = [*(known for known in wholes if known() is not None), weakref.ref(whole)]


def release_shards(values: Iterable[Any], taker: str) -> None:
    """Delete the Arrays that lost a shard because values were deleted or donated.

    Args:
        values: Leaves of donated arguments, whether a program has taken them over or not.
        taker: The callable that they were donated to, or `DELETE`.
    """
    for value in values:
        handle = getattr(value, "_buffers", value)
        entry = SHARDS.get(id(handle))
        if entry is None or not handle.is_deleted():
            continue
        for whole in entry[1]:
            array = whole()
            if array is not None:
                array._lose_shard(taker)
