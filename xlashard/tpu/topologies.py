"""A TPU topology by name: its chips and devices, for which programs compile anywhere."""

from dataclasses import dataclass, field
from functools import cached_property

from xlashard._jax import topologies
from xlashard._jax.shardings import Device


@dataclass(frozen=True)
class Topology:
    """One or more slices of TPU chips.

    Attributes:
        name: As libtpu writes it: `v5p:2x2x4`.
        slices: How many slices there are, each of that shape, joined by the data-center network.
        devices: For which programs can be compiled, and not run.
    """

    name: str
    slices: int
    devices: tuple[Device, ...] = field(repr=False)

    @cached_property
    def num_devices(self) -> int:
        """How many devices there are, in all slices."""
        return len(self.devices)


def topology(name: str, slices: int = 1) -> Topology:
    """A TPU topology that programs can be compiled for.

    Args:
        name: `v5p:2x2x4`.
        slices: How many slices of it.

    Raises:
        TopologyError: If there is no such topology, or libtpu is missing.
    """
    options = {} if slices == 1 else {"num_slices": slices}
    return Topology(name, slices, tuple(topologies.compile_only_devices(name, options)))
