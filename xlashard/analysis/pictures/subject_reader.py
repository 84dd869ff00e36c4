"""Read the subject of a picture from an array, or from a shape and a sharding."""

from collections.abc import Sequence
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
)
from xlashard._jax.trace.tracing import mesh_in_force
from xlashard.analysis.pictures.subject import PictureSubject, Pieces, Tiles
from xlashard.core.sharding import (
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
    XLACompatibleSharding,
    from_jax,
    grid_of,
    spec_of,
)
from xlashard.errors import ArgumentError, TilingError
from xlashard.support.formatting import elided

_LONGEST = 80
"""Maximum length of a sharding's text, unless the user wrote it."""

type AnySharding = Sharding | JaxSharding


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
    own = from_jax(_sharding_of(x) if sharding is None else as_sharding(sharding))
    devices, placement = _place_pieces(own, shape)
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


def _place_pieces(
    own: Sharding, shape: tuple[int, ...]
) -> tuple[Sequence[Device] | None, Tiles | Pieces]:
    if isinstance(own, NamedSharding) and isinstance(own.mesh, AbstractMesh):
        return None, Tiles(own.tiling(shape), shape)
    try:
        return own.devices, Tiles(own.tiling(shape), shape)
    except TilingError:
        if isinstance(own, XLACompatibleSharding):
            raise
        index_map = own.devices_indices_map(shape)
        return own.devices, Pieces.from_indices(shape, [index_map[d] for d in own.devices])


def _chosen_memory(kind: str | None, devices: Sequence[Device] | None) -> str | None:
    """Return a memory kind, unless it is the default of the devices."""
    return None if devices and kind == default_memory_kind(devices[0]) else kind


def _words(own: Any) -> str:
    if isinstance(own, NamedSharding):
        return own.normal_spec.describe()
    # Tiles may be assigned to devices one by one.
    return elided(own._describe(), _LONGEST)
