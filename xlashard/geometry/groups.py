"""Replica groups and source-target pairs of collectives, and the mesh axes that they run along.

HLO specifies the groups of a collective as device positions: a list, the formula of a tile
assignment, or axes of a mesh of the compiler. Groups with a formula are compared with the axes of
the user's mesh by their strides alone, so that the cost does not depend on the number of devices.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from xlashard.errors import GroupTextError, TilingError, counted
from xlashard.geometry import strides
from xlashard.geometry.mesh import MeshGrid
from xlashard.geometry.tile_assignment import TileAssignment
from xlashard.support.lazily import dataclass


@dataclass(frozen=True, slots=True)
class AxisPart:
    """A mesh axis, or one digit of its coordinate, along which devices communicate.

    Attributes:
        name: The axis.
        size: Number of devices along the part.
        before: Into how many blocks the axis is cut before the part starts; 1 for its major part.
        axis_size: Number of devices along the whole axis.
    """

    name: str
    size: int
    before: int
    axis_size: int

    @property
    def is_whole(self) -> bool:
        """Return whether it is the axis itself."""
        return self.size == self.axis_size

    def __str__(self) -> str:
        """Return `x`, or `x:(2)4` for groups of 4 in an axis that is first cut into 2 blocks."""
        return self.name if self.is_whole else f"{self.name}:({self.before}){self.size}"


type AxisParts = tuple[AxisPart, ...]
"""Parts of different digits, in the order of the mesh, major to minor."""


@dataclass(frozen=True)
class ReplicaGroups:
    """Disjoint groups of device positions. Made by `read_groups` or by a class method.

    Attributes:
        count: Number of groups.
        size: Number of devices in each; in the largest, where they differ.
        steps: For groups with a formula: the digits of the device at each place of
            `[count, size]`.
        listed: For groups without a formula: the devices of each.
    """

    count: int
    size: int
    steps: strides.Steps = ()
    listed: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def everyone(cls, num_devices: int) -> "ReplicaGroups":
        """Return one group of all devices."""
        return cls(1, num_devices, strides.merge([(num_devices, 1)]))

    @classmethod
    def of_list(cls, groups: Sequence[Sequence[int]]) -> "ReplicaGroups":
        """Return groups from lists of devices.

        Raises:
            GroupTextError: A device is in two groups, or a group is empty.
        """
        listed = tuple(tuple(int(device) for device in group) for group in groups)
        flat = [device for group in listed for device in group]
        if len(set(flat)) != len(flat) or not all(listed):
            raise GroupTextError(f"device groups must be disjoint and not empty: {list(listed)}")
        return cls(len(listed), max(map(len, listed), default=0), listed=listed)

    @classmethod
    def iota(
        cls, count: int, size: int, reshape_dims: Sequence[int], perm: Sequence[int] = ()
    ) -> "ReplicaGroups":
        """Return `arange(n).reshape(reshape_dims).transpose(perm).reshape(count, size)` as groups.

        Raises:
            GroupTextError: The numbers don't fit each other.
        """
        try:
            steps = TileAssignment.iota((count, size), reshape_dims, perm).steps()
        except TilingError as error:
            raise GroupTextError(f"device groups [{count},{size}]: {error}") from None
        return cls(count, size, steps)

    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each group."""
        if self.listed or not self.count:
            return self.listed
        rows = strides.place_all(self.steps).reshape(self.count, self.size)
        return tuple(map(tuple, rows.tolist()))

    def axes(self, grid: MeshGrid) -> AxisParts | None:
        """Return the axes of a mesh along which the groups run.

        Two devices are in one group if and only if they differ along these parts alone.

        Args:
            grid: The mesh.

        Returns:
            The parts, empty for groups of one device each; None where the groups match no axes, or
            leave out devices of the mesh.

        Example:
            >>> mesh = MeshGrid(("data", "model"), (2, 4))
            >>> list(map(str, ReplicaGroups.iota(4, 2, (2, 4), (1, 0)).axes(mesh)))
            ['data']
            >>> list(map(str, ReplicaGroups.of_list([[0, 2], [1, 3], [4, 6], [5, 7]]).axes(mesh)))
            ['model:(1)2']
        """
        return _find_axes(self, grid)

    def match_axes(self, grid: MeshGrid) -> AxisParts | None:
        """Compute the result of `axes`."""
        if self.count * self.size != grid.size:
            return None
        halves = None if self.listed else strides.split(self.steps, (self.count, self.size))
        if halves is not None:
            # The digits in which members of a group differ, major to minor.
            members = halves[1]
            digits = strides.merge([members[i] for i in strides.by_stride(members)])
            return _parts(digits, grid)
        groups = self.devices()
        if any(len(group) != self.size for group in groups):
            return None
        return _parts_of_rows(np.array(groups, np.int64), grid)

    def __str__(self) -> str:
        """Return `4 groups of 2 devices`."""
        return f"{counted(self.count, 'group')} of {counted(self.size, 'device')}"


