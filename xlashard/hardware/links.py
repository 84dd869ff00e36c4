"""Bandwidth between the devices along mesh axes, by their position in the topology."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import TopologyError
from xlashard.hardware.base_topology import AxisLinks, BaseTopology
from xlashard.hardware.mesh_layout import AxisSegment, Dimension, part
from xlashard.sharding import Mesh


def axis_links(topology: BaseTopology, mesh: Mesh, axes: Sequence[str]) -> AxisLinks:
    """Return the links between the devices along some mesh axes.

    Args:
        topology: BaseTopology of the mesh devices.
        mesh: Mesh in any device order.
        axes: Names of mesh axes; the groups of a collective span all of them.

    Raises:
        TopologyError: If the mesh has devices of another topology, or lacks an axis.

    Example:
        >>> from xlashard.tpu import axis_links, topology
        >>> pod = topology("v5p:4x4x8")
        >>> found = axis_links(pod, pod.mesh({"data": 8, "model": 16}), ["model"])
        >>> [part.dimension for part in found.parts], found.links, found.ring
        (['x', 'y'], 4.0, True)
    """
    with short_tracebacks:
        unknown = [name for name in axes if name not in mesh.shape]
        if unknown:
            raise TopologyError(
                f"the mesh has no axis {unknown[0]!r}; it has {tuple(mesh.shape)}: "
                f"axis_links(topology, mesh, {list(mesh.shape)[:1]})"
            )
        return _links(topology, mesh, tuple(axes))


@lru_cache(maxsize=256)
def _links(topology: BaseTopology, mesh: Mesh, axes: tuple[str, ...]) -> AxisLinks:
    steps = _steps(topology, mesh)
    size = math.prod(mesh.shape[name] for name in axes)
    parts = None if steps is None else _merged(topology.dimensions, steps, mesh, axes)
    return topology.links_of(axes, size, parts, _domains_spanned(topology, mesh, axes))


def _merged(
    dimensions: Sequence[Dimension],
    steps: dict[str, npt.NDArray[np.int64]],
    mesh: Mesh,
    axes: Sequence[str],
) -> tuple[AxisSegment, ...] | None:
    """Return the combined extent of some axes, or None if they don't fill a box of positions."""
    where = np.zeros((1, len(dimensions)), np.int64)
    for name in axes:
        where = (where[:, None, :] + steps[name][None, :, :]).reshape(-1, len(dimensions))
    parts = []
    for index, dimension in enumerate(dimensions):
        places = np.unique(where[:, index])
        if len(places) > 1:
            parts.append(part(dimension, len(places), int(np.diff(places).min())))
    return tuple(parts) if math.prod(p.size for p in parts) == len(where) else None


@lru_cache(maxsize=64)
def _steps(topology: BaseTopology, mesh: Mesh) -> dict[str, npt.NDArray[np.int64]] | None:
    """Return device offsets from the first device of each axis: `[size, dimensions]`.

    None if the offsets depend on the position along other axes.
    """
    places = _places(topology, mesh)
    first = places[(0,) * mesh.devices.ndim]
    steps, total = {}, first
    for axis, name in enumerate(mesh.axis_names):
        line = places[tuple(slice(None) if i == axis else 0 for i in range(mesh.devices.ndim))]
        steps[name] = line - first
        shape = [1] * mesh.devices.ndim + [len(first)]
        shape[axis] = mesh.devices.shape[axis]
        total = total + steps[name].reshape(shape)
    return steps if np.array_equal(np.broadcast_to(total, places.shape), places) else None


@lru_cache(maxsize=64)
def _places(topology: BaseTopology, mesh: Mesh) -> npt.NDArray[np.int64]:
    """Return the coordinates of all mesh devices: `[*mesh, dimensions]`."""
    positions = topology.positions
    try:
        found = [positions[device.id] for device in mesh.devices.flat]
    except KeyError as error:
        raise TopologyError(
            f"the mesh has device {error} of platform {mesh.devices.flat[0].platform}, which is "
            f"not in {topology}: make it by topology({topology.name!r}).mesh(axes)"
        ) from None
    return topology.coordinates[np.array(found)].reshape(*mesh.devices.shape, -1)


def _domains_spanned(topology: BaseTopology, mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of slices or nodes that the devices along some axes span."""
    numbers = _places(topology, mesh)[..., 0]
    line = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return len(np.unique(numbers[line]))
