"""`visualize`: draw how an array or a tree of arrays lies on its devices."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, overload

import jax
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from xlashard.analysis.pictures.picture_plan import Cell, Picture, plan_picture
from xlashard.analysis.pictures.picture_text import runs_text, type_text
from xlashard.analysis.pictures.subject import PictureSubject
from xlashard.analysis.pictures.subject_reader import is_place, is_shape, read_subject
from xlashard.analysis.pictures.svg_html import fragment, page, render, svg_text
from xlashard.analysis.pictures.terminal import Printable, TerminalCapabilities, terminal_lines
from xlashard.errors import ArgumentError, GeometryError, ShardingError, counted
from xlashard.support.formatting import in_bytes, shape_text
from xlashard.support.tracebacks import short_tracebacks

_SHOWN = 16
"""Arrays that are drawn; the rest is counted."""

_SMALL = 8
"""Tiles along a dimension of a small picture."""


@dataclass(frozen=True)
class TreeLeaf:
    """An array of a tree.

    Attributes:
        path: Path in the tree.
        subject: The array.
    """

    path: str
    subject: PictureSubject

    @property
    def device_bytes(self) -> int:
        """Bytes on one device."""
        return self.subject.tile_bytes or 0


@dataclass(frozen=True, repr=False)
class TreePicture(Printable):
    """Picture of a tree's shardings. Made by `xlashard.visualize`.

    It shows the biggest ones; a notebook and a page unfold the picture of each.

    Attributes:
        leaves: The arrays, the biggest first.
        unplaced: Paths of leaves without a sharding, such as host values.
        title: Title.

    Example:
        >>> import numpy as np
        >>> from xlashard import device_put, visualize
        >>> [leaf.path for leaf in visualize({"w": device_put(np.ones(4))}).leaves]
        ["['w']"]
    """

    leaves: tuple[TreeLeaf, ...]
    unplaced: tuple[str, ...] = ()
    title: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, copies counted once."""
        return sum(leaf.subject.nbytes or 0 for leaf in self.leaves)

    @property
    def device_bytes(self) -> int:
        """Bytes of all arrays that one device holds."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    def biggest(self, count: int, title: str = "") -> Self:
        """Return a picture of only the biggest arrays.

        Args:
            count: Number of arrays.
            title: Title.
        """
        return replace(self, leaves=self.leaves[:count], unplaced=(), title=title)

    def to_html(self) -> str:
        """Return a page in which the picture of each array expands."""
        return render("page.html", title=self._heading(), body=self._repr_html_(), cells=())

    def _repr_html_(self) -> str:
        leaves = [
            (
                leaf.path,
                f"{type_text(leaf.subject)} {leaf.subject.sharding}, "
                f"{in_bytes(leaf.device_bytes)} on each device",
                fragment(plan_picture(leaf.subject, 16)),
            )
            for leaf in self.leaves[:_SHOWN]
        ]
        return render("tree.html", title=self._heading(), leaves=leaves, rest=list(self._rest()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        screen = TerminalCapabilities.of(console, options)
        say = screen.encoded
        yield Text(say(self._heading()), "bold")
        table = Table(box=box.SIMPLE_HEAD, leading=1, header_style="dim", pad_edge=False)
        for name in ("array\nand its sharding", "shape\nand tile", "devices\nof each tile"):
            table.add_column(name, overflow="fold")
        room = max(12, options.max_width // 2)
        for leaf in self.leaves[:_SHOWN]:
            subject = leaf.subject
            table.add_row(
                say(f"{leaf.path}\n  {subject.sharding}"),
                say(f"{type_text(subject)}\n{_held(subject)}"),
                _small_picture(subject, room, screen),
            )
        yield table
        for line in self._rest():
            yield Text(say(line), "dim")

    def _heading(self) -> str:
        return self.title or (
            f"{counted(len(self.leaves), 'array')}: {in_bytes(self.nbytes)}, "
            f"{in_bytes(self.device_bytes)} on each device"
        )

    def _rest(self) -> Iterator[str]:
        left = self.leaves[_SHOWN:]
        if left:
            held = in_bytes(sum(leaf.device_bytes for leaf in left))
            yield f"and {len(left)} smaller, {held} on each device"
        if self.unplaced:
            few = ", ".join(self.unplaced[:4]) + (", …" if len(self.unplaced) > 4 else "")
            yield f"without a sharding: {few}"


def is_tree(x: Any) -> bool:
    """Return whether a value is a tree of arrays rather than an array or a shape."""
    if is_shape(x) or hasattr(x, "shape"):
        return False
    leaves = jax.tree.leaves(x)
    return bool(leaves) and any(hasattr(leaf, "shape") for leaf in leaves)


def read_tree(tree: Any, sharding: Any = None) -> TreePicture:
    """Read every array of a tree.

    Args:
        tree: Tree of arrays, or of objects with a shape and a dtype.
        sharding: A sharding for all, or a tree of them that is a prefix of the other; None for the
            arrays' own.

    Raises:
        ArgumentError: The trees differ, or one of the shardings doesn't fit its array.
    """
    named = jax.tree_util.tree_leaves_with_path(tree)
    leaves, unplaced = [], []
    for (path, x), own in zip(named, _for_each(tree, sharding), strict=True):
        name = jax.tree_util.keystr(path)
        if own is None and not hasattr(x, "sharding"):
            unplaced.append(name)
            continue
        try:
            leaves.append(TreeLeaf(name, read_subject(x, own)))
        except (ArgumentError, GeometryError, ShardingError) as error:
            raise ArgumentError(f"the tree at {name}: {error}") from None
    leaves.sort(key=lambda leaf: -(leaf.subject.nbytes or 0))
    return TreePicture(tuple(leaves), tuple(unplaced))


def _for_each(tree: Any, sharding: Any) -> Sequence[Any]:
    """Return the sharding of each leaf, None where it has its own."""
    if sharding is None or is_place(sharding):
        return [sharding] * len(jax.tree.leaves(tree))
    try:
        spread = jax.tree.broadcast(sharding, tree, is_leaf=lambda x: x is None or is_place(x))
    except ValueError:
        prefix, whole = (str(jax.tree.structure(t))[:80] for t in (sharding, tree))
        raise ArgumentError(
            f"sharding is the tree {prefix}, which is no prefix of the arrays' tree {whole}: give "
            "one sharding for all, or jax.tree.map(lambda x: NamedSharding(mesh, P()), tree)"
        ) from None
    return jax.tree.leaves(spread, is_leaf=lambda x: x is None or is_place(x))


def _held(subject: PictureSubject) -> str:
    return f"{shape_text(subject.placement.tile)}, {in_bytes(subject.tile_bytes or 0)}"


def _small_picture(subject: PictureSubject, room: int, screen: TerminalCapabilities) -> Text:
    """Return a line per row of tiles, each in its colour with its devices."""
    picture = plan_picture(subject, _SMALL)
    rows = list(_lines(picture))
    names = [[screen.encoded(_name(cell)) for cell in row] for row in rows]
    width = max(len(name) for row in names for name in row) + 2
    if width * max(map(len, names)) > room:
        counts = " × ".join(str(n) for n in subject.placement.counts if n > 1)
        copies = subject.placement.num_devices // max(1, math.prod(subject.placement.counts))
        text = f"{counts} tiles, each on {counted(copies, 'device')}"
        text += ", unreduced" if subject.placement.addends > 1 else ""
        return Text(screen.encoded(text))
    drawn = Text()
    for number, (row, words) in enumerate(zip(rows, names, strict=True)):
        drawn.append("\n" if number else "")
        for cell, name in zip(row, words, strict=True):
            drawn.append(name.center(width), screen.style(cell))
    return drawn


def _lines(picture: Picture) -> Iterator[tuple[Cell | None, ...]]:
    """Yield the rows of all panels, one under the other."""
    for panel in picture.panels:
        if panel is None:
            yield (None,)
        else:
            yield from panel.cells


def _name(cell: Cell | None) -> str:
    return "…" if cell is None else runs_text(cell.ids, 14) or "no device"


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

    Example:
        >>> from xlashard import AbstractMesh, NamedSharding, P
        >>> picture = visualize((4, 6), NamedSharding(AbstractMesh((2,), ("data",)), P("data")))
        >>> picture.to_svg().startswith("<svg")
        True
    """

    subject: PictureSubject
    max_tiles: int

    @property
    def plan(self) -> Picture:
        """The tiles that SVG and HTML show, as values; a terminal may have room for fewer."""
        return plan_picture(self.subject, self.max_tiles)

    def to_svg(self) -> str:
        """Return the picture as an SVG file, which needs nothing else and suits any background."""
        return svg_text(self.plan)

    def to_html(self) -> str:
        """Return a page with the picture and a table of its tiles."""
        return page(self.plan)

    def _writers(self) -> Mapping[str, Callable[[], str]]:
        return {".svg": self.to_svg, **super()._writers()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        screen = TerminalCapabilities.of(console, options)
        yield from terminal_lines(self.subject, self.max_tiles, screen)

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
