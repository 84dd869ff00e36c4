"""`broadcast_one_to_all`: what one process has, in every process."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import PlacementError, ProcessesError
from xlashard.multihost.calls import Call, Came, can_meet, digest_of, types_of
from xlashard.multihost.gather import STORED_BYTES
from xlashard.multihost.leaves import Leaf, read_leaves
from xlashard.multihost.packing import broadcast_by_devices, packed, size_of, unpacked
from xlashard.processes import named_processes

_SOURCE = "source"


def broadcast_one_to_all(
    in_tree: Any, is_source: bool | None = None, *, timeout: float = 600.0
) -> Any:
    """Brings the values of one process to every process.

    All processes must call it, with trees of the same leaves, dtypes and shapes. Values arrive as
    they are: nothing is rounded to what devices can hold.

    Args:
        in_tree: NumPy arrays, numbers, Arrays, arrays and keys of JAX, or a pytree of them. Only
            those of the source count; the others say what shape they expect.
        is_source: Whether this process is the source, which exactly one must be. Process 0 is, if
            nobody says anything.
        timeout: How long to wait for the other processes, in seconds.

    Returns:
        `in_tree` with the source's value as a NumPy array for every value (for keys: a key array
        of JAX).

    Raises:
        ProcessesError: Processes that did not come, came for another call, or with another tree;
            none or several that are the source.
        PlacementError: An array that spans processes, of which no process has all.
        ArgumentError: A value that no device can hold, with its path.

    Example:
        >>> import numpy as np
        >>> from xlashard.multihost import broadcast_one_to_all
        >>> broadcast_one_to_all({"seed": np.uint32(17)})
        {'seed': array(17, dtype=uint32)}
    """
    with short_tracebacks:
        call = Call("broadcast_one_to_all", timeout)
        with call.refusing():
            leaves = read_leaves(in_tree, "in_tree", "broadcast_one_to_all", whole=True)
            own = [_own(leaf) for leaf in leaves]
        gives = jax.process_index() == 0 if is_source is None else bool(is_source)
        values = _broadcast(call, leaves, own, gives)
        out = [leaf.like(value) for leaf, value in zip(leaves, values, strict=True)]
        return jax.tree.structure(in_tree).unflatten(out)


def _own(leaf: Leaf) -> np.ndarray:
    if leaf.value is None:
        raise PlacementError(  # no-catalogue: needs several processes
            f"{leaf.path} is {leaf.type}, the same for all processes already, and none has all of "
            "it: write process_allgather(x, tiled=True) to have its value everywhere"
        )
    return leaf.value


def _broadcast(
    call: Call, leaves: Sequence[Leaf], own: Sequence[np.ndarray], gives: bool
) -> list[np.ndarray]:
    if jax.process_count() == 1:
        _check_one_source([0] if gives else [])
        return [np.array(value) for value in own]
    block = packed(own)
    if not can_meet():
        return unpacked(broadcast_by_devices(block, is_source=gives), own)
    is_small = size_of(own) <= STORED_BYTES
    data = block.tobytes() if is_small and gives else b""
    types = types_of(leaves)
    came = call.come(Came(digest_of(types), _SOURCE if gives else "", data))
    source = _check_one_source([p for p, they in came.items() if they.note == _SOURCE])
    call.check_same_types(came, types)
    if is_small:
        return unpacked(np.frombuffer(came[source].data, np.uint8), own)
    return unpacked(broadcast_by_devices(block, is_source=gives), own)


def _check_one_source(sources: Sequence[int]) -> int:
    if len(sources) == 1:
        return sources[0]
    who = f"{named_processes(sources)} are" if sources else "no process is"
    raise ProcessesError(
        f"broadcast_one_to_all takes the values of one process, but {who} the source: write "
        "broadcast_one_to_all(x, is_source=jax.process_index() == 0)",
        processes=sources,
    )
