"""How arrays lie on a mesh, drawn for a terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from xlashard.train.layout import path_name

_COLOURS = ("blue", "magenta", "cyan", "green", "yellow", "red", "bright_blue", "bright_magenta")
_WIDEST = 40
"""A picture wider than this would break the table on a usual terminal."""


@dataclass(frozen=True)
class Tiling:
    """An array cut into a grid of tiles.

    Attributes:
        tile: Shape of one tile.
        rows: The grid as rows of tiles; each tile is the ids of the devices that hold it.
    """

    tile: tuple[int, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]


def tiling(shape: Sequence[int], sharding: Any) -> Tiling:
    """The grid of tiles of an array: the last dimension that is cut runs across, others down."""
    shape = tuple(shape)
    tile = tuple(sharding.shard_shape(shape))
    cuts = [size // part if part else 1 for size, part in zip(shape, tile, strict=True)]
    across = next((i for i in reversed(range(len(cuts))) if cuts[i] > 1), None)
    columns = 1 if across is None else cuts[across]
    holders: dict[int, list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        row = column = 0
        for i, piece in enumerate(index):
            place = (piece.start or 0) // tile[i] if tile[i] else 0
            if i == across:
                column = place
            else:
                row = row * cuts[i] + place
        holders.setdefault(row * columns + column, []).append(device.id)
    tiles = [tuple(sorted(holders[i])) for i in range(math.prod(cuts))]
    rows = tuple(tuple(tiles[i : i + columns]) for i in range(0, len(tiles), columns))
    return Tiling(tile, rows)


def picture(tiles: Tiling) -> Text:
    """A line per row of tiles; each tile has a colour of its own and names its devices."""
    names = [[" ".join(map(str, ids)) for ids in row] for row in tiles.rows]
    width = max(len(name) for row in names for name in row) + 2
    if width * len(names[0]) > _WIDEST:
        copies = len(tiles.rows[0][0])
        return Text(f"{len(names)} × {len(names[0])} tiles, each on {copies}")
    drawn = Text()
    for i, row in enumerate(names):
        drawn.append("\n" if i else "")
        for j, name in enumerate(row):
            colour = _COLOURS[(i * len(row) + j) % len(_COLOURS)]
            drawn.append(name.center(width), style=f"black on {colour}")
    return drawn


def parameter_table(shapes: Any, shardings: Any, count: int = 4) -> Table:
    """The biggest arrays of a tree: shape, spec, what each device holds, and a picture.

    Args:
        shapes: A tree of things with a ``shape`` and a ``size``.
        shardings: A tree of named shardings in the same structure.
        count: Arrays to show.

    Returns:
        A table for a rich console.
    """
    named = jax.tree_util.tree_leaves_with_path(shapes)
    pairs = list(zip(named, jax.tree.leaves(shardings), strict=True))
    pairs.sort(key=lambda pair: -pair[0][1].size)
    table = Table(title="The biggest parameters", title_justify="left", title_style="bold")
    table.add_column("parameter\nand its mesh axes", no_wrap=True)
    table.add_column("shape\nand tile", no_wrap=True)
    table.add_column("devices\nof each tile", no_wrap=True)
    for (path, leaf), sharding in pairs[:count]:
        tiles = tiling(leaf.shape, sharding)
        table.add_row(
            f"{path_name(path)}\n  {_spec(sharding.spec)}",
            f"{_times(leaf.shape)}\n{_times(tiles.tile)}",
            picture(tiles),
        )
    return table


def bytes_per_device(shapes: Any, shardings: Any) -> tuple[int, int]:
    """Bytes of all arrays of a tree, and of the parts that one device holds."""
    total = held = 0
    for leaf, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True):
        total += math.prod(leaf.shape) * leaf.dtype.itemsize
        held += math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total, held


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _spec(spec: Any) -> str:
    parts = ("+".join(x) if isinstance(x, tuple) else str(x or "·") for x in spec)
    return ", ".join(parts)
