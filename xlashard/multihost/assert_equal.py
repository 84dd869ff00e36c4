"""`assert_equal`: comparison of values between all processes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard._jax.runtime.transfer import host_view, split
from xlashard.array import Array
from xlashard.array.core.shard import index_text
from xlashard.array.placement.read import distinct_here, reading_allowed
from xlashard.errors import UnequalError
from xlashard.multihost.collective_call import (
    CollectiveCall,
    Contribution,
    HostLeaf,
    can_meet,
    read_leaves,
)
from xlashard.multihost.consistency import PieceDigests, mismatched_pieces
from xlashard.multihost.host_collectives import gathered_by_devices
from xlashard.processes import NamedValue, ValueDifference, digest, format_differences, minority


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
            leaves = read_leaves(in_tree, "in_tree", "assert_equal", whole=True)
            mine = [_named(leaf) for leaf in leaves]
            copies = _copies(leaves)
        if jax.process_count() == 1:
            return
        unequal = _differences(call, mine, copies, leaves) if can_meet() else _by_devices(mine)
        if unequal:
            raise UnequalError(  # no-catalogue: needs several processes
                _text(fail_message, unequal),
                processes=tuple(sorted({p for d in unequal for p in d.processes})),
                paths=tuple(d.path for d in unequal),
            )


def _differences(
    call: CollectiveCall,
    mine: Sequence[NamedValue],
    copies: PieceDigests,
    leaves: Sequence[HostLeaf],
) -> Sequence[ValueDifference]:
    entries = json.dumps([named.entry() for named in mine])
    came = call.exchange(
        Contribution(hashlib.sha256(entries.encode()).hexdigest(), json.dumps(copies))
    )
    if len({they.digest for they in came.values()}) > 1:
        return call.differences(mine)
    if any(they.note != "{}" for they in came.values()):
        return _unlike_copies({p: json.loads(c.note) for p, c in came.items()}, leaves)
    return ()


def _by_devices(mine: Sequence[NamedValue]) -> Sequence[ValueDifference]:
    """Compare digests by a device collective, without a store: types first, then values."""
    types = json.dumps([named.entry()[:3] for named in mine])
    rows = gathered_by_devices(np.frombuffer(hashlib.sha256(types.encode()).digest(), np.uint8))
    odd = minority({process: bytes(row) for process, row in enumerate(rows)})
    if odd:
        return (ValueDifference("in_tree", odd, "its leaves or their dtypes and shapes"),)
    sums = b"".join(digest(named.value) for named in mine)
    table = gathered_by_devices(np.frombuffer(sums, np.uint8))
    columns = np.split(table, len(mine), axis=1) if mine else []
    odds = [minority({p: bytes(sum_) for p, sum_ in enumerate(column)}) for column in columns]
    return [
        ValueDifference(named.path, odd, "") for named, odd in zip(mine, odds, strict=True) if odd
    ]


def _named(leaf: HostLeaf) -> NamedValue:
    if leaf.value is not None:
        return NamedValue(leaf.path, leaf.value, "" if leaf.keys is None else "of keys")
    assert leaf.array is not None
    return NamedValue(leaf.path, np.empty(0, bool), f"{leaf.type} under {leaf.array.sharding}")


def _copies(leaves: Sequence[HostLeaf]) -> PieceDigests:
    """Return digests of the pieces of arrays that were not read and may be replicated elsewhere."""
    return {
        leaf.path: _tile_digests(leaf.array)
        for leaf in leaves
        if leaf.value is None and leaf.array is not None and leaf.array.shape
    }


def _tile_digests(array: Array) -> dict[str, str]:
    handle = array._handle
    tiling, distinct = distinct_here(handle)
    if tiling.num_replicas == 1:
        return {}
    tiles = tiling.tile_ids(distinct.positions).tolist()
    with reading_allowed(handle, explicit=True):
        buffers = split(handle)
        return {
            str(tile): digest(host_view(buffers[number])[0]).hex()[:32]
            for tile, number in zip(tiles, distinct.buffers, strict=True)
        }


def _unlike_copies(
    by_process: Mapping[int, PieceDigests], leaves: Sequence[HostLeaf]
) -> list[ValueDifference]:
    """Return the first differing piece of each array whose copies differ between processes."""
    unequal = []
    for leaf in leaves:
        unlike = mismatched_pieces(by_process, leaf.path)
        if unlike and leaf.array is not None:
            first = min(unlike, key=lambda piece: int(piece.name))
            text = f"its piece {_index_of(leaf.array, int(first.name))} {first.text}"
            unequal.append(ValueDifference(leaf.path, first.odd, text))
    return unequal


def _index_of(array: Array, tile: int) -> str:
    tiling, _ = distinct_here(array._handle)
    position = tiling.tile_ids().tolist().index(tile)
    return index_text(tiling.indices(array.shape, [position])[0])


def _text(message: str, unequal: Sequence[ValueDifference]) -> str:
    text = format_differences(unequal)
    return f"{message}: {text}" if message else text
