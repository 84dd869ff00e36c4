"""Annotations for Shardy: `sdy.sharding` over a mesh of named axes.

Syntax: the Shardy dialect, https://openxla.org/shardy/sharding_representation.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from xlashard.errors import CompileError, GeometryError
from xlashard.geometry import MeshGrid, Spec, Tiling, spec_from_tiling
from xlashard.sharding import NamedSharding, XLACompatibleSharding, grid_of

ATTRIBUTE = "sdy.sharding"


def sharding_text(sharding: XLACompatibleSharding, ndim: int) -> str:
    """The attribute that gives a value of a rank this sharding, its mesh written inside.

    Args:
        sharding: The sharding; dimensions past its spec are closed and uncut.
        ndim: The rank of the value's buffers.

    Raises:
        CompileError: If the tiles can't be said by axes of any mesh.
    """
    grid, spec = _as_spec(sharding, ndim)
    dims = [_dim(axes) for axes in spec.for_rank(ndim)]
    return f"#sdy.sharding<mesh<{_mesh(grid)}>, [{', '.join(dims)}]>"


def _dim(axes: tuple[str, ...] | None) -> str:
    if axes is None:
        return "{?}"
    return "{" + ", ".join(_quoted(a) for a in axes) + "}"


def _mesh(grid: MeshGrid) -> str:
    axes = (f"{_quoted(n)}={s}" for n, s in zip(grid.axis_names, grid.axis_sizes, strict=True))
    return f"[{', '.join(axes)}]"


def _quoted(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _as_spec(sharding: XLACompatibleSharding, ndim: int) -> tuple[MeshGrid, Spec]:
    if isinstance(sharding, NamedSharding):
        return grid_of(sharding.mesh), sharding.normal_spec
    tiling = sharding.rank_tiling(ndim)
    if tiling.is_replicated:
        return MeshGrid((), ()), Spec()
    try:
        return _made_up_mesh(tiling)
    except GeometryError as error:
        text = tiling.to_tile_assignment().to_text()
        raise CompileError(
            f"the tiles {text} can't be said by mesh axes, which Shardy needs ({error}): use a "
            "NamedSharding, or partitioner='gspmd'"
        ) from None


@lru_cache(maxsize=1024)
def _made_up_mesh(tiling: Tiling) -> tuple[MeshGrid, Spec]:
    borders = [1]
    for count in reversed(tiling.counts):
        borders.append(borders[-1] * count)
    sizes = [size for step in tiling.steps for size in _cut(*step, borders)]
    grid = MeshGrid(tuple(f"_axis_{i}" for i in range(len(sizes))), tuple(sizes))
    return grid, spec_from_tiling(grid, tiling)


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
