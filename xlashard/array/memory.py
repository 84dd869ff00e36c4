"""Between devices whose memory is the host's own: emulated devices on a CPU.

There a block that one device holds can be read where it lies, and where it lies as the
destination wants it, it is the destination's too. What is left costs one copy of each distinct
byte, and no program.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from xlashard._jax.transfer import (
    Handle,
    aligned_empty,
    collect_garbage,
    host_view,
    is_takeable,
    make_aval,
    put,
    split,
)
from xlashard.array.copying import Copy, copy_all
from xlashard.array.pieces import Exchange, exchange
from xlashard.array.placement import Places
from xlashard.geometry import Piece

_DEALS_KEPT = 512


def in_one_memory(*all_places: Places) -> bool:
    """Whether all devices share this process's memory."""
    return all(
        device.platform == "cpu" and places.sharding.is_fully_addressable
        for places in all_places
        for device in places.sharding.devices[:1]
    )


def move_in_memory(
    handle: Handle, source: Places, target: Places, *, donate: bool = False, fresh: bool = False
) -> Handle:
    """The same value in another place; waits until the source is computed.

    Args:
        handle: The source.
        source: Where it is.
        target: Where to.
        donate: Frees each buffer of the source as soon as all of it is in its new place.
        fresh: Copies also blocks that lie there as they are wanted.
    """
    deal = _deal(exchange(handle, source, target), tuple(target.tiles))
    windows = [host_view(buffer)[0] for buffer in split(handle)]
    blocks: list[np.ndarray | None] = [None] * len(deal.first)
    if not fresh:
        for number, piece in deal.whole:
            # The dots keep it a window where there is no dimension to index.
            window = windows[deal.position[piece.source]][*piece.source_index, ...]
            blocks[number] = window if is_takeable(window) else None
    copied = [block is None for block in blocks]
    ready = [
        aligned_empty(target.shard_shape, handle.dtype) if block is None else block
        for block in blocks
    ]
    del blocks
    if donate:
        _copy_and_free(handle, deal, windows, ready, copied)
    else:
        copy_all(_copies(deal.pieces, deal, windows, ready, copied))
    aval = make_aval(target.shape, handle.dtype, target.twin, handle.weak_type)
    return put(aval, target.twin, [ready[n] for n in deal.taken], target.devices, alias=True)


class _Deal(NamedTuple):
    """An exchange where devices share memory: a tile is made once for all that want it.

    Attributes:
        first: For each distinct tile the first device of the target that holds it.
        taken: For each device of the target the number of its tile among those.
        whole: Tiles that are (a part of) a single piece, with that piece.
        pieces: All pieces with the number of the tile that each is for, source by source.
        position: The position of each source device among the source's buffers.
    """

    first: tuple[int, ...]
    taken: tuple[int, ...]
    whole: tuple[tuple[int, Piece], ...]
    pieces: tuple[tuple[int, Piece], ...]
    position: dict[int, int]


@lru_cache(maxsize=_DEALS_KEPT)
def _deal(what: Exchange, tiles: tuple[int, ...]) -> _Deal:
    numbers: dict[int, int] = {}
    first: list[int] = []
    for device, tile in enumerate(tiles):
        if tile not in numbers:
            numbers[tile] = len(first)
            first.append(device)
    position = {giver: n for n, giver in enumerate(what.givers)}
    pieces = [(n, piece) for n, device in enumerate(first) for piece in what.wanted[device]]
    return _Deal(
        first=tuple(first),
        taken=tuple(numbers[tile] for tile in tiles),
        whole=tuple((n, p) for n, p in pieces if len(what.wanted[first[n]]) == 1),
        pieces=tuple(sorted(pieces, key=lambda entry: position[entry[1].source])),
        position=position,
    )


def _copies(
    pieces: Sequence[tuple[int, Piece]],
    deal: _Deal,
    windows: Sequence[np.ndarray],
    blocks: Sequence[np.ndarray],
    copied: Sequence[bool],
) -> list[Copy]:
    return [
        (
            blocks[number][(..., *piece.destination_index)],
            windows[deal.position[piece.source]][(..., *piece.source_index)],
        )
        for number, piece in pieces
        if copied[number]
    ]


def _copy_and_free(
    handle: Handle,
    deal: _Deal,
    windows: list[np.ndarray],
    blocks: Sequence[np.ndarray],
    copied: Sequence[bool],
) -> None:
    """Copies source by source. Blocks are written in as it goes, and take up memory only then."""
    by_source: dict[int, list[tuple[int, Piece]]] = {n: [] for n in range(len(windows))}
    for number, piece in deal.pieces:
        by_source[deal.position[piece.source]].append((number, piece))
    buffers = split(handle)
    for number, pieces in by_source.items():
        copy_all(_copies(pieces, deal, windows, blocks, copied))
        windows[number] = np.empty(0, handle.dtype)
        buffers[number].delete()
        collect_garbage()
