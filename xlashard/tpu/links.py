"""Where the axes of a mesh lie on the torus, and how fast the devices along them talk."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import TopologyError
from xlashard.sharding import Mesh
from xlashard.tpu.generations import Generation
from xlashard.tpu.mesh_layout import AxisPart, Dimension, part, usable_links
from xlashard.tpu.topologies import Topology


@dataclass(frozen=True)
class AxisLinks:
    """What the devices along some mesh axes talk over.

    Attributes:
        axes: The axes.
        size: How many devices talk with each other: those that differ in these axes alone.
        parts: What the axes have of each dimension of the topology, `slice` and `core` included;
            empty where the devices follow no dimensions.
        links: Links of a chip that they use, those that other groups use too by their share.
        ring: Whether they close to rings in each dimension, every step going to a neighbour.
        network: `dcn` where they lie in several slices.
        bytes_per_second: How fast one device sends to the others, all groups at once. What a ring
            sends, `(size - 1) / size` of the gathered bytes, takes that by this speed.
    """

    axes: tuple[str, ...]
    size: int
    parts: tuple[AxisPart, ...]
    links: float
    ring: bool
    network: Literal["ici", "dcn"]
    bytes_per_second: float


def axis_links(topology: Topology, mesh: Mesh, axes: Sequence[str]) -> AxisLinks:
    """What the devices along some mesh axes talk over.

    Args:
        topology: Whose devices the mesh has.
        mesh: Laid in any way.
        axes: Names of mesh axes; a collective along several of them has groups over all.

    Raises:
        TopologyError: If the mesh has other devices, or no such axes.

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


def axis_parts(topology: Topology, mesh: Mesh, axis: str) -> tuple[AxisPart, ...]:
    """What a mesh axis has of each dimension; nothing where it follows none.

    Args:
        topology: Whose devices the mesh has.
        mesh: Laid in any way.
        axis: A name of its axes.
    """
    return axis_links(topology, mesh, (axis,)).parts


@lru_cache(maxsize=256)
def _links(topology: Topology, mesh: Mesh, axes: tuple[str, ...]) -> AxisLinks:
    steps = _steps(topology, mesh)
    size = math.prod(mesh.shape[name] for name in axes)
    parts = None if steps is None else _merged(topology.dimensions, steps, mesh, axes)
    spans = _slices_spanned(topology, mesh, axes)
    generation = topology.generation
    if parts is None:
        # Nobody knows the ways; each device then has no more than its part of one link.
        shared = generation.ici_bandwidth / generation.devices_per_chip
        dcn = generation.device_dcn_bandwidth
        network, speed = ("dcn", dcn) if spans > 1 else ("ici", shared)
        return AxisLinks(axes, size, (), 1.0, False, network, speed)
    on_torus = [p for p in parts if p.dimension not in ("slice", "core")]
    links = usable_links(on_torus)
    speed = ici_speed(generation, parts, links)
    if spans > 1:
        # The devices of a slice bring in together what comes from the others.
        speed = min(speed, generation.device_dcn_bandwidth * (size // spans))
    ring = spans == 1 and bool(parts) and all(p.ring and p.stride == 1 for p in parts)
    return AxisLinks(axes, size, parts, links, ring, "dcn" if spans > 1 else "ici", speed)


def ici_speed(generation: Generation, parts: Sequence[AxisPart], links: float) -> float:
    """How fast a device sends within its slice.

    The devices of a chip share its links. Where they are in one group, what comes in serves both.

    Args:
        generation: Of the chips.
        parts: The dimensions along which they send.
        links: How many of a chip's links they use for that.
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
) -> tuple[AxisPart, ...] | None:
    """The parts of some axes together; None if they don't fill a box of positions."""
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
    """For each axis where its devices lie from the first of them: `[size, dimensions]`.

    None if they lie differently for different places along the other axes.
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
    """The coordinates of all devices of a mesh: `[*mesh, dimensions]`."""
    positions = topology.positions
    try:
        found = [positions[device.id] for device in mesh.devices.flat]
    except KeyError as error:
        raise TopologyError(
            f"the mesh has a device of {mesh.devices.flat[0].platform}, with the id {error}, and "
            f"{topology} has none: topology({topology.name!r}).mesh(axes)"
        ) from None
    return topology.coordinates[np.array(found)].reshape(*mesh.devices.shape, -1)


def _slices_spanned(topology: Topology, mesh: Mesh, axes: Sequence[str]) -> int:
    """In how many slices the devices along some axes lie."""
    numbers = _places(topology, mesh)[..., 0]
    line = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return len(np.unique(numbers[line]))
