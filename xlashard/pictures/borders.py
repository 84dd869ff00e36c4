"""Lines between the cells of a grid, thin within a host and thick between hosts."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from xlashard.pictures.picture_plan import Cell

THIN, THICK = 1, 2

# By the weight of the arms: up × 27 + right × 9 + down × 3 + left.
_BOX = " ╴╸╷┐┑╻┒┓╶─╾┌┬┭┎┰┱╺╼━┍┮┯┏┲┳╵┘┙│┤┥╽┧┪└┴┵├┼┽┟╁╅┕┶┷┝┾┿┢╆╈╹┚┛╿┦┩┃┨┫┖┸┹┞╀╃┠╂╉┗┺┻┡╄╇┣╊╋"


class Borders(NamedTuple):
    """The weights of all lines around the cells of a grid.

    Attributes:
        across: The lines above each row and below the last, `[rows + 1][columns]`.
        down: The lines left of each column and right of the last, `[rows][columns + 1]`.
    """

    across: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cells: Sequence[Sequence[Cell | None]], *, has_hosts: bool) -> "Borders":
        """Return the borders of a grid of tiles.

        Args:
            cells: Rows of tiles.
            has_hosts: Whether the picture has several hosts.
        """
        edge = THICK if has_hosts else THIN
        columns = list(zip(*cells, strict=True))
        down = tuple(_between(row, edge) for row in cells)
        across = zip(*(_between(column, edge) for column in columns), strict=True)
        return cls(tuple(across), down)

    def crossing(self, row: int, column: int, *, ascii_only: bool = False) -> str:
        """Return the character where the lines above a row and left of a column meet."""
        up = self.down[row - 1][column] if row else 0
        down = self.down[row][column] if row < len(self.down) else 0
        left = self.across[row][column - 1] if column else 0
        right = self.across[row][column] if column < len(self.across[row]) else 0
        if ascii_only:
            return "#" if THICK in (up, down, left, right) else "+"
        return _BOX[up * 27 + right * 9 + down * 3 + left]


def line(weight: int, *, down: bool, ascii_only: bool = False) -> str:
    """Return the character of a straight line."""
    if ascii_only:
        return ("|#" if down else "-=")[weight - 1]
    return ("│┃" if down else "─━")[weight - 1]


def _between(cells: Sequence[Cell | None], edge: int) -> tuple[int, ...]:
    inner = (THICK if a and b and a.hosts != b.hosts else THIN for a, b in pairwise(cells))
    return (edge, *inner, edge)
