"""Mesh axes for tiles that nobody named: what Shardy and JAX want to be told instead of tiles."""

import math
from collections.abc import Sequence
from functools import lru_cache

from xlashard.errors import GeometryError
from xlashard.geometry import MeshGrid, Spec, Tiling, spec_from_tiling
from xlashard.lazily import dataclass


@dataclass(frozen=True)
class TilingAxes:
    """A mesh made up for a tiling.

    Attributes:
        grid: Its axes, as many as the tiling takes; none where nothing is cut.
        spec: The spec that gives the tiling on it.
        device_ids: The order of the devices on it; empty for the natural one.
    """

    grid: MeshGrid
    spec: Spec
    device_ids: tuple[int, ...] = ()


@lru_cache(maxsize=1024)
def axes_of(tiling: Tiling) -> TilingAxes:
    """A mesh on which a spec gives the tiling."""
    if tiling.is_replicated:
        return TilingAxes(MeshGrid((), ()), Spec())
    if tiling.listed:
        return _on_listed_devices(tiling)
    borders = _borders(tiling)
    grid = made_up_grid([size for step in tiling.steps for size in _cut(*step, borders)])
    try:
        return TilingAxes(grid, spec_from_tiling(grid, tiling))
    except GeometryError:
        # A digit of the position lies across two dimensions (2 x 3 tiles, 3 x 2 devices).
        return _on_listed_devices(tiling)


def made_up_grid(sizes: Sequence[int]) -> MeshGrid:
    """Axes of these sizes, with names that no user gives."""
    return MeshGrid(tuple(f"_axis_{i}" for i in range(len(sizes))), tuple(sizes))


def _on_listed_devices(tiling: Tiling) -> TilingAxes:
    """One axis per cut dimension and one for the copies; the mesh lists its devices."""
    sizes = (*tiling.counts, tiling.addends, tiling.num_replicas)
    grid = made_up_grid([n for n in sizes if n > 1])
    names = iter(grid.axis_names)
    *dims, unreduced = ((next(names),) if n > 1 else () for n in (*tiling.counts, tiling.addends))
    spec = Spec(tuple(dims), frozenset(unreduced), reduction=tiling.reduction)
    return TilingAxes(grid, spec, tiling.order())


def _borders(tiling: Tiling) -> list[int]:
    """The strides at which the number of a tile passes from one dimension to the next."""
    borders = [1, tiling.addends]
    for count in reversed(tiling.counts):
        borders.append(borders[-1] * count)
    return borders


def _cut(size: int, stride: int, borders: Sequence[int]) -> list[int]:
    """Cuts one digit of a device's position where it passes from one dimension to the next."""
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
