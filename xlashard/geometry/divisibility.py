"""Sentences about dimensions that do not divide into the tiles of a sharding."""

from collections.abc import Sequence


def divisibility_text(
    dim: int, shape: Sequence[int], tiles: int, factors: Sequence[tuple[str, int]] = ()
) -> str:
    """Return a sentence with all the numbers, and the nearest sizes that divide."""
    below = shape[dim] // tiles * tiles
    good = f"{below} or {below + tiles}" if below else f"{tiles}"
    return f"{uneven_text(dim, shape, tiles, factors)}; size {good} would"


def uneven_text(
    dim: int, shape: Sequence[int], tiles: int, factors: Sequence[tuple[str, int]] = ()
) -> str:
    """Return a sentence with the size of a dimension and the tiles into which it does not divide.

    Args:
        dim: The dimension.
        shape: Shape of the array.
        tiles: Number of tiles along the dimension.
        factors: `(name, size)` of the mesh axes that shard the dimension, if known.
    """
    behind = " * ".join(f"{name!r}={n}" for name, n in factors)
    return (
        f"dimension {dim} of shape {tuple(shape)} has size {shape[dim]}, which does not divide "
        f"into {tiles} tiles{f' ({behind})' if behind else ''}"
    )
