"""Subject of a picture, read from an array, or from a shape and a sharding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from xlashard._jax.runtime.shardings import (
    Device,
    JaxSharding,
    default_memory_kind,
    device_assignment,
)
from xlashard._jax.trace.tracing import mesh_in_force
from xlashard.core.sharding import (
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    from_jax,
    grid_of,
    spec_of,
)
from xlashard.errors import ArgumentError, ShardingError, TilingError
from xlashard.geometry import Runs, Tiling, replica_runs
from xlashard.wording import elided

type Places = tuple[int, ...]
"""The coordinates of a tile, one per dimension."""


@dataclass(frozen=True)
class Tiles:
    """Equal tiles; where a dimension doesn't divide, the last ones are smaller or empty."""

    tiling: Tiling
    shape: tuple[int, ...]

    @property
    def addends(self) -> int:
        """Number of partial results that make up each tile; 1 where the tiles are whole."""
        return self.tiling.addends

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many ranges each dimension is cut."""
        return self.tiling.counts

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.tiling.num_devices

    @property
    def tile(self) -> tuple[int, ...]:
        """The shape of the biggest tile."""
        return self.tiling.shard_shape(self.shape, uneven=True)

    @property
    def is_even(self) -> bool:
        """True if all tiles have that shape."""
        return all(n % count == 0 for n, count in zip(self.shape, self.counts, strict=True))

    def cut(self, dim: int, place: int) -> slice:
        """Return one range of a dimension."""
        size, extent = self.shape[dim], self.tile[dim]
        return slice(min(place * extent, size), min((place + 1) * extent, size))

    def holders(self, places: Places, most: int) -> Runs:
        """Return the positions of the devices that hold a tile, as a limited number of runs."""
        return replica_runs(self.tiling.whole, int(np.ravel_multi_index(places, self.counts)), most)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of any size, from the index of each device; some may have no holder.

    Attributes:
        cuts: For each dimension the ranges that anybody holds, in ascending order.
        held: The positions of the holders by the coordinates of the piece.
        num_devices: Number of devices.
        tile: The shape of the biggest piece.
    """

    cuts: tuple[tuple[tuple[int, int], ...], ...]
    held: Mapping[Places, Sequence[int]]
    num_devices: int
    tile: tuple[int, ...]

    @classmethod
    def from_indices(cls, shape: Sequence[int], indices: Sequence[Sequence[Any]]) -> "Pieces":
        """Return the pieces behind one index per device."""
        bounds = [_bounds(shape, index) for index in indices]
        cuts = tuple(tuple(sorted({b[dim] for b in bounds})) for dim in range(len(shape)))
        numbers = [{cut: i for i, cut in enumerate(of_dim)} for of_dim in cuts]
        held: dict[Places, list[int]] = {}
        for position, bound in enumerate(bounds):
            places = tuple(number[cut] for number, cut in zip(numbers, bound, strict=True))
            held.setdefault(places, []).append(position)
        shapes = (tuple(stop - start for start, stop in bound) for bound in bounds)
        return cls(cuts, held, len(bounds), max(shapes, key=math.prod))

    @property
    def addends(self) -> int:
        """Number of partial results that make up each tile: these pieces are whole."""
        return 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many ranges each dimension is cut."""
        return tuple(map(len, self.cuts))

    @property
    def is_even(self) -> bool:
        """True if all pieces have that shape."""
        return all(
            stop - start == n
            for n, c in zip(self.tile, self.cuts, strict=True)
            for start, stop in c
        )

    def cut(self, dim: int, place: int) -> slice:
        """Return one range of a dimension."""
        return slice(*self.cuts[dim][place])

    def holders(self, places: Places, most: int) -> Runs:
        """Return the positions of the devices that hold a piece."""
        return Runs.of(self.held.get(places, ()))


def _bounds(shape: Sequence[int], index: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    whole = (*index, *(slice(None) for _ in shape[len(index) :]))
    bounds = []
    for size, entry in zip(shape, whole, strict=True):
        # The old shardings of pmap say a dimension that they unstack by a number.
        entry = entry if isinstance(entry, slice) else slice(entry, entry + 1)
        start, stop, _ = entry.indices(size)
        bounds.append((start, max(start, stop)))
    return tuple(bounds)


_LONGEST = 80
"""Maximum length of a sharding's text, unless the user wrote it."""

