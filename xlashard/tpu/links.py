"""Bandwidth between the devices along mesh axes, by their position on the torus."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import TopologyError
from xlashard.sharding import Mesh
from xlashard.tpu.generations import Generation
from xlashard.tpu.mesh_layout import AxisSegment, Dimension, part, usable_links
from xlashard.tpu.topologies import Topology


@dataclass(frozen=True)
class AxisLinks:
    """Links between the devices along some mesh axes.

    Attributes:
        axes: Names of the mesh axes.
        size: Group size: devices that differ in these axes alone.
        parts: Extent of the axes along each topology dimension, including `slice` and `core`; empty
            if the devices follow no dimensions.
        links: Links per chip, weighted by the share of this group where groups share a link.
        ring: Whether the devices form a ring of neighbours in each dimension.
        network: `dcn` if the group spans slices.
        bytes_per_second: Bytes per second that one device sends while all groups are active. A ring
            sends `(size - 1) / size` of the gathered bytes at this speed.
    """

    axes: tuple[str, ...]
    size: int
    parts: tuple[AxisSegment, ...]
    links: float
    ring: bool
    network: Literal["ici", "dcn"]
    bytes_per_second: float


def axis_links(topology: Topology, mesh: Mesh, axes: Sequence[str]) -> AxisLinks:
    """Return the links between the devices along some mesh axes.

    Args:
        topology: Topology of the mesh devices.
        mesh: Mesh in any device order.
        axes: Names of mesh axes; the groups of a collective span all of them.

    Raises:
        TopologyError: If the mesh has devices of another topology, or lacks an axis.

    Example:
        >>> from xlashard.tpu import topology
        >>> from xlashard.tpu.links import axis_links
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
def _links(topology: Topology, mesh: Mesh, axes: tuple[str, ...]) -> AxisLinks:
    steps = _steps(topology, mesh)
    size = math.prod(mesh.shape[name] for name in axes)
    parts = None if steps is None else _merged(topology.dimensions, steps, mesh, axes)
    spans = _slices_spanned(topology, mesh, axes)
    generation = topology.generation
    if parts is None:
        # The routes are unknown: assume a share of one link per device.
        shared = generation.ici_bandwidth / generation.devices_per_chip
        dcn = generation.device_dcn_bandwidth
        network, speed = ("dcn", dcn) if spans > 1 else ("ici", shared)
        return AxisLinks(axes, size, (), 1.0, False, network, speed)
    on_torus = [p for p in parts if p.dimension not in ("slice", "core")]
    links = usable_links(on_torus)
    speed = ici_speed(generation, parts, links)
    if spans > 1:
        # All devices of a slice receive from the other slices in parallel.
        speed = min(speed, generation.device_dcn_bandwidth * (size // spans))
    ring = spans == 1 and bool(parts) and all(p.ring and p.stride == 1 for p in parts)
    return AxisLinks(axes, size, parts, links, ring, "dcn" if spans > 1 else "ici", speed)


def ici_speed(generation: Generation, parts: Sequence[AxisSegment], links: float) -> float:
    """Return the bytes per second that a device sends within its slice.

    Devices of a chip share its links. Inside one group, data received by the chip serves both.

    Args:
        generation: Generation of the chips.
        parts: Dimensions that the group spans.
        links: Links of a chip that the group uses.
    """
    together = any(p.dimension == "core" for p in parts)
    if not links:
        return generation.core_bandwidth if together else math.inf
    speed = links * generation.ici_bandwidth
    if together:
        return min(speed, generation.core_bandwidth)
    return speed / generation.devices_per_chip


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
def _steps(topology: Topology, mesh: Mesh) -> dict[str, npt.NDArray[np.int64]] | None:
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
def _places(topology: Topology, mesh: Mesh) -> npt.NDArray[np.int64]:
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


def _slices_spanned(topology: Topology, mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of slices that the devices along some axes span."""
    numbers = _places(topology, mesh)[..., 0]
    line = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return len(np.unique(numbers[line]))
