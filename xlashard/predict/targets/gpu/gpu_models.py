"""Public figures of each GPU model: cores, memory, FLOP/s, NVLink, network.

`gpu_models.toml` has each figure beside its source. `test_gpu_models.py` compares all but the
network, the size of a node and the link to the host with the descriptions of these GPUs in JAX's
CUDA plugin.
"""

from dataclasses import dataclass
from pathlib import Path

from xlashard.predict.targets.chip import Chip, Links
from xlashard.predict.targets.figures import read_chips

ALLOCATOR_FRACTION = 0.75
"""Share of a GPU's memory that JAX's allocator takes by default."""


@dataclass(frozen=True, kw_only=True)
class GpuModel(Chip):
    """A model of NVIDIA GPU.

    A node is a group of GPUs joined by NVLink: a machine, or a rack of GB200 NVL72. A program may
    use 75 % of the memory, unless `XLA_PYTHON_CLIENT_MEM_FRACTION` specifies another share.

    Attributes:
        sms: Streaming multiprocessors.
        clock_hz: Largest clock of the streaming multiprocessors.
        fp32_lanes: FP32 lanes of a streaming multiprocessor.
        shared_memory: Bytes of shared memory per streaming multiprocessor.
        l2_bytes: L2 cache.
        compute_capability: Major and minor number.
        nvlink_links: NVLink links per GPU; 0 if the GPUs of a machine communicate over PCIe.
        nvlink_bandwidth: Bytes per second per link in one direction.
        max_node: GPUs of the largest node.
        gpus_per_host: GPUs that one machine has at most.
        network_bandwidth: Bytes per second per GPU in one direction to other nodes, in NVIDIA's own
            systems. Machines of clouds differ: `MACHINE_TYPES`.
    """

    sms: int
    clock_hz: float
    fp32_lanes: int
    shared_memory: int
    l2_bytes: int
    compute_capability: tuple[int, int]
    nvlink_links: int
    nvlink_bandwidth: float
    max_node: int = 8
    gpus_per_host: int = 8
    network_bandwidth: float

    @property
    def family(self) -> str:
        """Name without the variant: `a100` of `a100-40gb`."""
        return self.name.partition("-")[0]

    @property
    def links(self) -> Links:
        """Links within a node."""
        return "nvlink" if self.nvlink_links else "pcie"

    @property
    def node_bandwidth(self) -> float:
        """Bytes per second in one direction that a GPU sends within its node."""
        if self.nvlink_links:
            return self.nvlink_links * self.nvlink_bandwidth
        return self.host_bandwidth


GPU_MODELS: tuple[GpuModel, ...] = read_chips(Path(__file__).with_name("gpu_models.toml"), GpuModel)
"""Models of GPU that programs can be compiled for, oldest first."""

BY_NAME = {model.name: model for model in GPU_MODELS}
"""GPU models by name."""
