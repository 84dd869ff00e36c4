"""Amounts by nested names, and their drawings on pages: treemaps and flame graphs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, Self

from xlashard.support.formatting import in_percent

_WIDTH = 1000.0
"""Width of a drawing, in about as many pixels."""
_HEIGHT = 340.0
_LINE = 20.0
"""Height of a line of text, in pixels."""
_MARGIN = 3.0
_LEAST_SHARE = 0.002
"""Least share of the whole that has a box of its own."""
_DEEPEST = 6
_MOST_WORDS = 12
"""Most boxes in the description of a drawing."""


@dataclass(frozen=True)
class Tree:
    """Amount with its parts.

    Attributes:
        name: Its name, within the whole that it is a part of.
        amount: Its amount: that of all parts together.
        parts: Its parts, the largest first.
    """

    name: str
    amount: float
    parts: Sequence[Self] = ()


def make_tree(name: str, amounts: Iterable[tuple[Sequence[str], float]]) -> Tree:
    """Return amounts as a tree, the largest first.

    Args:
        name: Name of the whole.
        amounts: Amounts by their names, from the outermost in, each with what separates it from
            the one before. Two names become one where the first has no part but the second.

    Example:
        >>> tree = make_tree("step", [(["mlp", "/dot"], 5.0), (["add"], 1.0), (["mlp", "/sin"], 2)])
        >>> [(part.name, part.amount, len(part.parts)) for part in tree.parts]
        [('mlp', 7.0, 2), ('add', 1.0, 0)]
    """
    kept = sorted((tuple(path), amount) for path, amount in amounts if amount > 0)
    return _nest(name, kept, sum(amount for _, amount in kept) * _LEAST_SHARE, _DEEPEST)


def _nest(
    name: str, amounts: Sequence[tuple[tuple[str, ...], float]], least: float, depth: int
) -> Tree:
    whole = sum(amount for _, amount in amounts)
    groups = groupby((each for each in amounts if each[0]), key=lambda each: each[0][0])
    named = [(first, [(path[1:], amount) for path, amount in group]) for first, group in groups]
    if not named or not depth:
        return Tree(name, whole)
    is_whole = depth == _DEEPEST
    if len(named) == 1 and not is_whole and all(path for path, _ in amounts):
        return _nest(f"{name}{named[0][0]}", named[0][1], least, depth)
    parts = [_nest(first, group, least, depth - 1) for first, group in named]
    shown = [part for part in parts if part.amount >= least]
    if small := [part for part in parts if part.amount < least]:
        shown.append(Tree(f" {len(small):,} more", sum(part.amount for part in small)))
    return Tree(name, whole, sorted(shown, key=lambda part: -part.amount))


class TreeBox(NamedTuple):
    """Box of a drawing.

    Attributes:
        x: Percent of the width.
        y: Pixels from the top.
        width: Percent of the width.
        height: Pixels.
        kind: CSS class.
        text: Name inside.
        title: Name within the whole, amount and share.
    """

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str
    title: str


@dataclass(frozen=True)
class TreeDrawing:
    """Drawing of a tree with boxes, the largest at the left.

    Attributes:
        tree: The tree.
        format_amount: Returns an amount with its unit.
        is_map: Whether boxes lie in that of their whole, in proportion; otherwise below it.
    """

    tree: Tree
    format_amount: Callable[[float], str]
    is_map: bool = False
    boxes: list[TreeBox] = field(init=False)

    template = "tree.html"

    def __post_init__(self) -> None:
        walk = self._map(self.tree, (0.0, 0.0, _WIDTH, _HEIGHT), "") if self.is_map else None
        object.__setattr__(self, "boxes", list(walk or self._flames(self.tree, 0.0, 0, "")))

    @property
    def height(self) -> float:
        """Height in pixels."""
        return max(box.y + box.height for box in self.boxes)

    @property
    def words(self) -> str:
        """Its largest parts, for readers without the drawing."""
        largest = sorted(self.boxes, key=lambda box: -box.width * box.height)[:_MOST_WORDS]
        return "; ".join(box.title for box in largest)

    def _box(self, part: Tree, place: tuple[float, float, float, float], path: str) -> TreeBox:
        x, y, width, height = place
        share = in_percent(part.amount / self.tree.amount)
        title = f"{path or part.name}: {self.format_amount(part.amount)}, {share}"
        kind = (path.partition(" ")[0] or "other") if self.is_map else "flame"
        return TreeBox(
            100 * x / _WIDTH, y, 100 * width / _WIDTH, height, kind, part.name.strip(" /"), title
        )

    def _flames(self, part: Tree, x: float, depth: int, path: str) -> Iterator[TreeBox]:
        """Yield the box of a part, and below it those of its parts, side by side."""
        width = _WIDTH * part.amount / self.tree.amount
        yield self._box(part, (x, depth * _LINE, width, _LINE), path)
        for inner in part.parts:
            yield from self._flames(inner, x, depth + 1, path + inner.name)
            x += _WIDTH * inner.amount / self.tree.amount

    def _map(
        self, part: Tree, place: tuple[float, float, float, float], path: str
    ) -> Iterator[TreeBox]:
        """Yield the box of a part, and inside of it those of its parts, below its name."""
        x, y, width, height = place
        if path:
            yield self._box(part, place, path)
            x, width = x + _MARGIN, width - 2 * _MARGIN
            y, height = y + _LINE, height - _LINE - _MARGIN
        if part.parts and width > _LINE and height > _LINE / 2:
            inside = _tile([inner.amount for inner in part.parts], x, y, width, height)
            for inner, place in zip(part.parts, inside, strict=True):
                yield from self._map(inner, place, path + inner.name)


def _tile(
    amounts: Sequence[float], x: float, y: float, width: float, height: float
) -> Iterator[tuple[float, float, float, float]]:
    """Yield a box for each amount, in proportion to it and as near to a square as possible."""
    rest = list(amounts)
    while rest:
        side, unit = min(width, height), width * height / sum(rest)

        count = 1
        while count < len(rest) and _find_longest(rest[: count + 1], side**2 / unit) <= (
            _find_longest(rest[:count], side**2 / unit)
        ):
            count += 1
        row, rest = rest[:count], rest[count:]
        depth = sum(row) * unit / side
        start = 0.0
        for amount in row:
            length = side * amount / sum(row)
            if width >= height:
                yield x, y + start, depth, length
            else:
                yield x + start, y, length, depth
            start += length
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth


def _find_longest(row: Sequence[float], square: float) -> float:
    """Return the ratio of the sides of the longest box of a row.

    Args:
        row: Amounts of the boxes beside each other.
        square: Amount of a square of the row's length.
    """
    ratios = [amount * square / sum(row) ** 2 for amount in (min(row), max(row))]
    return max(*ratios, *(1 / ratio for ratio in ratios))
