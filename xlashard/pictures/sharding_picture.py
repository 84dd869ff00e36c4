"""`visualize`: how arrays lie on their devices, for a terminal, a notebook or a file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
from rich.console import Console, ConsoleOptions, RenderResult

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import ArgumentError
from xlashard.pictures.page import fragment, page
from xlashard.pictures.picture_plan import Picture, plan_picture
from xlashard.pictures.printable import Printable
from xlashard.pictures.subject import PictureSubject, read_subject
from xlashard.pictures.svg import svg_text
from xlashard.pictures.terminal import TerminalPicture
from xlashard.pictures.tree import TreePicture, is_tree, read_tree

_MOST = 16


@dataclass(frozen=True, repr=False)
class ShardingPicture(Printable):
    """Picture of an array's sharding. Made by `xlashard.visualize`.

    A prompt and a notebook show it by themselves, `print(picture)` writes it as plain text, and
    `picture.print()` or rich's `print` in colours: one for each tile. Copies of a tile are in one
    cell. Thick lines run between the devices of different hosts.

    Attributes:
        subject: The array.
        max_tiles: Maximum number of tiles drawn along a dimension; of more, the first and the last.
    """

    subject: PictureSubject
    max_tiles: int

    @property
    def plan(self) -> Picture:
        """The tiles that SVG and HTML show, as values; a terminal may have room for fewer."""
        return plan_picture(self.subject, self.max_tiles)

    def to_svg(self) -> str:
        """Return the picture as an SVG file, which needs nothing else and suits any background."""
        return svg_text(self.plan, alone=True)

    def to_html(self) -> str:
        """Return a page with the picture and a table of its tiles."""
        return page(self.plan)

    def _writers(self) -> Mapping[str, Callable[[], str]]:
        return {".svg": self.to_svg, **super()._writers()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield TerminalPicture(self.subject, self.max_tiles)

    def _repr_html_(self) -> str:
        return fragment(self.plan)


@overload
def visualize(
    x: jax.Array | jax.ShapeDtypeStruct | Sequence[int],
    sharding: Any = None,
    *,
    max_tiles: int = _MOST,
) -> ShardingPicture: ...


@overload
def visualize(
    x: Any, sharding: Any = None, *, max_tiles: int = _MOST
) -> ShardingPicture | TreePicture: ...


def visualize(
    x: Any, sharding: Any = None, *, max_tiles: int = _MOST
) -> ShardingPicture | TreePicture:
    """Draw how an array lies on its devices, or how one would.

    Nothing is read, moved or computed, and drawing costs what is drawn, however many devices there
    are. Nothing is printed either: a prompt and a notebook show what comes back.

    Args:
        x: An array of xlashard or JAX; any object with `shape` and `dtype`, such as a
            `jax.ShapeDtypeStruct`; a shape, such as `(8, 16)`; or a tree of arrays.
        sharding: A sharding of xlashard, of JAX or of your own, or a `PartitionSpec` where a mesh
            is in force; None for the array's own. On an `AbstractMesh`, positions stand for
            devices. It need not divide the shape. For a tree, one for all or a tree of them.
        max_tiles: Maximum number of tiles drawn along a dimension, at least 2; of more, the first
            and the last are drawn.

    Returns:
        The picture: `print` it, `picture.save("x.svg")`, or let a notebook show it. Of a tree, a
            `TreePicture`, with a small picture of each of its biggest arrays.

    Raises:
        ArgumentError: If `x` is neither array nor shape, has no sharding, or is traced and its
            sharding is up to the compiler.
        GeometryError: The sharding doesn't fit the shape.

    Example:
        >>> from xlashard import AbstractMesh, NamedSharding, P
        >>> mesh = AbstractMesh((2, 2), ("data", "model"))
        >>> print(visualize((4, 6), NamedSharding(mesh, P("model", "data"))))
        [4,6]  P('model', 'data') on data=2 × model=2
          devices  4 devices, each holds [2,3]
          #        a position on the mesh, row-major; it has no devices
          rows     dimension 0 (4) in 2 tiles of 2, along model=2
          columns  dimension 1 (6) in 2 tiles of 3, along data=2
        <BLANKLINE>
                0:3   3:6
              ┌─────┬─────┐
          0:2 │ #0  │ #2  │
              ├─────┼─────┤
          2:4 │ #1  │ #3  │
              └─────┴─────┘
    """
    if isinstance(max_tiles, bool) or not isinstance(max_tiles, int) or max_tiles < 2:
        raise ArgumentError(
            f"max_tiles is {max_tiles!r}, but a picture needs room for the first and the last tile "
            "along a dimension: give 2 or more, such as visualize(x, max_tiles=16)"
        )
    with short_tracebacks:
        if is_tree(x):
            return read_tree(x, sharding)
        return ShardingPicture(read_subject(x, sharding), max_tiles)


def html_of(x: Any, value: str = "") -> str | None:
    """Return the HTML of an array for notebooks, or None for a single tile.

    Args:
        x: The array; only its type and its sharding are looked at.
        value: A text of its value, where one is at hand.
    """
    picture = plan_picture(read_subject(x), _MOST)
    return fragment(picture, value) if picture.num_tiles > 1 else None
