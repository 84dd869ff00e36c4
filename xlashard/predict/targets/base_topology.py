"""Base class of topologies: devices with coordinates, meshes on them, and links along mesh axes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from xlashard.errors import TopologyError, counted
from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.mesh_layout import (
    AxisSegment,
    Dimension,
    arrange_devices,
    extents,
    resolve_axis_sizes,
)
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from jax import sharding as jax_sharding
    from jax.sharding import Mesh

    from xlashard._jax.runtime.shardings import Device
else:
    # For meshes on devices of JAX; figures of a topology are computed without it.
    jax_sharding = deferred("jax.sharding")


def counted_in_thousands(number: int, noun: str) -> str:
    """Return a number with its noun: `1 chip`, `8,960 chips`."""
    return counted(number, noun).replace(str(number), f"{number:,}")


@dataclass(frozen=True)
class AxisLinks:
    """Links between the devices along some mesh axes.

    Attributes:
        axes: Names of the mesh axes.
        size: Group size: devices that differ in these axes alone.
        parts: Extent of the axes along each topology dimension, including `slice` and `core`, or
            `node` and `gpu`; empty if the devices follow no dimensions.
        links: Links per chip, weighted by the share of this group where groups share a link.
        ring: Whether the devices form a ring of neighbours in each dimension.
        network: `dcn` if the group spans slices of TPUs, `network` if it spans nodes of GPUs.
        bytes_per_second: Bytes per second that one device sends while all groups are active. A ring
            sends `(size - 1) / size` of the gathered bytes at this speed.
        domains: Number of slices or nodes that the group spans.
    """

    axes: tuple[str, ...]
    size: int
    parts: tuple[AxisSegment, ...]
    links: float
    ring: bool
    network: Literal["ici", "dcn", "nvlink", "pcie", "network"]
    bytes_per_second: float
    domains: int = 1


@dataclass(frozen=True, repr=False)
class BaseTopology(ABC):
    """Chips that programs can be compiled for, on a machine without them.

    Two topologies with the same name and number of slices are equal and share their devices.

    Attributes:
        name: Name of one slice.
        slices: Number of slices of this shape, joined by the data-center network.
        chip: Figures of the chips.
        devices: Compile-only devices, by slice and host.
    """

    name: str
    slices: int
    chip: Chip = field(compare=False)
    devices: "tuple[Device, ...]" = field(compare=False)

    def __str__(self) -> str:
        """Return the name with the number of slices: `2 slices of v5e:4x4`."""
        return self.name if self.slices == 1 else f"{self.slices} slices of {self.name}"

    @property
    @abstractmethod
    def dimensions(self) -> tuple[Dimension, ...]:
        """Dimensions for laying out a mesh, outermost first.

        The first one crosses the network between groups of chips with faster links, the last one
        lies within such a group.
        """

    @property
    @abstractmethod
    def coordinates(self) -> npt.NDArray[np.int64]:
        """Coordinates of each device: `[devices, dimensions]`."""

    @abstractmethod
    def links_of(
        self,
        axes: tuple[str, ...],
        size: int,
        parts: tuple[AxisSegment, ...] | None,
        domains: int,
    ) -> AxisLinks:
        """Return the links of a group of devices.

        Args:
            axes: Names of the mesh axes that the group spans.
            size: Number of devices.
            parts: Extent along each dimension; None if the devices follow no dimensions.
            domains: Number of positions along the first dimension that the group spans.
        """

    @abstractmethod
    def larger(self) -> Iterator[Self]:
        """Yield topologies of the same chip with a multiple of its chips, smallest first."""

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def chips(self) -> int:
        """Number of chips."""
        return self.num_devices // self.chip.devices_per_chip

    @cached_property
    def hosts(self) -> int:
        """Number of hosts."""
        return len({device.process_index for device in self.devices})

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """Position in `devices` by device id."""
        return {device.id: position for position, device in enumerate(self.devices)}

    @cached_property
    def _grid(self) -> npt.NDArray[np.object_]:
        """Devices by coordinates."""
        grid = np.empty(tuple(d.size for d in self.dimensions), dtype=object)
        grid[tuple(self.coordinates.T)] = self.devices
        return grid

    def mesh(self, axes: Mapping[str, int], order: Sequence[str] | None = None) -> "Mesh":
        """Return a mesh over all devices, laid out for the highest bandwidth per axis.

        Axes take whole dimensions of a torus where possible, so that their devices form rings.
        Devices of a chip, or of an NVLink domain, belong to the axes with the most communication,
        slices and nodes to the axes with the least, because these communicate over the data-center
        network.

        Args:
            axes: Size per axis name, in the order of the mesh; one size may be -1.
            order: Axis names, the axis with the most communication first. Default: the last mesh
                axis first.

        Raises:
            TopologyError: If the axis sizes don't multiply to the number of devices.

        Example:
            >>> from xlashard.tpu import topology
            >>> topology("v5p-128").mesh({"data": -1, "model": 4}).shape
            OrderedDict({'data': 16, 'model': 4})
        """
        with short_tracebacks:
            sizes = resolve_axis_sizes(axes, self.num_devices, str(self))
            return jax_sharding.Mesh(
                arrange_devices(self._grid, self.dimensions, sizes, order), tuple(sizes)
            )


def axis_links(topology: BaseTopology, mesh: "Mesh", axes: Sequence[str]) -> AxisLinks:
    """Return the links between the devices along some mesh axes.

    Args:
        topology: Topology of the mesh devices.
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
def _links(topology: BaseTopology, mesh: "Mesh", axes: tuple[str, ...]) -> AxisLinks:
    steps = _steps(topology, mesh)
    size = math.prod(mesh.shape[name] for name in axes)
    parts = None if steps is None else _merged(topology.dimensions, steps, mesh, axes)
    return topology.links_of(axes, size, parts, _domains_spanned(topology, mesh, axes))


