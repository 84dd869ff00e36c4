"""Types of TPU slices: VM image, hosts, and the labels of their nodes in GKE."""

import math
from dataclasses import dataclass

from xlashard.errors import CloudError, TopologyError
from xlashard.tpu.topology_names import (
    accelerator_type,
    default_shape,
    parse_topology_name,
    shape_name,
)

_IMAGES = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
    "tpu7x": "v2-alpha-tpu7-ubuntu2404",
}
"""VM image of each generation, by libtpu's name: https://cloud.google.com/tpu/docs/runtimes"""

_NODE_LABELS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""Label of GKE nodes: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"""


@dataclass(frozen=True)
class Accelerator:
    """A type of TPU slice.

    Attributes:
        name: Accelerator type in gcloud: `v5litepod-16`.
        generation: Name of the generation in libtpu: `v5e`.
        topology: Chips along each dimension: `4x4`.
        chips: Chips of a slice.
        hosts: VMs (nodes in GKE) of a slice.
        devices_per_chip: JAX devices of each chip.
        is_default: Whether gcloud chooses this topology for the accelerator type.
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
        """Chips of each VM."""
        return self.chips // self.hosts

    @property
    def image(self) -> str:
        """VM image for this generation."""
        return _IMAGES[self.generation]

    @property
    def node_label(self) -> str:
        """Label of the nodes in GKE.

        Raises:
            CloudError: GKE has no nodes of this generation.
        """
        if self.generation not in _NODE_LABELS:
            raise CloudError(
                f"--accelerator={self.name}: GKE has no TPU {self.generation}; expected one of "
                f"{', '.join(_NODE_LABELS)}",
                code=2,
            )
        return _NODE_LABELS[self.generation]

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of gcloud that select this type."""
        if self.is_default:
            return (f"--accelerator-type={self.name}",)
        return (f"--type={self.name.rpartition('-')[0]}", f"--topology={self.topology}")


def read_accelerator(name: str) -> Accelerator:
    """Return the type that a name of gcloud or of libtpu stands for.

    Args:
        name: `v5litepod-16`, `v5e-16` or `v5e:4x4`.

    Raises:
        CloudError: The name is empty or unknown.

    Example:
        >>> read_accelerator("v5e-16")
        Accelerator(name='v5litepod-16', generation='v5e', topology='4x4', chips=16, hosts=4,
        devices_per_chip=1, is_default=True)
    """
    if not name:
        raise CloudError(
            "--accelerator is missing: write the TPU's type, such as --accelerator=v5litepod-16",
            code=2,
        )
    try:
        topology = parse_topology_name(name)
    except TopologyError as error:
        raise CloudError(f"--accelerator={name}: {error}", code=2) from None
    generation, shape = topology.generation, topology.shape
    chips = math.prod(shape)
    on_one_host = chips <= generation.chips_per_host or shape in generation.single_host_shapes
    return Accelerator(
        accelerator_type(topology),
        generation.name,
        shape_name(shape),
        chips,
        1 if on_one_host else chips // generation.chips_per_host,
        generation.devices_per_chip,
        shape == default_shape(generation, chips),
    )
