"""Errors of transfers for which memory does not suffice."""

import math
from collections.abc import Sequence

import numpy as np

from xlashard._jax.runtime.transfer import collect_garbage, is_out_of_memory
from xlashard.array.placement.target import ResolvedSharding
from xlashard.errors import OutOfMemoryError, counted
from xlashard.wording import in_bytes, typed

type MemoryRequired = tuple[ResolvedSharding, int, str]
"""A sharding, the bytes of an array on one device of it, and the array's type as text."""


def memory_required(target: ResolvedSharding, dtype: np.dtype) -> MemoryRequired:
    """Return the memory that an array of a dtype requires under a sharding."""
    size = math.prod(target.shard_shape) * dtype.itemsize
    return target, size, typed(dtype.name, target.shape)


def as_out_of_memory_error(
    error: BaseException, needed: Sequence[MemoryRequired]
) -> OutOfMemoryError | None:
    """Return the error to raise instead of an out-of-memory error; None for any other error.

    The frames of the error are dropped with everything that they hold, so that the memory is free
    while the error is handled.

    Args:
        error: The original error.
        needed: Memory that each array requires.
    """
    if not is_out_of_memory(error):
        return None
    _forget_frames(error)
    collect_garbage()
    each = sum(size for _, size, _ in needed)
    target, _, text = max(needed, key=lambda one: one[1])
    what = (
        f"an Array {text}" if len(needed) == 1 else f"{len(needed):,} Arrays, {text} the largest,"
    )
    devices = counted(len(target.devices), "device")
    shared = ", which share this machine's memory," if target.on_host else ""
    less = (
        "give smaller values, delete() arrays that are not needed, or shard the arrays over more "
        "devices, for example NamedSharding(mesh, P('data'))"
    )
    return OutOfMemoryError(
        f"not enough memory to place {what} on {devices}{shared}: it takes {in_bytes(each)} "
        f"({each:,} bytes) on each; nothing was placed: {less}",
        bytes_per_device=each,
    )


def _forget_frames(error: BaseException) -> None:
    """Drop the frames of an error and of those that it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__, seen = None, seen.__context__
