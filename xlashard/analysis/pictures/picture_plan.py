"""Plan of a picture: a grid of tiles with their devices, and omitted parts.

Dimensions that are cut become columns (the last of them), rows (the one before) and panels (all
others); a dimension that is not sharded is only named. Of long rows the first and last tiles are
drawn, and everything here costs what is drawn, not what the devices number.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from xlashard.analysis.pictures.subject import LISTED, PictureSubject, Places
from xlashard.geometry import Runs, head_and_tail

COLOURS = (
    "#77aadd",
    "#ee8866",
    "#eedd88",
    "#ffaabb",
    "#44bb99",
    "#bbcc33",
    "#99ddff",
    "#cfb8e6",
)
"""Backgrounds; the first seven are of Paul Tol's scheme for labelled cells."""


INK = "#111111"
"""Text on any of them."""


BLANK = "#d4d4d4"
"""The background of a tile without elements or without holders."""


def cut_text(cut: slice) -> str:
    """Return a range as an index: `0:2`."""
    return f"{cut.start}:{cut.stop}"


@dataclass(frozen=True)
class Shown:
    """Numbers of a row that are drawn.

    Attributes:
        first: Count from the start.
        last: Up to its end, where some between are left out; otherwise none.
        left_out: Number of omitted ones.
    """

    first: range
    last: range
    left_out: int

    def __iter__(self) -> Iterator[int | None]:
        """Return the numbers in order, with None where some are left out."""
        yield from self.first
        if self.last:
            yield None
            yield from self.last

    def __len__(self) -> int:
        return len(self.first) + (1 + len(self.last) if self.last else 0)

    @property
    def left_out_text(self) -> str:
        """Text for omitted tiles of a row."""
        return f"… {self.left_out:,} more …" if self.left_out else ""