def _merged(
    dimensions: Sequence[Dimension],
    steps: dict[str, npt.NDArray[np.int64]],
    mesh: "Mesh",
    axes: Sequence[str],
) -> tuple[AxisSegment, ...] | None:
    """Return the combined extent of some axes, or None if they don't fill a box of positions."""
    where = np.zeros((1, len(dimensions)), np.int64)
    for name in axes:
        where = (where[:, None, :] + steps[name][None, :, :]).reshape(-1, len(dimensions))
    parts = extents(dimensions, where)
    return parts if math.prod(p.size for p in parts) == len(where) else None


@lru_cache(maxsize=64)
def _steps(topology: BaseTopology, mesh: "Mesh") -> dict[str, npt.NDArray[np.int64]] | None:
    """Return device offsets from the first device of each axis: `[size, dimensions]`.

    None if the offsets depend on the position along other axes.
    """
    places = mesh_coordinates(topology, mesh)
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
def mesh_coordinates(topology: BaseTopology, mesh: "Mesh") -> npt.NDArray[np.int64]:
    """Return the coordinates of all mesh devices: `[*mesh, dimensions]`.

    Args:
        topology: Topology of the mesh devices.
        mesh: Mesh in any device order.

    Raises:
        TopologyError: If the mesh has devices of another topology.
    """
    positions = topology.positions
    try:
        device_positions = [positions[device.id] for device in mesh.devices.flat]
    except KeyError as error:
        raise TopologyError(
            f"the mesh has device {error} of platform {mesh.devices.flat[0].platform}, which is "
            f"not in {topology}: make it by topology({topology.name!r}).mesh(axes)"
        ) from None
    return topology.coordinates[np.array(device_positions)].reshape(*mesh.devices.shape, -1)


def _domains_spanned(topology: BaseTopology, mesh: "Mesh", axes: Sequence[str]) -> int:
    """Return the number of slices or nodes that the devices along some axes span."""
    numbers = mesh_coordinates(topology, mesh)[..., 0]
    line = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return len(np.unique(numbers[line]))
