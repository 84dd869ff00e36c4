"""HLO tile assignments, which map devices to tiles, and their text."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from xlashard.errors import TilingError
from xlashard.geometry import strides
from xlashard.geometry.hlo_text import Maker, Subgroup, read_sharding
from xlashard.support.lazily import dataclass

type Kind = Literal["tiled", "replicated", "maximal", "manual", "unreduced", "unknown", "tuple"]

_SUBGROUPS: tuple[Subgroup, ...] = ("manual", "unreduced", "replicated")
"""Kinds of sub-groups, in the order in which XLA writes them."""


@dataclass(frozen=True, slots=True)
class TileAssignment:
    """One HLO sharding. Make it with a class method: they check, and write one normal form.

    The normal form is XLA's: size-1 sub-groups are gone, equal kinds of sub-groups are one, in the
    order manual, unreduced, replicated; an iota is as short as it can be; a single sub-group that
    spans everything is represented by its kind alone.

    Attributes:
        kind: Kind of sharding; the other attributes are empty unless the kind needs them.
        dims: For `tiled`: tiles per array dimension, then one size per sub-group.
        reshape_dims: For a tiled iota: the shape of `0 .. devices - 1`.
        transpose_perm: For a tiled iota: how that shape is transposed before it becomes `dims`.
        devices: For `tiled` with a list: the devices in row-major order of `dims`.
            For `maximal`: the one device.
        subgroups: For `tiled`: the kinds of the trailing `dims`.
        elements: For `tuple`: one assignment per element.
    """

    kind: Kind
    dims: tuple[int, ...] = ()
    reshape_dims: tuple[int, ...] = ()
    transpose_perm: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    subgroups: tuple[Subgroup, ...] = ()
    elements: tuple["TileAssignment", ...] = ()

    @classmethod
    def replicated(cls) -> "TileAssignment":
        """Return the sharding by which every device holds everything."""
        return cls("replicated")

    @classmethod
    def manual(cls) -> "TileAssignment":
        """Return the sharding of a value that the program partitions by itself."""
        return cls("manual")

    @classmethod
    def unreduced(cls) -> "TileAssignment":
        """Return the sharding by which every device holds a partial sum of everything."""
        return cls("unreduced")

    @classmethod
    def unknown(cls) -> "TileAssignment":
        """Return the sharding that specifies nothing."""
        return cls("unknown")

    @classmethod
    def maximal(cls, device: int) -> "TileAssignment":
        """Return the sharding by which one device holds everything, and the others nothing."""
        if device < 0:
            raise TilingError(f"a maximal sharding needs a device from 0 on, got {device}")
        return cls("maximal", devices=(int(device),))

    @classmethod
    def tuple_of(cls, elements: Iterable["TileAssignment"]) -> "TileAssignment":
        """Return one assignment per element of a tuple; tuples don't nest.

        Raises:
            TilingError: An element is itself a tuple.
        """
        elements = tuple(elements)
        for i, element in enumerate(elements):
            if element.kind == "tuple":
                raise TilingError(f"element {i} of a tuple sharding is itself a tuple")
        return cls("tuple", elements=elements)

    @classmethod
    def iota(
        cls,
        dims: Sequence[int],
        reshape_dims: Sequence[int] = (),
        transpose_perm: Sequence[int] = (),
        subgroups: Sequence[str] = (),
    ) -> "TileAssignment":
        """Return a V2 assignment: `arange(n).reshape(reshape_dims).transpose(perm).reshape(dims)`.

        Args:
            dims: Tiles per array dimension, then one size per sub-group.
            reshape_dims: Empty means one dimension of all devices.
            transpose_perm: Empty means no transposition.
            subgroups: The kinds of the trailing `dims`: `manual`, `unreduced` or `replicated`.

        Raises:
            TilingError: The parts don't fit each other.
        """
        dims = _checked_dims(dims)
        kinds = _checked_subgroups(subgroups, dims)
        steps = _iota_steps(dims, tuple(reshape_dims), tuple(transpose_perm))
        if whole := _whole(dims, kinds):
            return cls(whole)
        arranged = _arranged(steps, dims, kinds)
        if arranged is None:
            # Old and new order of the sub-groups share no radix; only a list can express it.
            return cls.listed(dims, strides.place_all(steps).tolist(), kinds)
        steps = arranged
        dims, kinds = _merged_subgroups(dims, kinds)
        falling = strides.by_stride(steps)
        if len(falling) < 2:
            return cls("tiled", dims, (math.prod(dims),), (0,), subgroups=kinds)
        reshaped = tuple(steps[i][0] for i in falling)
        perm = tuple(falling.index(i) for i in range(len(falling)))
        return cls("tiled", dims, reshaped, perm, subgroups=kinds)

    @classmethod
    def listed(
        cls, dims: Sequence[int], devices: Sequence[int], subgroups: Sequence[str] = ()
    ) -> "TileAssignment":
        """Return a V1 assignment: a list of devices in row-major order of `dims`.

        Raises:
            TilingError: The devices are not a permutation of `0 .. n - 1`, or don't fit `dims`.
        """
        dims = _checked_dims(dims)
        kinds = _checked_subgroups(subgroups, dims)
        count = math.prod(dims)
        array = np.asarray(devices, dtype=np.int64)
        if array.size != count:
            raise TilingError(f"{array.size} devices are listed for tile dims {dims} of {count}")
        if not np.array_equal(np.sort(array, axis=None), np.arange(count)):
            raise TilingError(f"the listed devices are not a permutation of 0..{count - 1}")
        array = array.reshape(dims).transpose(_subgroup_order(dims, kinds))
        if whole := _whole(dims, kinds):
            return cls(whole)
        dims, kinds = _merged_subgroups(dims, kinds)
        array = array.reshape(dims)
        if kinds and kinds[-1] == "replicated":
            array = np.sort(array, axis=-1)
        return cls("tiled", dims, devices=tuple(array.reshape(-1).tolist()), subgroups=kinds)

    @classmethod
    def parse_text(cls, text: str) -> "TileAssignment":
        """Read the text of an HLO sharding; `metadata={...}` is skipped.

        Raises:
            ShardingTextError: The text is not that of a sharding.
            TilingError: Its numbers don't fit each other.

        Example:
            >>> TileAssignment.parse_text("{devices=[2,2]<=[2,2]T(1,0)}").dims
            (2, 2)
        """
        return cls._from_maker(read_sharding(text))

    @classmethod
    def _from_maker(cls, maker: Maker) -> "TileAssignment":
        name, arguments = maker
        if name == "tuple_of":
            return cls.tuple_of(map(cls._from_maker, arguments))
        return getattr(cls, name)(*arguments)

    @property
    def num_devices(self) -> int | None:
        """Return the number of devices of a tiled assignment; other kinds leave it open."""
        return math.prod(self.dims) if self.kind == "tiled" else None

    @property
    def ndim(self) -> int | None:
        """Return the rank of the arrays it fits; `None` where it fits every rank."""
        return len(self.dims) - len(self.subgroups) if self.kind == "tiled" else None

    @property
    def tile_dims(self) -> tuple[int, ...]:
        """Return the tiles per array dimension, without the sub-groups."""
        return self.dims[: len(self.dims) - len(self.subgroups)]

    @property
    def num_unreduced(self) -> int:
        """Number of partial results that make up each tile; 1 where the tiles are whole."""
        sizes = self.dims[len(self.dims) - len(self.subgroups) :]
        return dict(zip(self.subgroups, sizes, strict=True)).get("unreduced", 1)

    @property
    def is_iota(self) -> bool:
        """Return whether it has a formula instead of a list of devices."""
        return bool(self.reshape_dims)

    def steps(self) -> strides.Steps:
        """Return the digits that give the device at each place of `dims`, for a tiled iota."""
        return _iota_steps(self.dims, self.reshape_dims, self.transpose_perm)

    def device_array(self) -> npt.NDArray[np.int64]:
        """Return the devices as an array of shape `dims`, for `tiled`.

        Raises:
            TilingError: It is of another kind.
        """
        if self.kind != "tiled":
            raise TilingError(f"a {self.kind} sharding has no tiles")
        flat = strides.place_all(self.steps()) if self.is_iota else np.array(self.devices)
        return flat.reshape(self.dims)

    def to_text(self) -> str:
        """Return the text of the HLO sharding, as XLA prints it."""
        match self.kind:
            case "tuple":
                texts = [element.to_text() for element in self.elements]
                # XLA numbers every fifth element in a comment.
                texts[5::5] = [f"/*index={i}*/{texts[i]}" for i in range(5, len(texts), 5)]
                return f"{{{', '.join(texts)}}}"
            case "maximal":
                return f"{{maximal device={self.devices[0]}}}"
            case "tiled":
                return f"{{devices=[{_joined(self.dims)}]{self._order()}{self._groups()}}}"
            case _:
                return f"{{{self.kind}}}"

    def __str__(self) -> str:
        return self.to_text()

    def _order(self) -> str:
        if not self.is_iota:
            return _joined(self.devices)
        turned = f"T({_joined(self.transpose_perm)})" if len(self.transpose_perm) > 1 else ""
        return f"<=[{_joined(self.reshape_dims)}]{turned}"

    def _groups(self) -> str:
        if not self.subgroups:
            return ""
        if self.subgroups == ("replicated",):
            return " last_tile_dim_replicate"
        return f" last_tile_dims={{{', '.join(self.subgroups)}}}"


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _checked_dims(dims: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(int(d) for d in dims)
    if not checked or min(checked) < 1:
        raise TilingError(f"tile dims must be one or more counts from 1 on, got {list(checked)}")
    return checked


def _checked_subgroups(kinds: Sequence[str], dims: tuple[int, ...]) -> tuple[Subgroup, ...]:
    known: dict[str, Subgroup] = {kind: kind for kind in _SUBGROUPS}
    for kind in kinds:
        if kind not in known:
            raise TilingError(f"unknown kind of sub-group {kind!r}: expected {', '.join(known)}")
    if len(kinds) > len(dims):
        raise TilingError(f"{len(kinds)} sub-groups for {len(dims)} tile dims {dims}")
    return tuple(known[kind] for kind in kinds)


def _iota_steps(
    dims: tuple[int, ...], reshape_dims: tuple[int, ...], perm: tuple[int, ...]
) -> strides.Steps:
    count = math.prod(dims)
    reshape_dims = reshape_dims or (count,)
    perm = perm or tuple(range(len(reshape_dims)))
    if math.prod(reshape_dims) != count or min(reshape_dims) < 1:
        raise TilingError(
            f"reshape dims {list(reshape_dims)} hold {math.prod(reshape_dims)} devices, "
            f"tile dims {list(dims)} hold {count}"
        )
    if sorted(perm) != list(range(len(reshape_dims))):
        raise TilingError(f"{perm} is not a permutation of the {len(reshape_dims)} reshape dims")
    device_strides = strides.row_major(reshape_dims)
    return tuple((reshape_dims[p], device_strides[p]) for p in perm)


def _arranged(
    steps: strides.Steps, dims: tuple[int, ...], kinds: tuple[Subgroup, ...]
) -> strides.Steps | None:
    """Return digits with sub-groups in XLA's order and replicas in falling strides.

    Returns `None` where the digits cross the borders.
    """
    steps = strides.merge(steps)
    order = _subgroup_order(dims, kinds)
    moved = [i for i in order if dims[i] > 1]
    if moved != sorted(moved):
        groups = strides.split(steps, dims)
        if groups is None:
            return None
        steps = strides.merge([step for i in order for step in groups[i]])
    sizes = zip(dims[len(dims) - len(kinds) :], kinds, strict=True)
    copies = math.prod(size for size, kind in sizes if kind == "replicated")
    parts = strides.split(steps, (math.prod(dims) // copies, copies))
    if parts is None:
        return None
    tiles, held = parts
    return strides.merge([*tiles, *(held[i] for i in strides.by_stride(held))])


def _subgroup_order(dims: tuple[int, ...], kinds: tuple[Subgroup, ...]) -> tuple[int, ...]:
    tiles = len(dims) - len(kinds)
    turned = sorted(range(len(kinds)), key=lambda i: _SUBGROUPS.index(kinds[i]))
    return (*range(tiles), *(tiles + i for i in turned))


def _merged_subgroups(
    dims: tuple[int, ...], kinds: tuple[Subgroup, ...]
) -> tuple[tuple[int, ...], tuple[Subgroup, ...]]:
    tiles = len(dims) - len(kinds)
    sizes: dict[Subgroup, int] = {
        kind: math.prod(d for d, k in zip(dims[tiles:], kinds, strict=True) if k == kind)
        for kind in _SUBGROUPS
    }
    present: dict[Subgroup, int] = {kind: size for kind, size in sizes.items() if size > 1}
    return (*dims[:tiles], *present.values()), tuple(present)


def _whole(dims: tuple[int, ...], kinds: tuple[Subgroup, ...]) -> Subgroup | None:
    """Return the kind of the sub-group that spans all devices, if any."""
    tiles = len(dims) - len(kinds)
    if not kinds or math.prod(dims[:tiles]) > 1:
        return None
    spread: set[Subgroup] = {
        kind for kind, size in zip(kinds, dims[tiles:], strict=True) if size > 1
    }
    # On a single device no sub-group is spread, and each of them spans everything.
    subgroups: set[Subgroup] = spread or set(kinds)
    if len(subgroups) == 1:
        return subgroups.pop()
    return None if tiles or spread else "replicated"
