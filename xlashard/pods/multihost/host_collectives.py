"""Values of pytrees, gathered from, broadcast to and compared between processes.

Values that move are packed into one block of bytes, so that one collective moves a whole pytree,
and every dtype arrives unchanged, including 64-bit numbers that devices would round.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax.runtime.global_state import allow_transfers
from xlashard._jax.runtime.shardings import Device
from xlashard.core.array import Array
from xlashard.core.array.device_put import device_put
from xlashard.core.array.placement.read import holds_value, read_value
from xlashard.core.pjit.api import pjit
from xlashard.core.processes import (
    NamedValue,
    ValueDifference,
    digest,
    format_differences,
    minority,
)
from xlashard.core.sharding import Mesh, NamedSharding, PartitionSpec
from xlashard.errors import PlacementError, ProcessesError, UnequalError
from xlashard.pods.multihost.collective_call import (
    CollectiveCall,
    Contribution,
    HostLeaf,
    can_meet,
    leaf_types,
    read_leaves,
)
from xlashard.pods.multihost.host_local_arrays import host_local_array_to_global_array
from xlashard.pods.multihost.program_checks import PieceDigests, tile_digests, unequal_tiles
from xlashard.support.formatting import format_processes
from xlashard.support.tracebacks import short_tracebacks

# Up to this total size the values are exchanged with the barrier itself, which takes one round trip
# in any case. The devices would take another one, and a program.
STORED_BYTES = 64 << 10


_WORD = np.dtype(np.uint32)


# Smallest block per device, in words.
_LEAST = 256


# Number of distinct block lengths between consecutive powers of two.
_STEPS = 8


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
            leaves = read_leaves(in_tree, "process_allgather")
            spanning = [leaf for leaf in leaves if leaf.value is None]
            if spanning and not tiled:
                raise PlacementError(  # no-catalogue: needs several processes
                    f"{spanning[0].path} is {spanning[0].type}, which is one value and not one "
                    "value per process, so it cannot be stacked: write process_allgather(x, "
                    "tiled=True) to gather it"
                )
        own = [leaf.value for leaf in leaves if leaf.value is not None]
        rows = iter(_gathered(call, leaves, own))
        out = []
        for leaf in leaves:
            if leaf.value is None and leaf.array is not None:
                value = leaf.array.to_host("gather", timeout=timeout)
            else:
                value = next(rows)
                if tiled and leaf.ndim > 0:
                    value = np.concatenate(value)
            out.append(leaf.like(value))
        return jax.tree.structure(in_tree).unflatten(out)


def _gathered(
    call: CollectiveCall, leaves: Sequence[HostLeaf], own: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the values of all processes, each `[processes, ...]`."""
    count = jax.process_count()
    if count == 1:
        return [np.array(value)[None] for value in own]
    block = packed(own)
    if can_meet():
        is_small = block.nbytes * count <= STORED_BYTES
        contributions = call.exchange_typed(
            leaf_types(leaves), data=block.tobytes() if is_small else b""
        )
        if is_small:
            rows = [
                np.frombuffer(contributions[process].data, np.uint8) for process in range(count)
            ]
            return unpacked(np.stack(rows), own)
    return unpacked(gathered_by_devices(block), own)


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
            leaves = read_leaves(in_tree, "broadcast_one_to_all", whole=True)
            own = [_own(leaf) for leaf in leaves]
        gives = jax.process_index() == 0 if is_source is None else bool(is_source)
        values = _broadcast(call, leaves, own, gives)
        out = [leaf.like(value) for leaf, value in zip(leaves, values, strict=True)]
        return jax.tree.structure(in_tree).unflatten(out)


