"""Public figures of each TPU generation: cores, memory, FLOP/s, links, pods.

`generations.toml` has each figure beside its source, or its derivation. Tests compare devices per
chip, chips per host and the available memory with libtpu.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from xlashard.predict.targets.chip import Chip
from xlashard.predict.targets.figures import read_chips


@dataclass(frozen=True, kw_only=True)
class Generation(Chip):
    """A generation of TPUs.

    The name is libtpu's: `v5e`; the title is Cloud TPU's. Two cores that form one device work as a
    megacore.

    Attributes:
        cores_per_chip: TensorCores.
        vmem_bandwidth: Bytes per second per chip between VMEM and the units of its TensorCores.
        host_bounds: Chips per host of a large slice, along x, y and z.
        single_host_shapes: Larger slices that still lie on a single host.
        counts_cores: Whether the number in `v5p-128` counts TensorCores rather than chips.
        pod_shape: Shape of the largest slice, in chips.
        ring_size: Dimension size at which links wrap around: in two dimensions exactly this size,
            in three dimensions every slice made of whole cubes of this size.
        ici_links: ICI links per chip.
        ici_bandwidth: Bytes per second per ICI link in one direction.
        core_bandwidth: Bytes per second in one direction between the devices of a chip; 0 for one
            device per chip.
        dcn_bandwidth: Bytes per second per host to other slices; 0 if the generation has no
            multislice.
    """

    cores_per_chip: int
    vmem_bandwidth: float
    host_bounds: tuple[int, int, int] = (2, 2, 1)
    single_host_shapes: tuple[tuple[int, ...], ...] = ()
    counts_cores: bool
    pod_shape: tuple[int, ...]
    ring_size: int
    ici_links: int
    ici_bandwidth: float
    core_bandwidth: float = 0
    dcn_bandwidth: float

    @property
    def dimensions(self) -> int:
        """Dimensions of its torus of chips."""
        return len(self.pod_shape)

    @property
    def pod_chips(self) -> int:
        """Chips of the largest slice."""
        return math.prod(self.pod_shape)

    @property
    def chips_per_host(self) -> int:
        """Chips per host of a large slice."""
        x, y, z = self.host_bounds
        return x * y * z

    @property
    def devices_per_host(self) -> int:
        """Devices per host of a large slice."""
        return self.chips_per_host * self.devices_per_chip

    @property
    def cores_per_device(self) -> int:
        """TensorCores of a device."""
        return self.cores_per_chip // self.devices_per_chip

    @property
    def device_vmem_bandwidth(self) -> float:
        """VMEM bytes per second per device."""
        return self.vmem_bandwidth / self.devices_per_chip

    @property
    def device_link_bandwidth(self) -> float:
        """Bytes per second per device in one direction, as its share of one ICI link."""
        return self.ici_bandwidth / self.devices_per_chip

    @property
    def device_dcn_bandwidth(self) -> float:
        """Bytes per second per device, as its share of the host's DCN bandwidth."""
        return self.dcn_bandwidth / self.devices_per_host


GENERATIONS: tuple[Generation, ...] = read_chips(
    Path(__file__).with_name("generations.toml"), Generation
)
"""Every generation that libtpu compiles for, oldest first."""

BY_NAME = {generation.name: generation for generation in GENERATIONS}
"""Generations by name."""
