"""A TPU topology by name: its chips and devices, for which programs compile anywhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from xlashard._jax import topologies
from xlashard._jax.shardings import Device
from xlashard._jax.tracebacks import short_tracebacks
from xlashard.errors import TopologyError, counted
from xlashard.sharding import Mesh
from xlashard.tpu.generations import Generation
from xlashard.tpu.mesh_layout import Dimension, arrange_devices, resolve_axis_sizes
from xlashard.tpu.topology_names import SliceName, accelerator_type, parse_topology_name

_DIMENSIONS = ("x", "y", "z")


@dataclass(frozen=True, repr=False)
class Topology:
    """One or more slices of TPU chips.

    Two are equal if they have the same name and as many slices, and then their devices are the
    same too.

    Attributes:
        name: As libtpu writes it: `v5p:2x2x4`.
        slices: How many slices there are, each of that shape, joined by the data-center network.
        generation: What is known of the chips.
        shape: Chips along each dimension of a slice.
        twisted: Whether the long dimension is joined with a twist.
        devices: For which programs can be compiled, and not run; slice by slice, those of a host
            together.

    Example:
        >>> from xlashard.tpu import topology
        >>> pod = topology("v5e-16")
        >>> pod
        Topology('v5e:4x4': 16 chips on 4 hosts)
        >>> pod.mesh({"data": 4, "model": 4}).shape
        OrderedDict({'data': 4, 'model': 4})
    """

    name: str
    slices: int
    generation: Generation = field(compare=False)
    shape: tuple[int, ...] = field(compare=False)
    twisted: bool = field(compare=False)
    devices: tuple[Device, ...] = field(compare=False)

    def __repr__(self) -> str:
        many = f" in {self.slices} slices" if self.slices > 1 else ""
        devices = "" if self.num_devices == self.chips else f", {self.num_devices:,} devices"
        on = counted(self.hosts, "host").replace(str(self.hosts), f"{self.hosts:,}")
        chips = counted(self.chips, "chip").replace(str(self.chips), f"{self.chips:,}")
        return f"Topology({self.name!r}: {chips} on {on}{many}{devices})"

    def __reduce__(self) -> tuple[object, ...]:
        # Devices go into no pickle; those of a name are the same in every process.
        return topology, (self.name, self.slices)

    @property
    def accelerator_type(self) -> str:
        """How Cloud calls a slice of as many chips: `v5p-128`, `v5litepod-16`."""
        return accelerator_type(SliceName(self.generation, self.shape, self.twisted))

    @property
    def chips(self) -> int:
        """How many chips there are, in all slices."""
        return self.slices * math.prod(self.shape)

    @cached_property
    def hosts(self) -> int:
        """How many hosts there are, in all slices."""
        return len({device.process_index for device in self.devices})

    @property
    def num_devices(self) -> int:
        """How many devices there are, in all slices."""
        return len(self.devices)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each dimension of a slice, whether its ends are joined to a ring."""
        return wraps_of(self.generation, self.shape)

    @cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """What a mesh is laid on, the outermost first.

        They are `slice`, the dimensions of the torus, and `core`: the devices of one chip.
        """
        chips = zip(_DIMENSIONS, self.shape, self.wraps, strict=False)
        return (
            Dimension("slice", self.slices),
            *(Dimension(name, size, wraps) for name, size, wraps in chips),
            Dimension("core", self.generation.devices_per_chip),
        )

    @cached_property
    def coordinates(self) -> npt.NDArray[np.int64]:
        """Where each device lies along each of the `dimensions`: `[devices, dimensions]`."""
        rank = len(self.shape)
        return np.array(
            [(_slice(d), *d.coords[:rank], d.core_on_chip) for d in self.devices], dtype=np.int64
        )

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """By the id of a device its place in `devices`."""
        return {device.id: position for position, device in enumerate(self.devices)}

    @cached_property
    def _grid(self) -> npt.NDArray[np.object_]:
        """The devices by their coordinates."""
        grid = np.empty(tuple(d.size for d in self.dimensions), dtype=object)
        grid[tuple(self.coordinates.T)] = self.devices
        return grid

    def mesh(self, axes: Mapping[str, int], order: Sequence[str] | None = None) -> Mesh:
        """A mesh over all devices, its axes laid on the torus where they have the fastest links.

        An axis lies along whole dimensions where it can, so that its devices form rings. The
        devices of one chip belong to the axes that talk most, and the slices to those that talk
        least: what goes between slices goes over the data-center network.

        Args:
            axes: By name how many devices each axis has, in the order of the mesh; one of them may
                be -1, for what the others leave.
            order: The names, the axis that sends the most first. Otherwise the last axis of the
                mesh sends the most.

        Raises:
            TopologyError: If the axes are not as many devices as the topology has.

        Example:
            >>> from xlashard.tpu import topology
            >>> topology("v5p-128").mesh({"data": -1, "model": 4}).shape
            OrderedDict({'data': 16, 'model': 4})
        """
        with short_tracebacks:
            sizes = resolve_axis_sizes(axes, self.num_devices, str(self))
            return Mesh(arrange_devices(self._grid, self.dimensions, sizes, order), tuple(sizes))

    def __str__(self) -> str:
        """The name, with how many slices there are of it: `2 slices of v5e:4x4`."""
        return self.name if self.slices == 1 else f"{self.slices} slices of {self.name}"


