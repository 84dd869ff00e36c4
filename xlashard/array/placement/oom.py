"""Placements for which memory does not suffice: what to say, and how to leave nothing behind."""

import math
from collections.abc import Sequence

import numpy as np

from xlashard._jax.runtime.transfer import collect_garbage, is_out_of_memory
from xlashard.array.placement.target import ResolvedSharding
from xlashard.errors import OutOfMemoryError, counted
from xlashard.wording import in_bytes, typed

type MemoryRequired = tuple[ResolvedSharding, int, str]
"""A place, the bytes that an array takes on one device of it, and the array's type in words."""


def memory_required(target: ResolvedSharding, dtype: np.dtype) -> MemoryRequired:
    """What an array of a dtype takes in a place."""
    size = math.prod(target.shard_shape) * dtype.itemsize
    return target, size, typed(dtype.name, target.shape)


def as_out_of_memory_error(
    error: BaseException, needed: Sequence[MemoryRequired]
) -> OutOfMemoryError | None:
    """What to raise instead of an error, if it says that memory was lacking; otherwise None.

    Whatever the error's frames still hold of the placement is let go of, so that it is free while
    somebody still looks at the error.

    Args:
        error: What was raised.
        needed: By each of the arrays.
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
        "give smaller values, delete() arrays that are not needed any more, or cut the arrays over "
        "more devices, for example NamedSharding(mesh, P('data'))"
    )
    return OutOfMemoryError(
        f"not enough memory to place {what} on {devices}{shared}: it takes {in_bytes(each)} "
        f"({each:,} bytes) on each; nothing was placed: {less}",
        bytes_per_device=each,
    )


def _forget_frames(error: BaseException) -> None:
    """Lets go of the frames of an error and of those that it arose from."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__, seen = None, seen.__context__
