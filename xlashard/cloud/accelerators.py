"""What a type of accelerator means to Google Cloud: its image, its hosts, its nodes in GKE."""

import math
from dataclasses import dataclass

from xlashard.errors import CloudError, TopologyError
from xlashard.tpu.topology_names import (
    accelerator_type,
    default_shape,
    parse_topology_name,
    shape_name,
)


@dataclass(frozen=True)
class Offer:
    """How Google Cloud offers a generation of TPUs.

    Attributes:
        image: The VM image that it needs. https://cloud.google.com/tpu/docs/runtimes
        node_label: Of its nodes in GKE, as `cloud.google.com/gke-tpu-accelerator`; empty where GKE
            has none. https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
    """

    image: str
    node_label: str


OFFERS = {
    "v2": Offer("tpu-ubuntu2204-base", ""),
    "v3": Offer("tpu-ubuntu2204-base", ""),
    "v4": Offer("tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": Offer("v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Offer("v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Offer("v2-alpha-tpuv6e", "tpu-v6e-slice"),
    "tpu7x": Offer("v2-alpha-tpu7-ubuntu2404", "tpu7x"),
}
"""By libtpu's name of the generation."""


@dataclass(frozen=True)
class Accelerator:
    """A type of slice.

    Attributes:
        name: As gcloud calls it: `v5litepod-16`.
        generation: As libtpu calls it: `v5e`.
        topology: Chips along each dimension: `4x4`.
        chips: In a slice.
        hosts: VMs, or nodes, of a slice.
        devices_per_chip: That JAX shows.
        is_default: Whether gcloud gives that topology to who asks by the name alone.
    """

    name: str
    generation: str
    topology: str
    chips: int
    hosts: int
    devices_per_chip: int
    is_default: bool

    @property
    def chips_per_host(self) -> int:
        """Chips that each VM has."""
        return self.chips // self.hosts

    @property
    def runtime(self) -> str:
        """The VM image that it needs."""
        return OFFERS[self.generation].image

    @property
    def node_label(self) -> str:
        """What GKE calls its nodes.

        Raises:
            CloudError: GKE has none.
        """
        label = OFFERS[self.generation].node_label
        if not label:
            known = ", ".join(name for name, offer in OFFERS.items() if offer.node_label)
            raise CloudError(
                f"--accelerator={self.name}: GKE has no TPU {self.generation}; it has {known}",
                code=2,
            )
        return label

    @property
    def flags(self) -> tuple[str, ...]:
        """How gcloud is asked for it."""
        if self.is_default:
            return (f"--accelerator-type={self.name}",)
        return (f"--type={self.name.rpartition('-')[0]}", f"--topology={self.topology}")


def read_accelerator(name: str) -> Accelerator:
    """What a name stands for, be it one of gcloud's or one of libtpu's.

    Args:
        name: `v5litepod-16`, `v5e-16` or `v5e:4x4`.

    Raises:
        CloudError: There is no such type.

    Example:
        >>> read_accelerator("v5e-16")
        Accelerator(name='v5litepod-16', generation='v5e', topology='4x4', chips=16, hosts=4,
        devices_per_chip=1, is_default=True)
    """
    if not name:
        raise CloudError("which TPU? Write its type, such as --accelerator=v5litepod-16", code=2)
    try:
        found = parse_topology_name(name)
    except TopologyError as error:
        raise CloudError(f"--accelerator={name}: {error}", code=2) from None
    generation, shape = found.generation, found.shape
    chips = math.prod(shape)
    on_one_host = chips <= generation.chips_per_host or shape in generation.single_host_shapes
    return Accelerator(
        accelerator_type(found),
        generation.name,
        shape_name(shape),
        chips,
        1 if on_one_host else chips // generation.chips_per_host,
        generation.devices_per_chip,
        shape == default_shape(generation, chips),
    )