def topology(name: str, slices: int = 1) -> Topology:
    """A TPU topology that programs can be compiled for, on a machine without a TPU.

    Args:
        name: A name of Cloud's (`v5p-128`, `v5litepod-16`, `v6e-64`), a generation with the shape
            of a slice (`v5p:8x8x8`, `ironwood:4x4x4`), or one machine (`ct5lp-hightpu-4t`). The
            number of a Cloud name counts TensorCores for v2, v3, v4, v5p and tpu7x, chips for v5e
            and v6e.
        slices: How many slices of it, joined by the data-center network.

    Raises:
        TopologyError: If there is no such topology, or libtpu is missing.

    Example:
        >>> from xlashard.tpu import topology
        >>> topology("v5p-128").shape
        (4, 4, 4)
        >>> topology("v6e-16", slices=2)
        Topology('v6e:4x4': 32 chips on 8 hosts in 2 slices)
    """
    with short_tracebacks:
        found = parse_topology_name(name)
        _check_slices(name, found, slices)
        return _made(found, slices)


def _check_slices(name: str, found: SliceName, slices: int) -> None:
    if isinstance(slices, bool) or not isinstance(slices, int) or slices < 1:
        raise TopologyError(
            f"slices is {slices!r}; there are one or more of them", topology=name, slices=2
        )
    if slices > 1 and not found.generation.dcn_bandwidth:
        raise TopologyError(
            f"slices of {found.generation.title} can't be joined, and slices is {slices}",
            topology=found.text,
        )


# Meshes on the same topology made twice are equal only if their devices are the same objects.
@lru_cache(maxsize=1024)
def _made(name: SliceName, slices: int) -> Topology:
    devices = topologies.compile_only_devices(
        name.text, _options(name.generation, name.shape, slices)
    )
    ordered = sorted(devices, key=lambda device: (_slice(device), device.process_index))
    return Topology(name.text, slices, name.generation, name.shape, name.twisted, tuple(ordered))


def wraps_of(generation: Generation, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """For each dimension of a slice, whether its ends are joined to a ring.

    Slices of three dimensions are made of cubes, whose faces optical switches join as they please;
    in a pod of two dimensions the ends are joined, and a slice has those that it spans.
    """
    if generation.dimensions == 2:
        return tuple(size == generation.ring_size for size in shape)
    whole = all(size % generation.ring_size == 0 for size in shape)
    return (whole,) * len(shape)


def _options(generation: Generation, shape: tuple[int, ...], slices: int) -> dict[str, object]:
    """What libtpu is to be told besides the name.

    Of itself it takes every slice for one without rings, cores for devices of their own, and knows
    no slice of one chip.
    """
    is_host = shape in generation.single_host_shapes
    bounds = shape if is_host else map(min, shape, generation.host_bounds)
    options: dict[str, object] = {"chips_per_host_bounds": [*bounds, 1][:3]}
    wraps = wraps_of(generation, shape)
    if any(wraps):
        options["wrap"] = [*wraps, False][:3]
    if generation.name == "v4":
        options["chip_config_name"] = "megacore"
    if slices > 1:
        options["num_slices"] = slices
    return options


def _slice(device: Device) -> int:
    # None where there is one slice.
    return getattr(device, "slice_index", None) or 0
