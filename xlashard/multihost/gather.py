"""`process_allgather`: what every process has, in every process."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import PlacementError
from xlashard.multihost.calls import Call, Came, can_meet, digest_of, types_of
from xlashard.multihost.leaves import Leaf, read_leaves
from xlashard.multihost.packing import gathered_by_devices, packed, size_of, unpacked

# Up to so many bytes of all processes together come by the meeting itself. It takes one round trip
# in any case, and the devices would take another, and a program of their own.
STORED_BYTES = 64 << 10


def process_allgather(in_tree: Any, tiled: bool = False, *, timeout: float = 600.0) -> Any:
    """Brings the values of all processes to every process.

    All processes must call it, with trees of the same leaves, dtypes and shapes. Values arrive as
    they are: nothing is rounded to what devices can hold.

    Args:
        in_tree: NumPy arrays, numbers, Arrays, arrays and keys of JAX, or a pytree of them.
        tiled: False stacks the values of the processes: `[processes, ...]`. True puts them one
            after the other along their first dimension; numbers are stacked all the same.
            An array that spans processes is one value, and `tiled=True` gives the whole of it.
        timeout: How long to wait for the other processes, in seconds.

    Returns:
        `in_tree` with a NumPy array for every value (for keys: a key array of JAX).

    Raises:
        ProcessesError: Processes that did not come, came for another call, or with another tree;
            by process and path.
        PlacementError: An array that spans processes, without `tiled=True`.
        ArgumentError: A value that no device can hold, with its path.

    Example:
        >>> import numpy as np
        >>> from xlashard.multihost import process_allgather
        >>> process_allgather({"loss": np.float32(0.5)})
        {'loss': array([0.5], dtype=float32)}
    """
    with short_tracebacks:
        call = Call(f"process_allgather(..., tiled={bool(tiled)})", timeout)
        with call.refusing():
            leaves = read_leaves(in_tree, "in_tree", "process_allgather")
            _check_tiled(leaves, tiled)
        own = [leaf.value for leaf in leaves if leaf.value is not None]
        rows = iter(_gathered(call, leaves, own))
        values = [
            _whole(leaf, timeout)
            if leaf.value is None
            else _arranged(next(rows), tiled and leaf.ndim > 0)
            for leaf in leaves
        ]
        out = [leaf.like(value) for leaf, value in zip(leaves, values, strict=True)]
        return jax.tree.structure(in_tree).unflatten(out)


def _check_tiled(leaves: Sequence[Leaf], tiled: bool) -> None:
    for leaf in leaves:
        if leaf.value is None and not tiled:
            raise PlacementError(  # no-catalogue: needs several processes
                f"{leaf.path} is {leaf.type}, one value and not one for each process, so there is "
                "nothing to stack: write process_allgather(x, tiled=True) for the whole of it"
            )


def _gathered(call: Call, leaves: Sequence[Leaf], own: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values of all processes, `[processes, ...]` each."""
    count = jax.process_count()
    if count == 1:
        return [np.array(value)[None] for value in own]
    block = packed(own)
    if not can_meet():
        return unpacked(gathered_by_devices(block), own)
    is_small = size_of(own) * count <= STORED_BYTES
    types = types_of(leaves)
    came = call.come(Came(digest_of(types), data=block.tobytes() if is_small else b""))
    call.check_same_types(came, types)
    if not is_small:
        return unpacked(gathered_by_devices(block), own)
    rows = [np.frombuffer(came[process].data, np.uint8) for process in range(count)]
    return unpacked(np.stack(rows), own)


def _arranged(rows: np.ndarray, tiled: bool) -> np.ndarray:
    return rows.reshape((rows.shape[0] * rows.shape[1], *rows.shape[2:])) if tiled else rows


def _whole(leaf: Leaf, timeout: float) -> np.ndarray:
    """The value of an array that spans processes."""
    assert leaf.array is not None
    return leaf.array.to_host("gather", timeout=timeout)
