"""Tilings as shardings of JAX: mesh axes with generated names, and HLO text."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from xlashard._jax.runtime.shardings import (
    Device,
    JaxGSPMDSharding,
    JaxNamedSharding,
    JaxSharding,
    hlo_from_text,
    hlo_text,
    jax_hlo_sharding,
    listed_sharding,
    read_reduction,
)
from xlashard.errors import GeometryError
from xlashard.geometry import MeshGrid, Spec, TileAssignment, Tiling, spec_from_tiling
from xlashard.support.lazily import dataclass


@dataclass(frozen=True)
class TilingAxes:
    """Mesh with generated axis names for a tiling.

    Attributes:
        grid: Its axes, as many as the tiling needs; empty where no dimension is cut.
        spec: The spec of the tiling on this mesh.
        device_ids: The order of the devices on it; empty for the natural one.
    """

    grid: MeshGrid
    spec: Spec
    device_ids: tuple[int, ...] = ()


@lru_cache(maxsize=1024)
def axes_of(tiling: Tiling) -> TilingAxes:
    """Return a mesh on which a spec is equivalent to the tiling."""
    if tiling.is_replicated:
        return TilingAxes(MeshGrid((), ()), Spec())
    if tiling.listed:
        return _on_listed_devices(tiling)
    # Strides at which the number of a tile passes from one dimension to the next.
    borders = [1, tiling.addends]
    for count in reversed(tiling.counts):
        borders.append(borders[-1] * count)
    grid = made_up_grid([size for step in tiling.steps for size in _cut(*step, borders)])
    try:
        return TilingAxes(grid, spec_from_tiling(grid, tiling))
    except GeometryError:
        # A digit of the position lies across two dimensions (2 x 3 tiles, 3 x 2 devices).
        return _on_listed_devices(tiling)


def made_up_grid(sizes: Sequence[int]) -> MeshGrid:
    """Return a grid of axes of these sizes, with names reserved for this purpose."""
    return MeshGrid(tuple(f"_axis_{i}" for i in range(len(sizes))), tuple(sizes))


def _on_listed_devices(tiling: Tiling) -> TilingAxes:
    """Return one axis per cut dimension and one for the replicas, on a list of devices."""
    sizes = (*tiling.counts, tiling.addends, tiling.num_replicas)
    grid = made_up_grid([n for n in sizes if n > 1])
    names = iter(grid.axis_names)
    *dims, unreduced = ((next(names),) if n > 1 else () for n in (*tiling.counts, tiling.addends))
    spec = Spec(tuple(dims), frozenset(unreduced), reduction=tiling.reduction)
    return TilingAxes(grid, spec, tiling.order())


def _cut(size: int, stride: int, borders: Sequence[int]) -> list[int]:
    """Cut one digit of a device's position where it passes from one dimension to the next."""
    if stride == 0:
        return [size]
    parts: list[int] = []
    while size > 1:
        border = min((b for b in borders if b > stride), default=size * stride)
        part = math.gcd(border // stride, size)
        if part == 1:
            part = size
        parts.append(part)
        size //= part
        stride *= part
    return parts[::-1]


def gspmd_sharding_of(
    devices: Sequence[Device], tiling: Tiling, memory_kind: str | None = None
) -> JaxSharding:
    """Return JAX's `GSPMDSharding` of a tiling."""
    order = axes_of(tiling).device_ids
    if order:
        return listed_sharding(devices, tiling.counts, order, memory_kind)
    hlo = hlo_from_text(tiling.to_tile_assignment().to_text())
    return JaxGSPMDSharding(tuple(devices), hlo, memory_kind=memory_kind)


def tiling_of_jax(sharding: JaxSharding, ndim: int) -> Tiling:
    """Return the tiling of a sharding of JAX for arrays of a rank.

    Raises:
        GeometryError: It has no tiles (`{manual}`, `{unknown}`), or the rank is too low.
    """
    num_devices = sharding.num_devices
    if num_devices == 1 and not isinstance(sharding, JaxNamedSharding):
        return Tiling.replicated(1, ndim)
    assignment = TileAssignment.parse_text(hlo_text(jax_hlo_sharding(sharding, ndim)))
    tiling = Tiling.from_tile_assignment(assignment, ndim, num_devices=num_devices)
    reduction = read_reduction(sharding.spec) if isinstance(sharding, JaxNamedSharding) else ""
    if not reduction:
        return tiling
    # HLO's text leaves out the kind of reduction.
    return replace(tiling, reduction=reduction if tiling.is_partial else "")
