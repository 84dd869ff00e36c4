"""Recognize buffer handles, and wrap the results of programs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xlashard._jax.runtime.transfer import Handle, HandleType, split
from xlashard.array.core.array import Array, wrap

type KindOf = Callable[[Any], type[Array]]
"""Function from the handle of a result to the class of its array."""


def is_handle(value: object) -> bool:
    """Return True for JAX's own concrete array object."""
    return type(value) is HandleType


def wrap_first(_: None, handles: Sequence[Any]) -> Array:
    """Return an `Array` over the only handle, for jaxlib's dispatcher."""
    out = Array()
    out._buffers, out._exclusive = handles[0], True
    return out


def unwrapped(handle: Any) -> Any:
    """Return the class of a result that stays JAX's own array.

    Args:
        handle: The result's buffers.
    """
    return HandleType


def wrap_result(value: Any, kind: type[Array] = Array) -> Any:
    """Return an array of a class over a handle; other values are returned as they are."""
    if type(value) is not HandleType or kind is HandleType:
        return value
    out = kind()
    out._handle = value
    return out


def as_class[A: Array](array: Array, kind: type[A]) -> A:
    """Return an Array as one of another class, with the same buffers and sharding."""
    out = kind()
    out._handle, out._own_sharding = array._handle, array._own_sharding
    return out


def live_arrays(platform: str | None = None) -> list[Array]:
    """Return all arrays whose buffers are alive in this process, JAX's own included.

    Each is a new `Array` over the buffers: deleting it deletes them. A buffer is listed once, as
    part of the array with the most devices; shards of an array are not listed.

    Args:
        platform: Restricts the list to devices of this platform.

    Example:
        >>> import numpy as np
        >>> from xlashard import device_put, live_arrays
        >>> x = device_put(np.zeros(1000, np.float32))
        >>> x.nbytes <= sum(array.nbytes for array in live_arrays())
        True
    """
    handles = [h for h in jax.live_arrays(platform) if type(h) is HandleType]
    widest_first = sorted(handles, key=lambda h: -h.sharding.num_devices)
    seen: set[tuple[int, int]] = set()
    kept: set[int] = set()
    for handle in widest_first:
        buffers = _buffers(handle)
        if buffers and buffers <= seen:
            continue
        seen |= buffers
        kept.add(id(handle))
    return [wrap(handle) for handle in handles if id(handle) in kept]


def _buffers(handle: Handle) -> set[tuple[int, int]]:
    """Return device and address of each buffer; nothing if empty or hidden by the runtime."""
    if handle.is_deleted() or not handle.size:
        return set()
    parts = [handle] if handle.sharding.num_devices == 1 else split(handle)
    try:
        return {(id(part.device), part.unsafe_buffer_pointer()) for part in parts}
    except RuntimeError:
        return set()
