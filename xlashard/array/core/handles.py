"""Telling buffer handles from other values, and wrapping the results of programs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xlashard._jax.runtime.transfer import Handle, HandleType, split
from xlashard.array.core.array import Array, wrap

type KindOf = Callable[[Any], type[Array]]
"""Says for the handle of a result which class of arrays it is to be."""


def is_handle(value: object) -> bool:
    """True for JAX's own concrete array object, which is what a handle is."""
    return type(value) is HandleType


def wrap_first(_: None, handles: Sequence[Any]) -> Array:
    """An `Array` over the only one of the handles, as jaxlib's dispatcher asks for it."""
    out = Array()
    out._buffers, out._exclusive = handles[0], True
    return out


def unwrapped(handle: Any) -> Any:
    """Return the class of a result that is to stay JAX's own array.

    Args:
        handle: The result's buffers.
    """
    return HandleType


def wrap_result(value: Any, kind: type[Array] = Array) -> Any:
    """An array of a class over a handle; keys, tokens and tracers stay what they are."""
    if type(value) is not HandleType or kind is HandleType:
        return value
    out = kind()
    out._handle = value
    return out


def as_class[A: Array](array: Array, kind: type[A]) -> A:
    """An Array as one of another class, over the same buffers and with the same sharding."""
    out = kind()
    out._handle, out._own_sharding = array._handle, array._own_sharding
    return out


def live_arrays(platform: str | None = None) -> list[Array]:
    """All arrays whose buffers are alive in this process, JAX's own among them.

    Each is a new `Array` over the buffers: deleting it deletes those. A buffer is listed once, as
    part of the array that spans the most devices: the shards that somebody has asked for are no
    arrays of their own.

    Args:
        platform: Only those on this kind of devices.

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
    """Device and address of each buffer; nothing where there is none, or the runtime won't say."""
    if handle.is_deleted() or not handle.size:
        return set()
    parts = [handle] if handle.sharding.num_devices == 1 else split(handle)
    try:
        return {(id(part.device), part.unsafe_buffer_pointer()) for part in parts}
    except RuntimeError:
        return set()