@dataclass(frozen=True)
class Cell:
    """A tile.

    Attributes:
        index: Its slices, with start and stop.
        ids: The ids of the devices that hold it, or their positions on a mesh without devices.
        hosts: Process indices of those devices; None on a mesh without devices.
        by_host: The ids by process.
        colour: Its background, `"#rrggbb"`.
    """

    index: tuple[slice, ...]
    ids: Runs
    hosts: Runs | None
    by_host: tuple[tuple[int, Runs], ...]
    colour: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tile."""
        return tuple(cut.stop - cut.start for cut in self.index)


@dataclass(frozen=True)
class Panel:
    """A grid of tiles that differ in two dimensions at most.

    Attributes:
        places: The coordinates of its tiles in the dimensions that make the panels.
        cells: Rows of tiles, `[rows][columns]`; None where some are left out.
    """

    places: Places
    cells: tuple[tuple[Cell | None, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A grid of tiles, ready to be drawn.

    Attributes:
        subject: The array.
        row_dim: The dimension that runs down; None where none does.
        column_dim: The dimension that runs across; None where none does.
        panel_dims: The dimensions by which panels differ.
        rows: The tiles of `row_dim` that are drawn.
        columns: The tiles of `column_dim` that are drawn.
        panel_numbers: The panels that are drawn, counted row-major.
        panels: The drawn panels, None for omitted ones.
    """

    subject: PictureSubject
    row_dim: int | None
    column_dim: int | None
    panel_dims: tuple[int, ...]
    rows: Shown
    columns: Shown
    panel_numbers: Shown
    panels: tuple[Panel | None, ...]

    @property
    def whole_dims(self) -> tuple[int, ...]:
        """Replicated dimensions."""
        placement, shape = self.subject.placement, self.subject.shape
        return tuple(
            dim
            for dim, (size, count) in enumerate(zip(shape, placement.counts, strict=True))
            if count == 1 and placement.cut(dim, 0) == slice(0, size)
        )

    @property
    def cells(self) -> Iterator[Cell]:
        """All tiles that are drawn."""
        rows = (row for panel in self.panels if panel for row in panel.cells)
        return (cell for row in rows for cell in row if cell)

    @cached_property
    def has_hosts(self) -> bool:
        """True if the devices belong to several processes."""
        return len({host for cell in self.cells for host in cell.hosts or ()}) > 1

    def panels_across(self, fit: int) -> int:
        """Return the number of panels per line.

        One line holds the last of several panel dimensions; otherwise lines are of equal length.
        """
        if not self.panel_dims or fit < 2:
            return 1
        last = self.subject.placement.counts[self.panel_dims[-1]]
        if len(self.panel_dims) > 1 and last <= fit:
            return last
        longest = max(len(self.panel_numbers.first), len(self.panel_numbers.last))
        return -(-longest // -(-longest // fit))

    @cached_property
    def row_names(self) -> list[str]:
        """Text left of each drawn row; empty if no dimension runs down."""
        return self._names(self.row_dim, self.rows)

    @cached_property
    def column_names(self) -> list[str]:
        """Text above each drawn column; empty if no dimension runs across."""
        return self._names(self.column_dim, self.columns)

    def _names(self, dim: int | None, numbers: Shown) -> list[str]:
        if dim is None:
            return []
        cut = self.subject.placement.cut
        return [numbers.left_out_text if n is None else cut_text(cut(dim, n)) for n in numbers]

    @property
    def num_tiles(self) -> int:
        """Number of tiles, drawn or not."""
        return math.prod(self.subject.placement.counts)


def plan_picture(subject: PictureSubject, most: int, most_columns: int | None = None) -> Picture:
    """Choose what to draw.

    Args:
        subject: The array.
        most: Tiles to draw along a dimension, at least 2; of more, some of the first and the last.
        most_columns: Maximum number of columns; None for any.
    """
    counts = subject.placement.counts
    cut = [dim for dim, count in enumerate(counts) if count > 1]
    row_dim, column_dim = _down_and_across(cut, len(counts))
    panel_dims = tuple(dim for dim in cut if dim not in (row_dim, column_dim))
    rows = _shown(1 if row_dim is None else counts[row_dim], most)
    columns = _shown(1 if column_dim is None else counts[column_dim], most, most_columns)
    # All panels together have no more tiles than the biggest one could have.
    fitting = max(2, most * most // (len(rows) * len(columns)))
    panel_numbers = _shown(math.prod(counts[dim] for dim in panel_dims), most, fitting)
    share = max(32, LISTED // (len(rows) * len(columns) * len(panel_numbers)))

    def cell(panel: int, at: Places, row: int | None, column: int | None) -> Cell | None:
        if row is None or column is None:
            return None
        place_of = dict(zip((*panel_dims, row_dim, column_dim), (*at, row, column), strict=True))
        places = tuple(place_of.get(dim, 0) for dim in range(len(counts)))
        return _cell(subject, places, share, column + 3 * row + 5 * panel)

    panels: list[Panel | None] = []
    for number in panel_numbers:
        if number is None:
            panels.append(None)
            continue
        at = tuple(map(int, np.unravel_index(number, [counts[dim] for dim in panel_dims])))
        cells = tuple(tuple(cell(number, at, r, c) for c in columns) for r in rows)
        panels.append(Panel(at, cells))
    return Picture(
        subject, row_dim, column_dim, panel_dims, rows, columns, panel_numbers, tuple(panels)
    )


def _shown(count: int, most: int, room: int | None = None) -> Shown:
    """Return the numbers of a row to draw.

    Where that many could be drawn, but not all, half will do to show how it goes on.
    """
    room = most if room is None else room
    head, tail = head_and_tail(count, room if count <= most else min(room, max(2, most // 2)))
    return Shown(range(head), range(count - tail, count), count - head - tail)


def _down_and_across(cut: Sequence[int], ndim: int) -> tuple[int | None, int | None]:
    """Return the dimensions of rows and columns; the last one runs across."""
    if len(cut) >= 2:
        return cut[-2], cut[-1]
    if not cut:
        return None, None
    return (None, cut[0]) if cut[0] == ndim - 1 else (cut[0], None)


def _cell(subject: PictureSubject, places: Places, share: int, mixed: int) -> Cell:
    """Return a tile.

    Args:
        subject: The array.
        places: The tile's coordinates.
        share: Maximum number of devices to examine.
        mixed: Colour index, distinct from those of neighbours.
    """
    placement = subject.placement
    index = tuple(placement.cut(dim, place) for dim, place in enumerate(places))
    ids, by_host = _names(subject, placement.holders(places, share), share)
    hosts = None if subject.devices is None else _hosts(ids, by_host)
    if not ids.count or (not placement.is_even and any(cut.start == cut.stop for cut in index)):
        colour = BLANK
    elif math.prod(placement.counts) <= len(COLOURS):
        colour = COLOURS[np.ravel_multi_index(places, placement.counts)]
    else:
        colour = COLOURS[mixed % len(COLOURS)]
    return Cell(index, ids, hosts, by_host, colour)


def _names(
    subject: PictureSubject, positions: Runs, share: int
) -> tuple[Runs, tuple[tuple[int, Runs], ...]]:
    """Return the ids of the devices at some positions, and by the host that they belong to."""
    devices = subject.devices
    if devices is None:
        return positions, ()
    head, tail = _sample(positions, share)
    first, last = ([devices[p] for p in part] for part in (head, tail))
    by_host: dict[int, list[int]] = {}
    for device in (*first, *last):
        by_host.setdefault(device.process_index, []).append(device.id)
    listed, rest = (Runs.of([d.id for d in part]).first for part in (first, last))
    grouped = tuple((host, Runs.of(by_host[host])) for host in sorted(by_host))
    return Runs(listed, rest, positions.count), grouped


def _hosts(ids: Runs, by_host: Iterable[tuple[int, Runs]]) -> Runs:
    """Return the processes of some devices, separating the last ones after an omission."""
    numbers = [host for host, _ in by_host]
    if ids.is_whole or len(numbers) == 1:
        return Runs.of(numbers)
    *first, last = numbers
    return Runs(Runs.of(first).first, Runs.of([last]).first, len(numbers))


def _sample(runs: Runs, most: int) -> tuple[list[int], list[int]]:
    """Return the first and the last numbers of runs; all of them as the first if they are few."""
    head, tail = head_and_tail(runs.count, most)
    if not tail and runs.is_whole:
        return list(runs), []
    first = islice((n for run in runs.first for n in run), head)
    ends = runs.last or runs.first
    last = islice((n for run in reversed(ends) for n in reversed(run)), tail)
    return list(first), list(last)[::-1]


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