def _own(leaf: HostLeaf) -> np.ndarray:
    if leaf.value is None and leaf.array is not None and holds_value(leaf.array._handle):
        return read_value(leaf.array, explicit=True)
    if leaf.value is None:
        raise PlacementError(  # no-catalogue: needs several processes
            f"{leaf.path} is {leaf.type}, which spans processes, and this one lacks a part of it: "
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
    if can_meet():
        is_small = block.nbytes <= STORED_BYTES
        data = block.tobytes() if is_small and gives else b""
        contributions = call.exchange_typed(leaf_types(leaves), _SOURCE if gives else "", data)
        source = _check_one_source([p for p, they in contributions.items() if they.note == _SOURCE])
        if is_small:
            return unpacked(np.frombuffer(contributions[source].data, np.uint8), own)
    return unpacked(broadcast_by_devices(block, is_source=gives), own)


def _check_one_source(sources: Sequence[int]) -> int:
    if len(sources) == 1:
        return sources[0]
    subject = f"{format_processes(sources)} are" if sources else "no process is"
    raise ProcessesError(
        f"broadcast_one_to_all requires exactly one source, but {subject} the source: write "
        "broadcast_one_to_all(x, is_source=jax.process_index() == 0)",
        processes=sources,
    )


def assert_equal(in_tree: Any, fail_message: str = "", *, timeout: float = 600.0) -> None:
    """Check that all processes have equal values: dtypes, shapes and bits.

    All processes must call it. If the values are equal, a few bytes per process are exchanged and
    no program runs. NaN equals NaN of the same bits; 0.0 and -0.0 differ.

    Args:
        in_tree: NumPy arrays, numbers, Arrays, JAX arrays and PRNG keys, or a pytree of them. For
            an array that spans processes the sharding must be equal, and each shard that several
            processes hold.
        fail_message: Prefix of the error message.
        timeout: How long to wait for the other processes, in seconds.

    Raises:
        UnequalError: An `AssertionError` with the path of each differing leaf, the processes, and
            the first differing element.
        ProcessesError: Some processes did not arrive, or made another call.
        ArgumentError: A value that no device can hold, with its path.

    Example:
        >>> import numpy as np
        >>> from xlashard.multihost import assert_equal
        >>> assert_equal({"steps": 1000, "seed": np.uint32(17)}, "the settings")
    """
    with short_tracebacks:
        call = CollectiveCall("assert_equal", timeout)
        with call.abort_together():
            leaves = read_leaves(in_tree, "assert_equal", whole=True)
            values = [_named(leaf) for leaf in leaves]
            copies = tile_digests(leaves)
        if jax.process_count() == 1:
            return
        unequal = _differences(call, values, copies, leaves) if can_meet() else _by_devices(values)
        if unequal:
            text = format_differences(unequal)
            raise UnequalError(  # no-catalogue: needs several processes
                f"{fail_message}: {text}" if fail_message else text,
                processes=tuple(sorted({p for d in unequal for p in d.processes})),
                paths=tuple(d.path for d in unequal),
            )


def _differences(
    call: CollectiveCall,
    values: Sequence[NamedValue],
    copies: PieceDigests,
    leaves: Sequence[HostLeaf],
) -> Sequence[ValueDifference]:
    entries = json.dumps([named.entry() for named in values])
    contributions = call.exchange(
        Contribution(hashlib.sha256(entries.encode()).hexdigest(), json.dumps(copies))
    )
    if len({they.digest for they in contributions.values()}) > 1:
        return call.differences(values)
    if any(they.note != "{}" for they in contributions.values()):
        return unequal_tiles({p: json.loads(c.note) for p, c in contributions.items()}, leaves)
    return ()


def _by_devices(values: Sequence[NamedValue]) -> Sequence[ValueDifference]:
    """Compare digests by a device collective, without a store: types first, then values."""
    types = json.dumps([named.entry()[:3] for named in values])
    rows = gathered_by_devices(np.frombuffer(hashlib.sha256(types.encode()).digest(), np.uint8))
    odd = minority({process: bytes(row) for process, row in enumerate(rows)})
    if odd:
        return (ValueDifference("in_tree", odd, "its leaves or their dtypes and shapes"),)
    sums = b"".join(digest(named.value) for named in values)
    table = gathered_by_devices(np.frombuffer(sums, np.uint8))
    columns = np.split(table, len(values), axis=1) if values else []
    odds = [minority({p: bytes(sum_) for p, sum_ in enumerate(column)}) for column in columns]
    return [
        ValueDifference(named.path, odd, "") for named, odd in zip(values, odds, strict=True) if odd
    ]


def _named(leaf: HostLeaf) -> NamedValue:
    if leaf.value is not None:
        return NamedValue(leaf.path, leaf.value, "" if leaf.keys is None else "of keys")
    assert leaf.array is not None
    return NamedValue(leaf.path, np.empty(0, bool), f"{leaf.type} under {leaf.array.sharding}")


def packed(values: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the bytes of values."""
    flat = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
    return np.concatenate([np.empty(0, np.uint8), *flat])


def unpacked(block: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Split a block, or several blocks at once, into values.

    Args:
        block: `[..., bytes]`.
        like: Arrays with the dtypes and shapes of the values.

    Returns:
        For each value an array `[..., *shape]`.
    """
    out, start = [], 0
    for value in like:
        part = np.array(block[..., start : start + value.nbytes], order="C")
        out.append(part.view(value.dtype).reshape((*block.shape[:-1], *value.shape)))
        start += value.nbytes
    return out


def gathered_by_devices(block: np.ndarray) -> np.ndarray:
    """Gather equally sized blocks `[bytes]` of all processes into `[processes, bytes]`.

    Each device of a process gathers a part, so that all devices transfer at once.
    """
    with allow_transfers():
        everywhere = device_put(
            _sharded_rows(block), NamedSharding(_mesh(), PartitionSpec(None, "device"))
        )
        return _bytes_of(everywhere, block.nbytes)


def broadcast_by_devices(block: np.ndarray, *, is_source: bool) -> np.ndarray:
    """Return the block of the source process; others pass a block of the same size."""
    with allow_transfers():
        contribution = block if is_source else np.zeros_like(block)
        return _bytes_of(_summed(_mesh())(_sharded_rows(contribution)), block.nbytes)


def _sharded_rows(block: np.ndarray) -> Array:
    """Return the block of each process as a row, sharded over the process's devices."""
    mesh = _mesh()
    devices = mesh.shape["device"]
    words = np.zeros((1, devices * _rounded(block.nbytes, devices)), _WORD)
    words.view(np.uint8)[0, : block.nbytes] = block
    spec = PartitionSpec("process", "device")
    return host_local_array_to_global_array(words, mesh, spec)


def _bytes_of(words: Array, size: int) -> np.ndarray:
    """Return the first bytes of each row."""
    return read_value(words, explicit=True).view(np.uint8)[..., :size]


def _rounded(size: int, devices: int) -> int:
    """Return the words per device for a block, rounded up to limit the number of programs."""
    words = max(-(-size // (_WORD.itemsize * devices)), _LEAST)
    step = (1 << math.floor(math.log2(words))) // _STEPS
    return -(-words // step) * step


def _mesh() -> Mesh:
    """Return a mesh with as many devices per process as the smallest process has."""
    return _mesh_of(tuple(jax.devices()))


@lru_cache(maxsize=4)
def _mesh_of(devices: tuple[Device, ...]) -> Mesh:
    by_process: dict[int, list[Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    rows = [by_process[process][:fewest] for process in sorted(by_process)]
    return Mesh(np.array(rows), ("process", "device"))


@lru_cache(maxsize=4)
def _summed(mesh: Mesh) -> Any:
    """Return a function that sums the rows, all but one of which are zero."""

    def broadcast_one_to_all(words: jax.Array) -> jax.Array:
        return jnp.sum(words, axis=0, dtype=words.dtype)

    spread = NamedSharding(mesh, PartitionSpec("device"))
    return pjit(broadcast_one_to_all, out_shardings=spread)