@dataclass(frozen=True)
class SourceTargetPairs:
    """Source and target devices of a permutation.

    Attributes:
        pairs: Source and target of each transfer, as device positions.
    """

    pairs: tuple[tuple[int, int], ...]

    @property
    def moving(self) -> int:
        """Number of pairs of two different devices."""
        return sum(source != target for source, target in self.pairs)

    @property
    def ring_size(self) -> int:
        """Return the devices per ring of a permutation of equal rings; 0 for any other permutation.

        Example:
            >>> SourceTargetPairs(((0, 1), (1, 0), (2, 3), (3, 2))).ring_size
            2
            >>> SourceTargetPairs(((0, 0), (1, 2), (2, 1))).ring_size
            0
        """
        following, sizes = dict(self.pairs), set[int]()
        while following:
            first, current = following.popitem()
            size = 1
            while current != first:
                if current not in following:
                    return 0
                current = following.pop(current)
                size += 1
            sizes.add(size)
        return sizes.pop() if len(sizes) == 1 and sizes != {1} else 0

    def axes(self, grid: MeshGrid) -> AxisParts | None:
        """Return the smallest parts of mesh axes along which something is sent.

        Args:
            grid: The mesh.

        Returns:
            The parts; None if a device is not of the mesh.

        Example:
            >>> ring = SourceTargetPairs(((0, 1), (1, 0), (2, 3), (3, 2)))
            >>> list(map(str, ring.axes(MeshGrid(("x", "y"), (2, 2)))))
            ['y']
        """
        return _find_axes(self, grid)

    def match_axes(self, grid: MeshGrid) -> AxisParts | None:
        """Compute the result of `axes`."""
        if not self.pairs:
            return ()
        pairs = np.array(self.pairs, np.int64)
        if pairs.max() >= grid.size:
            return None
        coordinates = grid.coordinates(pairs)
        parts = []
        for axis, (name, size) in enumerate(grid.shape.items()):
            sources, targets = coordinates[:, 0, axis], coordinates[:, 1, axis]
            if np.array_equal(sources, targets):
                continue
            blocks = strides.divisors(size)
            block = next(d for d in blocks if np.array_equal(sources // d, targets // d))
            still = max(
                d for d in blocks if block % d == 0 and np.array_equal(sources % d, targets % d)
            )
            parts.append(AxisPart(name, block // still, size // block, size))
        return tuple(parts)

    def __str__(self) -> str:
        """Return `8 pairs of devices`."""
        return f"{counted(len(self.pairs), 'pair')} of devices"


@lru_cache(maxsize=256)
def _find_axes(groups: ReplicaGroups | SourceTargetPairs, grid: MeshGrid) -> AxisParts | None:
    """Return the axis parts of groups, once: a program has few groups, each hundreds of times."""
    return groups.match_axes(grid)


def _parts(digits: strides.Steps, grid: MeshGrid) -> AxisParts | None:
    """Return the axis parts that cover the digits of a position, major to minor."""
    parts: list[AxisPart] = []
    for size, stride in digits:
        covered = 1
        axes = zip(grid.shape.items(), strides.row_major(grid.axis_sizes), strict=True)
        for (name, axis_size), axis_stride in axes:
            end = axis_stride * axis_size
            low, high = max(stride, axis_stride), min(stride * size, end)
            if low >= high:
                continue
            if low % axis_stride or high % low or end % high:
                return None
            parts.append(AxisPart(name, high // low, end // high, axis_size))
            covered *= high // low
        if covered != size:
            return None
    return tuple(parts)


def _parts_of_rows(rows: npt.NDArray[np.int64], grid: MeshGrid) -> AxisParts | None:
    """Return the axis parts of listed groups, `[groups, members]`."""
    if not np.array_equal(np.sort(rows, axis=None), np.arange(grid.size)):
        return None
    rows = np.sort(rows, axis=1)
    rows = rows[np.argsort(rows[:, 0])]
    digits = strides.find(rows[0])
    parts = None if digits is None else _parts(digits, grid)
    if digits is None or parts is None:
        return None
    starts = rows[:, 0]
    if not np.array_equal(rows - starts[:, None], np.broadcast_to(rows[0], rows.shape)):
        return None
    # A group starts where all the digits in which its members differ are 0.
    aligned = all(not (starts // stride % size).any() for size, stride in digits)
    return parts if aligned else None


_LIST = re.compile(r"\{\s*((?:\{[\d,\s]*\}[,\s]*)*)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<devices>[^)]*(?:\([^)]*\))?)\))?"
    r" \{(?P<axes>[^}]*)\}"
)
_MESH_AXIS = re.compile(r"'((?:[^'\\]|\\.)*)'=(\d+)")
_MESH_PART = re.compile(r"'((?:[^'\\]|\\.)*)'(?::\((\d+)\)(\d+))?")


def read_groups(text: str, num_devices: int) -> ReplicaGroups:
    """Read the groups of a collective from the start of HLO text, in any of the three notations.

    Args:
        text: Begins with `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` or `mesh['x'=2,'y'=4] {'y'}`.
        num_devices: Number of devices that an empty list stands for.

    Raises:
        GroupTextError: The text does not begin with groups, or their numbers disagree.

    Example:
        >>> str(read_groups("[2,4]<=[8]", 8)), str(read_groups("{}", 8))
        ('2 groups of 4 devices', '1 group of 8 devices')
    """
    if match := _IOTA.match(text):
        count, size, dims, perm = match.groups()
        return ReplicaGroups.iota(int(count), int(size), _numbers(dims), _numbers(perm or ""))
    if match := _MESH.match(text):
        return _groups_of_text(match)
    if match := _LIST.match(text):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,\s]*)\}", match[1])]
        groups = [group for group in groups if group]
        return ReplicaGroups.of_list(groups) if groups else ReplicaGroups.everyone(num_devices)
    raise GroupTextError(f"expected replica groups at the start of {text[:60]!r}")


def read_pairs(text: str) -> SourceTargetPairs:
    """Read the pairs of a permutation from the start of HLO text, `{{0,1},{1,0}}`.

    Raises:
        GroupTextError: The text does not begin with pairs.
    """
    match = _LIST.match(text)
    pairs = [_numbers(p) for p in re.findall(r"\{([\d,\s]*)\}", match[1])] if match else []
    if match is None or any(len(pair) != 2 for pair in pairs):
        raise GroupTextError(f"expected source-target pairs at the start of {text[:60]!r}")
    return SourceTargetPairs(tuple((source, target) for source, target in pairs))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def mesh_groups(
    sizes: Mapping[str, int],
    parts: Sequence[tuple[str, int, int]],
    devices: Sequence[int] | None = None,
) -> ReplicaGroups:
    """Return groups along axes, or parts of axes, of a mesh of the compiler.

    Args:
        sizes: Size of each axis of the mesh.
        parts: Axis, number of blocks before the part, and size of the part; 0 for the whole axis.
        devices: The device at each position of the mesh; None if they are the same.

    Raises:
        GroupTextError: The mesh lacks an axis or a part of it, or has another number of devices.

    Example:
        >>> mesh_groups({"x": 2, "y": 4}, [("y", 1, 0)]).devices()
        ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    members: list[strides.Step] = []
    others: list[strides.Step] = []
    axes = zip(sizes.items(), strides.row_major(list(sizes.values())), strict=True)
    for (name, axis_size), stride in axes:
        reached = 1
        for before, size in sorted((b, s or axis_size) for n, b, s in parts if n == name):
            if before % reached or axis_size % (before * size):
                raise GroupTextError(f"axis {name!r} of {axis_size} lacks this part")
            others.append((before // reached, stride * (axis_size // before)))
            reached = before * size
            members.append((size, stride * (axis_size // reached)))
        others.append((axis_size // reached, stride))
    if unknown := {n for n, _, _ in parts} - set(sizes):
        raise GroupTextError(f"the mesh has no axis {sorted(unknown)[0]!r}")
    count, size = (math.prod(s for s, _ in steps) for steps in (others, members))
    steps = strides.merge([*others, *members])
    if devices is None:
        return ReplicaGroups(count, size, steps)
    if len(devices) != count * size:
        raise GroupTextError(f"{len(devices)} devices for a mesh of {count * size}")
    rows = np.asarray(devices)[strides.place_all(steps)].reshape(count, size)
    return ReplicaGroups.of_list(rows.tolist())


def _groups_of_text(match: re.Match[str]) -> ReplicaGroups:
    """Return groups along axes of a mesh that the text itself describes."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(match["sizes"])}
    parts = [(n, int(b or 1), int(s or 0)) for n, b, s in _MESH_PART.findall(match["axes"])]
    try:
        devices = None if match["devices"] is None else _mesh_devices(match["devices"])
        return mesh_groups(sizes, parts, devices)
    except GroupTextError as error:
        raise GroupTextError(f"{match[0]}: {error}") from None


def _mesh_devices(text: str) -> Sequence[int]:
    turned = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if turned is None:
        return _numbers(text)
    return iota_order(_numbers(turned[1]), _numbers(turned[2] or ""))


def iota_order(dims: Sequence[int], perm: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the numbers of `arange(n).reshape(dims).transpose(perm)`, in order.

    Raises:
        GroupTextError: The permutation does not fit the dimensions.
    """
    return ReplicaGroups.iota(1, math.prod(dims), dims, perm).devices()[0]
