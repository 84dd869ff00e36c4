"""Annotations for Shardy: `sdy.sharding` over a mesh of named axes.

Syntax: the Shardy dialect, https://openxla.org/shardy/sharding_representation.
"""

from collections.abc import Sequence

from xlashard.geometry import MeshGrid, Spec, Tiling
from xlashard.sharding import Mesh, NamedSharding, grid_of
from xlashard.sharding.axes import axes_of, made_up_grid

ATTRIBUTE = "sdy.sharding"


def spec_text(sharding: NamedSharding, ndim: int) -> str:
    """Return the attribute that gives a value of a rank this sharding, its mesh written inside.

    Args:
        sharding: The sharding; dimensions past its spec are closed and replicated.
        ndim: The rank of the value's buffers.
    """
    return _text(grid_of(sharding.mesh), sharding.normal_spec, ndim)


def tiling_text(tiling: Tiling) -> str:
    """Return the attribute of a tiling, on a mesh whose axes are made up from its tiles.

    Raises:
        GeometryError: If no mesh has these tiles.
    """
    axes = axes_of(tiling)
    return _text(axes.grid, axes.spec, tiling.ndim, axes.device_ids)


def open_text(ndim: int, trailing: int, mesh: Mesh | None, num_devices: int) -> str:
    """The attribute that leaves a value to the partitioner but for its trailing dimensions.

    Args:
        ndim: How many dimensions are open.
        trailing: How many are closed and uncut.
        mesh: The mesh whose axes may cut the open ones; None for one made up.
        num_devices: How many devices there are.
    """
    grid = made_up_grid([num_devices]) if mesh is None else grid_of(mesh)
    return _text(grid, Spec((None,) * ndim), ndim + trailing)


def _text(grid: MeshGrid, spec: Spec, ndim: int, device_ids: Sequence[int] = ()) -> str:
    dims = ", ".join(map(_dim, spec.for_rank(ndim)))
    mesh = _mesh(grid, device_ids)
    return f"#sdy.sharding<mesh<{mesh}>, [{dims}]{_unreduced(grid, spec)}>"


def _unreduced(grid: MeshGrid, spec: Spec) -> str:
    axes = [axis for axis in grid.axis_names if axis in spec.unreduced]
    if not axes:
        return ""
    kind = "" if spec.reduction == "sum" else spec.reduction
    return f", unreduced={kind}{{{', '.join(map(_quoted, axes))}}}"


def _dim(axes: tuple[str, ...] | None) -> str:
    if axes is None:
        return "{?}"
    return "{" + ", ".join(map(_quoted, axes)) + "}"


def _mesh(grid: MeshGrid, device_ids: Sequence[int] = ()) -> str:
    axes = (f"{_quoted(n)}={s}" for n, s in zip(grid.axis_names, grid.axis_sizes, strict=True))
    order = f", device_ids=[{', '.join(map(str, device_ids))}]" if device_ids else ""
    return f"[{', '.join(axes)}]{order}"


def _quoted(name: str) -> str:
    """A name as a text of MLIR: what it has no letter for goes by the bytes of UTF-8."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:02X}"
        for byte in name.encode()
    )
    return f'"{plain}"'
