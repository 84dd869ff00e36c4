"""`live_arrays`: what takes memory in this process."""

import jax

from xlashard._jax.transfer import Handle, HandleType, split
from xlashard.array.array import Array, wrap


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
