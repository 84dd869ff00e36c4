"""TPU topologies by name, whose devices programs can be compiled for on any machine."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import numpy.typing as npt

from xlashard.errors import TopologyError, counted
from xlashard.predict.targets.base_topology import AxisLinks, BaseTopology, GroupExtent
from xlashard.predict.targets.mesh_layout import AxisSegment, Dimension, usable_links
from xlashard.predict.targets.tpu.generations import Generation
from xlashard.predict.targets.tpu.topology_names import (
    SliceName,
    accelerator_type,
    chip_counts,
    default_shape,
    parse_topology_name,
)
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from xlashard._jax.runtime import shardings, topologies
else:
    # For devices, which libtpu makes; the figures of a topology need neither.
    shardings = deferred("xlashard._jax.runtime.shardings")
    topologies = deferred("xlashard._jax.runtime.topologies")

_DIMENSIONS = ("x", "y", "z")


@dataclass(frozen=True, repr=False)
class Topology(BaseTopology):
    """One or more slices of TPU chips.

    Two topologies with the same name and number of slices are equal and share their devices.

    Attributes:
        name: Name in libtpu: `v5p:2x2x4`.
        shape: Chips per dimension of a slice.
        twisted: Whether the long dimension is a twisted torus.

    Example:
        >>> from xlashard.tpu import topology
        >>> pod = topology("v5e-16")
        >>> pod
        Topology('v5e:4x4': 16 chips on 4 hosts)
        >>> pod.mesh({"data": 4, "model": 4}).shape
        OrderedDict({'data': 4, 'model': 4})
    """

    chip: Generation = field(compare=False)
    shape: tuple[int, ...] = field(compare=False)
    twisted: bool = field(compare=False)

    def __repr__(self) -> str:
        many = f" in {self.slices} slices" if self.slices > 1 else ""
        devices = "" if self.num_devices == self.chips else f", {self.num_devices:,} devices"
        chips = counted(self.chips, "chip")
        hosts = counted(self.hosts, "host")
        return f"Topology({self.name!r}: {chips} on {hosts}{many}{devices})"

    def __reduce__(self) -> tuple[object, ...]:
        # Devices are not pickled; a name has the same devices in every process.
        return topology, (self.name, self.slices)

    @property
    def generation(self) -> Generation:
        """Figures of the chips."""
        return self.chip

    @property
    def accelerator_type(self) -> str:
        """Name of the slice size in Cloud TPU: `v5p-128`, `v5litepod-16`."""
        return accelerator_type(SliceName(self.generation, self.shape, self.twisted))

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
            [(shardings.slice_of(d), *d.coords[:rank], d.core_on_chip) for d in self.devices],
            dtype=np.int64,
        )

    def find_links(self, group: GroupExtent) -> AxisLinks:
        """Return the links of a group of devices: ICI within a slice, else the network as well."""
        axes, size, parts, domains = group
        generation = self.generation
        network = "dcn" if domains > 1 else "ici"
        dcn = generation.device_dcn_bandwidth
        if parts is None:
            # The routes are unknown: assume a share of one link per device.
            speed = dcn if domains > 1 else generation.device_link_bandwidth
            return AxisLinks(axes, size, (), 1.0, False, network, speed, domains)
        links = usable_links(torus_parts(parts))
        speed = ici_speed(generation, parts, links)
        if domains > 1:
            # All devices of a slice receive from the other slices in parallel.
            speed = min(speed, dcn * (size // domains))
        ring = domains == 1 and bool(parts) and all(p.ring and p.stride == 1 for p in parts)
        return AxisLinks(axes, size, parts, links, ring, network, speed, domains)

    def larger(self) -> Iterator[Self]:
        """Yield slices of Cloud TPU with a multiple of the chips, smallest first."""
        for count in chip_counts(self.generation):
            shape = default_shape(self.generation, count)
            if count > self.chips and count % self.chips == 0 and shape is not None:
                yield cast(Self, _make_topology(SliceName(self.generation, shape), 1))


def torus_parts(parts: Iterable[AxisSegment]) -> list[AxisSegment]:
    """Return the parts whose links are those of the torus: neither slices nor cores of a chip."""
    return [p for p in parts if p.dimension in _DIMENSIONS]


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
        slice_name = parse_topology_name(name)
        _check_slices(name, slice_name, slices)
        return _make_topology(slice_name, slices)


def _check_slices(name: str, slice_name: SliceName, slices: int) -> None:
    if isinstance(slices, bool) or not isinstance(slices, int) or slices < 1:
        raise TopologyError(
            f"slices={slices!r} is invalid: expected 1 or more", topology=name, slices=2
        )
    if slices > 1 and not slice_name.generation.dcn_bandwidth:
        raise TopologyError(
            f"slices={slices} is invalid: {slice_name.generation.title} supports a single slice",
            topology=slice_name.text,
        )


# Cached, because meshes are equal only if their devices are the same objects.
@lru_cache(maxsize=1024)
def _make_topology(name: SliceName, slices: int) -> Topology:
    devices = topologies.compile_only_devices(
        name.text, _options(name.generation, name.shape, slices)
    )
    ordered = sorted(devices, key=lambda device: (shardings.slice_of(device), device.process_index))
    return Topology(name.text, slices, name.generation, tuple(ordered), name.shape, name.twisted)


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
