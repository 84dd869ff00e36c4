"""TPU topologies by name, whose devices programs can be compiled for on any machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from xlashard._jax.runtime import topologies
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.tracebacks import short_tracebacks
from xlashard.errors import TopologyError, counted
from xlashard.sharding import Mesh
from xlashard.tpu.generations import Generation
from xlashard.tpu.mesh_layout import Dimension, arrange_devices, resolve_axis_sizes
from xlashard.tpu.topology_names import SliceName, accelerator_type, parse_topology_name

_DIMENSIONS = ("x", "y", "z")


@dataclass(frozen=True, repr=False)
class Topology:
    """One or more slices of TPU chips.

    Two topologies with the same name and number of slices are equal and share their devices.

    Attributes:
        name: Name in libtpu: `v5p:2x2x4`.
        slices: Number of slices of this shape, joined by the data-center network.
        generation: Figures of the chips.
        shape: Chips per dimension of a slice.
        twisted: Whether the long dimension is a twisted torus.
        devices: Compile-only devices, by slice and host.

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
        # Devices are not pickled; a name has the same devices in every process.
        return topology, (self.name, self.slices)

    @property
    def accelerator_type(self) -> str:
        """Name of the slice size in Cloud TPU: `v5p-128`, `v5litepod-16`."""
        return accelerator_type(SliceName(self.generation, self.shape, self.twisted))

    @property
    def chips(self) -> int:
        """Number of chips in all slices."""
        return self.slices * math.prod(self.shape)

    @cached_property
    def hosts(self) -> int:
        """Number of hosts in all slices."""
        return len({device.process_index for device in self.devices})

    @property
    def num_devices(self) -> int:
        """Number of devices in all slices."""
        return len(self.devices)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Per dimension of a slice, True if the links wrap around."""
        return wraps_of(self.generation, self.shape)

    @cached_property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Dimensions for laying out a mesh, outermost first.

        `slice`, the dimensions of the torus, and `core` for the devices of a chip.
        """
        chips = zip(_DIMENSIONS, self.shape, self.wraps, strict=False)
        return (
            Dimension("slice", self.slices),
            *(Dimension(name, size, wraps) for name, size, wraps in chips),
            Dimension("core", self.generation.devices_per_chip),
        )

    @cached_property
    def coordinates(self) -> npt.NDArray[np.int64]:
        """Coordinates of each device: `[devices, dimensions]`."""
        rank = len(self.shape)
        return np.array(
            [(_slice(d), *d.coords[:rank], d.core_on_chip) for d in self.devices], dtype=np.int64
        )

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

    def mesh(self, axes: Mapping[str, int], order: Sequence[str] | None = None) -> Mesh:
        """Return a mesh over all devices, laid on the torus for the highest bandwidth per axis.

        Axes take whole dimensions where possible, so that their devices form rings. Devices of a
        chip belong to the axes with the most communication, slices to the axes with the least,
        because slices communicate over the data-center network.

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
            return Mesh(arrange_devices(self._grid, self.dimensions, sizes, order), tuple(sizes))

    def __str__(self) -> str:
        """Return the name with the number of slices: `2 slices of v5e:4x4`."""
        return self.name if self.slices == 1 else f"{self.slices} slices of {self.name}"


def topology(name: str, slices: int = 1) -> Topology:
    """Return a TPU topology that programs can be compiled for, on a machine without a TPU.

    Args:
        name: A Cloud TPU name (`v5p-128`, `v5litepod-16`, `v6e-64`), a generation with a slice
            shape (`v5p:8x8x8`, `ironwood:4x4x4`), or a machine type (`ct5lp-hightpu-4t`). The
            number in a Cloud TPU name counts TensorCores for v2, v3, v4, v5p and tpu7x, chips for
            v5e and v6e.
        slices: Number of slices, joined by the data-center network.

    Raises:
        TopologyError: If the topology is unknown, or libtpu is missing.

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
            f"slices={slices!r} is invalid: expected 1 or more", topology=name, slices=2
        )
    if slices > 1 and not found.generation.dcn_bandwidth:
        raise TopologyError(
            f"slices={slices} is invalid: {found.generation.title} supports a single slice",
            topology=found.text,
        )


# Cached, because meshes are equal only if their devices are the same objects.
@lru_cache(maxsize=1024)
def _made(name: SliceName, slices: int) -> Topology:
    devices = topologies.compile_only_devices(
        name.text, _options(name.generation, name.shape, slices)
    )
    ordered = sorted(devices, key=lambda device: (_slice(device), device.process_index))
    return Topology(name.text, slices, name.generation, name.shape, name.twisted, tuple(ordered))


def wraps_of(generation: Generation, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Return, per dimension of a slice, whether the links wrap around.

    Optical switches join the faces of whole cubes in three dimensions. In two dimensions only the
    full pod size wraps around.
    """
    if generation.dimensions == 2:
        return tuple(size == generation.ring_size for size in shape)
    whole = all(size % generation.ring_size == 0 for size in shape)
    return (whole,) * len(shape)


def _options(generation: Generation, shape: tuple[int, ...], slices: int) -> dict[str, object]:
    """Return the libtpu options for a topology.

    By default, libtpu assumes no wrap-around links, one device per core, and at least one full
    host.
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
    # `slice_index` is None for a single slice.
    return getattr(device, "slice_index", None) or 0