LISTED = 4096
"""Devices that one picture looks at, one by one."""

type AnySharding = Sharding | JaxSharding


@dataclass(frozen=True, eq=False)
class PictureSubject:
    """An array, or one that might be, and where its tiles are.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype; None for a shape alone.
        itemsize: Bytes per element; None for a shape alone.
        sharding: The sharding in words.
        memory_kind: The memory that holds the data, where it is not the devices' usual one.
        mesh: Mesh axes with their sizes; empty without a mesh.
        dim_axes: Mesh axes of each dimension, None for an unconstrained one; None without a mesh.
        unreduced: The mesh axes over which the devices hold partial results.
        reduction: Reduction of the unreduced axes: `sum`, `max` or `min`; empty without any.
        devices: The devices by position; None on a mesh without devices.
        placement: Positions of the tiles.
    """

    shape: tuple[int, ...]
    dtype: str | None
    itemsize: int | None
    sharding: str
    memory_kind: str | None
    mesh: tuple[tuple[str, int], ...]
    dim_axes: tuple[tuple[str, ...] | None, ...] | None
    devices: Sequence[Device] | None
    placement: Tiles | Pieces
    unreduced: frozenset[str] = frozenset()
    reduction: str = ""

    @property
    def unreduced_along(self) -> tuple[tuple[str, int], ...]:
        """The mesh axes along which the devices hold partial results."""
        return tuple((name, size) for name, size in self.mesh if name in self.unreduced)

    @property
    def copied_along(self) -> tuple[tuple[str, int], ...]:
        """The mesh axes along which each tile is repeated."""
        used = {axis for axes in self.dim_axes or () for axis in axes or ()} | self.unreduced
        return tuple((name, size) for name, size in self.mesh if name not in used and size > 1)

    @cached_property
    def num_hosts(self) -> int | None:
        """Number of processes of its devices, if they are few enough to count."""
        if self.devices is None or len(self.devices) > LISTED:
            return None
        return len({device.process_index for device in self.devices})

    @property
    def nbytes(self) -> int | None:
        """Bytes of all elements."""
        return None if self.itemsize is None else math.prod(self.shape) * self.itemsize

    @property
    def tile_bytes(self) -> int | None:
        """Bytes of the biggest tile."""
        return None if self.itemsize is None else math.prod(self.placement.tile) * self.itemsize


def read_subject(x: Any, sharding: Any = None) -> PictureSubject:
    """Return the subject of a picture, without reading the array's value or buffers.

    Args:
        x: An array, a `ShapeDtypeStruct`, or a shape.
        sharding: A sharding; None for the array's own.

    Raises:
        ArgumentError: If the shape or the sharding is missing.
        GeometryError: The sharding does not fit the shape.
    """
    shape, dtype = _type_of(x)
    own = _own_class(_sharding_of(x) if sharding is None else as_sharding(sharding))
    devices, placement = _placed(own, shape)
    named = isinstance(own, NamedSharding)
    return PictureSubject(
        shape=shape,
        dtype=None if dtype is None else dtype.name,
        itemsize=None if dtype is None else dtype.itemsize,
        sharding=_words(own),
        memory_kind=_chosen_memory(own.memory_kind, devices),
        mesh=tuple(grid_of(own.mesh).shape.items()) if named else (),
        dim_axes=own.normal_spec.for_rank(len(shape)) if named else None,
        devices=devices,
        placement=placement,
        unreduced=own.normal_spec.unreduced if named else frozenset(),
        reduction=own.normal_spec.reduction if named else "sum",
    )


def is_shape(x: Any) -> bool:
    """Return whether a value is a shape: a sequence of sizes."""
    return isinstance(x, tuple | list) and all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0 for n in x
    )


