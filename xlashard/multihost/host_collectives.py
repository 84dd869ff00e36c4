"""`process_allgather` and `broadcast_one_to_all`: values of pytrees between processes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import PlacementError, ProcessesError
from xlashard.multihost.collective_call import (
    CollectiveCall,
    Contribution,
    can_meet,
    digest_of,
    leaf_types,
)
from xlashard.multihost.leaves import HostLeaf, read_leaves
from xlashard.multihost.packing import (
    broadcast_by_devices,
    gathered_by_devices,
    packed,
    size_of,
    unpacked,
)
from xlashard.processes import format_processes

# Up to this total size the values are exchanged with the barrier itself, which takes one round trip
# in any case. The devices would take another one, and a program.
STORED_BYTES = 64 << 10


def process_allgather(in_tree: Any, tiled: bool = False, *, timeout: float = 600.0) -> Any:
    """Gather the values of all processes in every process.

    All processes must call it, with pytrees of the same leaves, dtypes and shapes. Values arrive
    unchanged: nothing is rounded to dtypes that devices support.

    Args:
        in_tree: NumPy arrays, numbers, Arrays, JAX arrays and PRNG keys, or a pytree of them.
        tiled: False stacks the values of the processes: `[processes, ...]`. True concatenates them
            along their first dimension; scalars are stacked in both cases. An array that spans
            processes is one value, and `tiled=True` returns the whole of it.
        timeout: How long to wait for the other processes, in seconds.

    Returns:
        `in_tree` with a NumPy array for every value (for PRNG keys: a key array of JAX).

    Raises:
        ProcessesError: Some processes did not arrive, made another call, or passed another pytree;
            with process and path.
        PlacementError: An array that spans processes, without `tiled=True`.
        ArgumentError: A value that no device can hold, with its path.

    Example:
        >>> import numpy as np
        >>> from xlashard.multihost import process_allgather
        >>> process_allgather({"loss": np.float32(0.5)})
        {'loss': array([0.5], dtype=float32)}
    """
    with short_tracebacks:
        call = CollectiveCall(f"process_allgather(..., tiled={bool(tiled)})", timeout)
        with call.abort_together():
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


def _check_tiled(leaves: Sequence[HostLeaf], tiled: bool) -> None:
    for leaf in leaves:
        if leaf.value is None and not tiled:
            raise PlacementError(  # no-catalogue: needs several processes
                f"{leaf.path} is {leaf.type}, which is one value and not one value per process, "
                "so it cannot be stacked: write process_allgather(x, tiled=True) to gather it"
            )


def _gathered(
    call: CollectiveCall, leaves: Sequence[HostLeaf], own: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the values of all processes, each `[processes, ...]`."""
    count = jax.process_count()
    if count == 1:
        return [np.array(value)[None] for value in own]
    block = packed(own)
    if not can_meet():
        return unpacked(gathered_by_devices(block), own)
    is_small = size_of(own) * count <= STORED_BYTES
    types = leaf_types(leaves)
    came = call.exchange(Contribution(digest_of(types), data=block.tobytes() if is_small else b""))
    call.check_same_types(came, types)
    if not is_small:
        return unpacked(gathered_by_devices(block), own)
    rows = [np.frombuffer(came[process].data, np.uint8) for process in range(count)]
    return unpacked(np.stack(rows), own)


def _arranged(rows: np.ndarray, tiled: bool) -> np.ndarray:
    return rows.reshape((rows.shape[0] * rows.shape[1], *rows.shape[2:])) if tiled else rows


def _whole(leaf: HostLeaf, timeout: float) -> np.ndarray:
    """Return the value of an array that spans processes."""
    assert leaf.array is not None
    return leaf.array.to_host("gather", timeout=timeout)


_SOURCE = "source"


def broadcast_one_to_all(
    in_tree: Any, is_source: bool | None = None, *, timeout: float = 600.0
) -> Any:
    """Broadcast the values of one process to every process.

    All processes must call it, with pytrees of the same leaves, dtypes and shapes. Values arrive
    unchanged: nothing is rounded to dtypes that devices support.

    Args:
        in_tree: NumPy arrays, numbers, Arrays, JAX arrays and PRNG keys, or a pytree of them. Only
            the values of the source matter; the other processes provide dtypes and shapes.
        is_source: Whether this process is the source, which exactly one process must be. By default
            process 0.
        timeout: How long to wait for the other processes, in seconds.

    Returns:
        `in_tree` with the source's value as a NumPy array for every value (for PRNG keys: a key
        array of JAX).

    Raises:
        ProcessesError: Some processes did not arrive, made another call, or passed another pytree;
            or the number of sources is not one.
        PlacementError: An array that spans processes, of which no process holds the whole.
        ArgumentError: A value that no device can hold, with its path.

    Example:
        >>> import numpy as np
        >>> from xlashard.multihost import broadcast_one_to_all
        >>> broadcast_one_to_all({"seed": np.uint32(17)})
        {'seed': array(17, dtype=uint32)}
    """
    with short_tracebacks:
        call = CollectiveCall("broadcast_one_to_all", timeout)
        with call.abort_together():
            leaves = read_leaves(in_tree, "in_tree", "broadcast_one_to_all", whole=True)
            own = [_own(leaf) for leaf in leaves]
        gives = jax.process_index() == 0 if is_source is None else bool(is_source)
        values = _broadcast(call, leaves, own, gives)
        out = [leaf.like(value) for leaf, value in zip(leaves, values, strict=True)]
        return jax.tree.structure(in_tree).unflatten(out)


def _own(leaf: HostLeaf) -> np.ndarray:
    if leaf.value is None:
        raise PlacementError(  # no-catalogue: needs several processes
            f"{leaf.path} is {leaf.type}, which spans processes, so no process holds all of it: "
            "write process_allgather(x, tiled=True) to gather its value"
        )
    return leaf.value


def _broadcast(
    call: CollectiveCall, leaves: Sequence[HostLeaf], own: Sequence[np.ndarray], gives: bool
) -> list[np.ndarray]:
    if jax.process_count() == 1:
        _check_one_source([0] if gives else [])
        return [np.array(value) for value in own]
    block = packed(own)
    if not can_meet():
        return unpacked(broadcast_by_devices(block, is_source=gives), own)
    is_small = size_of(own) <= STORED_BYTES
    data = block.tobytes() if is_small and gives else b""
    types = leaf_types(leaves)
    came = call.exchange(Contribution(digest_of(types), _SOURCE if gives else "", data))
    source = _check_one_source([p for p, they in came.items() if they.note == _SOURCE])
    call.check_same_types(came, types)
    if is_small:
        return unpacked(np.frombuffer(came[source].data, np.uint8), own)
    return unpacked(broadcast_by_devices(block, is_source=gives), own)


def _check_one_source(sources: Sequence[int]) -> int:
    if len(sources) == 1:
        return sources[0]
    who = f"{format_processes(sources)} are" if sources else "no process is"
    raise ProcessesError(
        f"broadcast_one_to_all requires exactly one source, but {who} the source: write "
        "broadcast_one_to_all(x, is_source=jax.process_index() == 0)",
        processes=sources,
    )
