"""Annotations for Shardy: `sdy.sharding` over a mesh of named axes.

Syntax: the Shardy dialect, https://openxla.org/shardy/sharding_representation.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from xlashard.errors import GeometryError
from xlashard.geometry import MeshGrid, Spec, Tiling, spec_from_tiling
from xlashard.sharding import Mesh, NamedSharding, XLACompatibleSharding, grid_of

ATTRIBUTE = "sdy.sharding"


def sharding_text(sharding: XLACompatibleSharding, ndim: int) -> str:
    """The attribute that gives a value of a rank this sharding, its mesh written inside.

    Args:
        sharding: The sharding; dimensions past its spec are closed and uncut.
        ndim: The rank of the value's buffers.

    Raises:
        GeometryError: If it has no tiles, or not for this rank.
    """
    if isinstance(sharding, NamedSharding):
        return _text(_mesh(grid_of(sharding.mesh)), sharding.normal_spec, ndim)
    return _text(*_on_made_up_mesh(sharding.rank_tiling(ndim)), ndim)


def open_text(ndim: int, trailing: int, mesh: Mesh | None, num_devices: int) -> str:
    """The attribute that leaves a value to the partitioner but for its trailing dimensions.

    Args:
        ndim: How many dimensions are open.
        trailing: How many are closed and uncut.
        mesh: The mesh whose axes may cut the open ones; None for one made up.
        num_devices: How many devices there are.
    """
    grid = _grid([num_devices]) if mesh is None else grid_of(mesh)
    return _text(_mesh(grid), Spec((None,) * ndim), ndim + trailing)


def _text(mesh: str, spec: Spec, ndim: int) -> str:
    dims = ", ".join(map(_dim, spec.for_rank(ndim)))
    return f"#sdy.sharding<mesh<{mesh}>, [{dims}]>"


def _dim(axes: tuple[str, ...] | None) -> str:
    if axes is None:
        return "{?}"
    return "{" + ", ".join(map(_quoted, axes)) + "}"


def _mesh(grid: MeshGrid) -> str:
    axes = (f"{_quoted(n)}={s}" for n, s in zip(grid.axis_names, grid.axis_sizes, strict=True))
    return f"[{', '.join(axes)}]"


def _quoted(name: str) -> str:
    """A name as a text of MLIR: what it has no letter for goes by the bytes of UTF-8."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:02X}"
        for byte in name.encode()
    )
    return f'"{plain}"'


@lru_cache(maxsize=1024)
def _on_made_up_mesh(tiling: Tiling) -> tuple[str, Spec]:
    """A mesh on which a spec gives the tiling; its axes are as many as that takes."""
    if tiling.is_replicated:
        return _mesh(MeshGrid((), ())), Spec()
    if tiling.listed:
        return _on_listed_devices(tiling)
    grid = _grid([size for step in tiling.steps for size in _cut(*step, _borders(tiling))])
    try:
        return _mesh(grid), spec_from_tiling(grid, tiling)
    except GeometryError:
        # A digit of the position lies across two dimensions (2 x 3 tiles, 3 x 2 devices).
        return _on_listed_devices(tiling)


def _grid(sizes: Sequence[int]) -> MeshGrid:
    return MeshGrid(tuple(f"_axis_{i}" for i in range(len(sizes))), tuple(sizes))


def _on_listed_devices(tiling: Tiling) -> tuple[str, Spec]:
    """One axis per cut dimension and one for the copies; the mesh lists its devices."""
    sizes = [count for count in (*tiling.counts, tiling.num_replicas) if count > 1]
    grid = _grid(sizes)
    names = iter(grid.axis_names)
    spec = Spec(tuple((next(names),) if count > 1 else () for count in tiling.counts))
    devices = ", ".join(map(str, np.argsort(tiling.tile_ids(), kind="stable").tolist()))
    return f"{_mesh(grid)}, device_ids=[{devices}]", spec


def _borders(tiling: Tiling) -> list[int]:
    """The strides at which the number of a tile passes from one dimension to the next."""
    borders = [1]
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
