"""Base class of topologies: devices with coordinates, meshes on them, and links along mesh axes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

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

    from xlashard._jax.runtime import shardings
    from xlashard._jax.runtime.shardings import Device
else:
    # For meshes on devices of JAX; figures of a topology are computed without it.
    jax_sharding = deferred("jax.sharding")
    shardings = deferred("xlashard._jax.runtime.shardings")


class GroupExtent(NamedTuple):
    """Groups of devices that differ along some mesh axes alone.

    Attributes:
        axes: Names of the mesh axes.
        size: Number of devices of a group.
        parts: Extent along each dimension; None unless all groups fill boxes of one extent.
        domains: Number of positions along the first dimension that a group spans.
    """

    axes: tuple[str, ...]
    size: int
    parts: tuple[AxisSegment, ...] | None
    domains: int


@dataclass(frozen=True)
class AxisLinks:
    """Links between the devices along some mesh axes.

    Attributes:
        axes: Names of the mesh axes.
        size: Group size: devices that differ in these axes alone.
        parts: Extent of the axes along each topology dimension, including `slice` and `core`, or
            `node` and `gpu`; empty unless all groups fill boxes of one extent.
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
    def find_links(self, group: GroupExtent) -> AxisLinks:
        """Return the links of a group of devices."""

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
    def _by_place(self) -> "Mapping[Hashable, Device]":
        """Devices by their places."""
        return {_place(device): device for device in self.devices}

    @cached_property
    def _grid(self) -> npt.NDArray[np.object_]:
        """Devices by coordinates."""
        grid = np.empty(tuple(d.size for d in self.dimensions), dtype=object)
        grid[tuple(self.coordinates.T)] = self.devices
        return grid

    def match_devices(self, devices: "Iterable[Device]") -> "tuple[Device, ...] | None":
        """Return the devices of this topology at the places of some devices, in their order.

        The client of the devices has the same chips at the same coordinates: it is that of this
        topology, of `jax.experimental.topologies.get_topology_desc`, or of a real slice. Ids may
        differ.

        Args:
            devices: Devices of one client.

        Returns:
            The devices; None for those of another topology.
        """
        devices = tuple(devices)
        if set(devices) <= set(self.devices):
            return devices
        places = {device: _place(device) for device in devices[0].client.devices()}
        if set(places.values()) != self._by_place.keys():
            return None
        return tuple([self._by_place[places[device]] for device in devices])

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
    coordinates = mesh_coordinates(topology, mesh)
    size = math.prod(mesh.shape[name] for name in axes)
    along = [mesh.axis_names.index(name) for name in axes]
    groups = np.moveaxis(coordinates, along, range(-1 - len(axes), -1))
    parts = extents(topology.dimensions, groups.reshape(-1, size, coordinates.shape[-1]))
    domains = next((p.size for p in parts if p.dimension == topology.dimensions[0].name), 1)
    is_box = math.prod(p.size for p in parts) == size
    return topology.find_links(GroupExtent(axes, size, parts if is_box else None, domains))


@lru_cache(maxsize=64)
def mesh_coordinates(topology: BaseTopology, mesh: "Mesh") -> npt.NDArray[np.int64]:
    """Return the coordinates of all mesh devices: `[*mesh, dimensions]`.

    Args:
        topology: Topology of the mesh devices.
        mesh: Mesh in any device order.

    Raises:
        TopologyError: If the mesh has devices of another topology.
    """
    devices = topology.match_devices(mesh.devices.flat)
    if devices is None:
        platform = mesh.devices.flat[0].platform
        raise TopologyError(
            f"the mesh has {counted(mesh.size, 'device')} of platform {platform}, which are not "
            f"those of {topology}: make it by topology({topology.name!r}).mesh(axes)"
        )
    positions = {device: position for position, device in enumerate(topology.devices)}
    where = topology.coordinates[[positions[device] for device in devices]]
    return where.reshape(*mesh.devices.shape, -1)


def _place(device: "Device") -> Hashable:
    """Return the chip of a device and its place among the devices of a client."""
    coords = getattr(device, "coords", None)
    if device.platform != "tpu" or coords is None:
        return device.device_kind, device.id
    return device.device_kind, shardings.slice_of(device), *coords, device.core_on_chip