def _type_of(x: Any) -> tuple[tuple[int, ...], Any]:
    if is_shape(x):
        return tuple(map(int, x)), None
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None or isinstance(x, type):
        raise ArgumentError(
            f"visualize draws an array, or a shape with a sharding, not {type(x).__name__}: write "
            "visualize(x) of a jax.Array or visualize((8, 16), NamedSharding(mesh, P('data')))"
        )
    return tuple(shape), dtype


def _sharding_of(x: Any) -> AnySharding:
    """Return the sharding that a thing carries itself."""
    if isinstance(x, Tracer):
        return _sharding_of_tracer(x)
    own = getattr(x, "sharding", None)
    if isinstance(own, Sharding | JaxSharding):
        return own
    shape = tuple(x) if is_shape(x) else x.shape
    kind = "a shape" if is_shape(x) else f"this {type(x).__name__}"
    raise ArgumentError(
        f"{kind} has no sharding of its own: write visualize({shape}, NamedSharding(mesh, "
        "P('data')))"
    )


def _sharding_of_tracer(x: Any) -> AnySharding:
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if not mesh.empty and all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return sharding
    raise ArgumentError(
        f"this {jax.typeof(x).str_short()} is being traced, and the compiler chooses its sharding "
        "later: write jax.debug.inspect_array_sharding(x, callback=lambda s: "
        "print(xlashard.visualize(x.shape, s))), which draws it when that is known"
    )


def is_place(x: Any) -> bool:
    """Return whether a value specifies a sharding, rather than a tree of shardings."""
    return isinstance(x, Sharding | JaxSharding | Format | PartitionSpec | jax.Device)


def as_sharding(sharding: Any) -> AnySharding:
    """Return a sharding or spec as a sharding.

    Raises:
        ArgumentError: If the value is invalid, or a spec without a mesh in effect.
    """
    if isinstance(sharding, Format) and sharding.sharding is not None:
        sharding = sharding.sharding
    if isinstance(sharding, Sharding | JaxSharding):
        return sharding
    if isinstance(sharding, jax.Device):
        return SingleDeviceSharding(sharding)
    if isinstance(sharding, PartitionSpec):
        mesh = mesh_in_force() or jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            return NamedSharding(mesh, sharding)
        spec = spec_of(sharding).describe()
        raise ArgumentError(
            f"sharding is {spec}, but no mesh is in force: call inside "
            f"`with jax.set_mesh(mesh):`, or write NamedSharding(mesh, {spec})"
        )
    raise ArgumentError(
        f"sharding must be a sharding, not {type(sharding).__name__}: for example "
        "NamedSharding(mesh, P('data'))"
    )


def _own_class(sharding: AnySharding) -> Any:
    """Return the equivalent sharding of this package; other classes unchanged."""
    try:
        return from_jax(sharding)
    except ShardingError:
        if isinstance(sharding, jax.sharding.NamedSharding):
            raise
        return sharding


def _placed(own: Any, shape: tuple[int, ...]) -> tuple[Sequence[Device] | None, Tiles | Pieces]:
    if isinstance(own, NamedSharding) and isinstance(own.mesh, AbstractMesh):
        return None, Tiles(own.tiling(shape), shape)
    if isinstance(own, XLACompatibleSharding):
        return own.devices, Tiles(own.tiling(shape), shape)
    devices = own.devices if isinstance(own, Sharding) else device_assignment(own)
    try:
        if isinstance(own, Sharding):
            return devices, Tiles(own.tiling(shape), shape)
        index_map = own.devices_indices_map(shape)
        return devices, Tiles(Tiling.from_indices(shape, [index_map[d] for d in devices]), shape)
    except TilingError:
        index_map = own.devices_indices_map(shape)
        return devices, Pieces.from_indices(shape, [index_map[d] for d in devices])


def _chosen_memory(kind: str | None, devices: Sequence[Device] | None) -> str | None:
    """Return a memory kind, unless it is the default of the devices."""
    return None if devices and kind == default_memory_kind(devices[0]) else kind


def _words(own: Any) -> str:
    if isinstance(own, NamedSharding):
        return own.normal_spec.describe()
    words = own._describe() if isinstance(own, Sharding) else type(own).__name__
    # Tiles may be assigned to devices one by one.
    return elided(words, _LONGEST)
