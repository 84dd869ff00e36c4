"""Between devices whose memory is the host's own: emulated devices on a CPU.

There a block that one device holds can be read where it lies and be taken by several devices as
it is, so a new placement costs one copy of the bytes in it, and no program.
"""

import numpy as np

from xlashard._jax.transfer import Handle, aligned_empty, host_view, make_aval, put, split
from xlashard.array.pieces import exchange
from xlashard.array.placement import Places


def in_one_memory(*all_places: Places) -> bool:
    """Whether all devices share this process's memory."""
    return all(
        device.platform == "cpu" and places.sharding.is_fully_addressable
        for places in all_places
        for device in places.sharding.devices[:1]
    )


def move_in_memory(handle: Handle, source: Places, target: Places) -> Handle:
    """The same value in another place; waits until the source is computed."""
    givers, wanted = exchange(handle, source, target)
    windows = {
        number: host_view(buffer)[0] for number, buffer in zip(givers, split(handle), strict=True)
    }
    blocks: dict[int, np.ndarray] = {}
    tiles = target.tiles
    for tile, pieces in zip(tiles, wanted, strict=True):
        if tile in blocks:
            continue
        block = blocks[tile] = aligned_empty(target.shard_shape, handle.dtype)
        for piece in pieces:
            block[piece.destination_index] = windows[piece.source][piece.source_index]
    aval = make_aval(target.shape, handle.dtype, target.twin, handle.weak_type)
    return put(aval, target.twin, [blocks[tile] for tile in tiles], target.devices, alias=True)
