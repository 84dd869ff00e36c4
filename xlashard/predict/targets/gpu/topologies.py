"""Groups of GPUs by name, whose devices programs can be compiled for on any machine."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import numpy.typing as npt

from xlashard.errors import counted
from xlashard.predict.targets.base_topology import AxisLinks, BaseTopology, GroupExtent
from xlashard.predict.targets.gpu.gpu_models import GpuModel
from xlashard.predict.targets.gpu.gpu_names import GpuGroup, parse_gpu_name
from xlashard.predict.targets.mesh_layout import Dimension
from xlashard.support.lazily import deferred
from xlashard.support.tracebacks import short_tracebacks

if TYPE_CHECKING:
    from xlashard._jax.runtime import topologies
else:
    # For devices, which JAX makes; the figures of a topology don't need it.
    topologies = deferred("xlashard._jax.runtime.topologies")


@dataclass(frozen=True, repr=False)
class GpuTopology(BaseTopology):
    """Nodes of GPUs, joined by a network.

    A node is a group of GPUs joined by NVLink: a machine, or a rack of GB200 NVL72. Two topologies
    of the same name are equal and share their devices.

    Attributes:
        name: Full name: `h100:4x8`, `4xp5.48xlarge`.
        slices: Always 1: the name has the number of nodes.
        nodes: Number of nodes.
        gpus_per_node: GPUs per node.
        network_bandwidth: Bytes per second per GPU in one direction to other nodes.

    Example:
        >>> from xlashard.gpu import topology
        >>> cluster = topology("h100-32")
        >>> cluster
        GpuTopology('h100:4x8': 32 GPUs on 4 hosts)
        >>> cluster.mesh({"data": 4, "model": 8}).shape
        OrderedDict({'data': 4, 'model': 8})
    """

    chip: GpuModel = field(compare=False)
    nodes: int = field(compare=False)
    gpus_per_node: int = field(compare=False)
    network_bandwidth: float = field(compare=False)

    def __repr__(self) -> str:
        gpus = counted(self.chips, "GPU")
        hosts = counted(self.hosts, "host")
        nodes = "" if self.hosts == self.nodes else f" in {counted(self.nodes, 'node')}"
        return f"GpuTopology({self.name!r}: {gpus} on {hosts}{nodes})"

    def __reduce__(self) -> tuple[object, ...]:
        # Devices are not pickled; a name has the same devices in every process.
        return topology, (self.name,)

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Dimensions for laying out a mesh, outermost first: `node` and `gpu`."""
        return Dimension("node", self.nodes), Dimension("gpu", self.gpus_per_node)

    @cached_property
    def coordinates(self) -> npt.NDArray[np.int64]:
        """Coordinates of each device: `[devices, 2]`."""
        return np.stack(np.divmod(np.arange(self.num_devices), self.gpus_per_node), axis=1)

    def find_links(self, group: GroupExtent) -> AxisLinks:
        """Return the links of a group of GPUs: NVLink within a node, else the network as well."""
        axes, size, parts, domains = group
        within = "nvlink" if self.chip.nvlink_links else "pcie"
        inside, links = self.chip.node_bandwidth, max(1, self.chip.nvlink_links)
        if size == 1:
            return AxisLinks(axes, 1, (), 0.0, False, within, math.inf)
        if domains == 1:
            # A switch gives every pair of GPUs the full bandwidth, so that any order is a ring.
            return AxisLinks(axes, size, parts or (), links, True, within, inside)
        # All GPUs of a node receive from the other nodes in parallel.
        speed = min(inside, self.network_bandwidth * (size // domains))
        return AxisLinks(axes, size, parts or (), 1.0, False, "network", speed, domains)

    def larger(self) -> Iterator[Self]:
        """Yield topologies with 2, 4, 8 and so on times the nodes."""
        for power in itertools.count(1):
            yield cast(Self, topology(self.name, 2**power))


def topology(name: str, nodes: int = 1) -> GpuTopology:
    """Return a group of GPUs that programs can be compiled for, on a machine without a GPU.

    Args:
        name: A model with a number of GPUs (`h100-32`, `8xh200`), with nodes and GPUs per node
            (`h100:4x8`, `4x8xh100`), a rack (`gb200-nvl72`), or a machine type of a cloud
            (`p5.48xlarge`, `4xa3-megagpu-8g`). `a100` has 80 GB, `a100-40gb` is the smaller one.
        nodes: Number by which to multiply the nodes of the name.

    Raises:
        TopologyError: If the name is unknown, or JAX's CUDA plugin is missing.

    Example:
        >>> from xlashard.gpu import topology
        >>> topology("gb200-nvl72")
        GpuTopology('gb200:1x72': 72 GPUs on 18 hosts in 1 node)
        >>> topology("p5.48xlarge", nodes=4).network_bandwidth
        50000000000.0
    """
    with short_tracebacks:
        return _make_topology(parse_gpu_name(name, nodes))


# Cached, because meshes are equal only if their devices are the same objects.
@lru_cache(maxsize=1024)
def _make_topology(group: GpuGroup) -> GpuTopology:
    model, hosts = group.model, group.gpus // group.gpus_per_host
    devices = topologies.gpu_devices(
        group.text, target_config(model), f"{group.nodes}x{hosts}x{group.gpus_per_host}"
    )
    ordered = tuple(sorted(devices, key=lambda device: device.id))
    network = model.network_bandwidth
    if group.machine is not None:
        network = group.machine.network_bandwidth
    return GpuTopology(group.text, 1, model, ordered, group.nodes, group.gpus, network)


def target_config(model: GpuModel) -> str:
    """Return XLA's description of a GPU for compiling without one, as a text proto."""
    major, minor = model.compute_capability
    limit = model.shared_memory - 1024
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {limit}
  shared_memory_per_core: {model.shared_memory}
  core_count: {model.sms}
  fpus_per_core: {model.fp32_lanes}
  clock_rate_ghz: {model.clock_hz / 1e9:g}
  l2_cache_size: {model.l2_bytes}
  memory_bandwidth: {int(model.hbm_bandwidth)}
  device_memory_size: {model.hbm_bytes}
  cuda_compute_capability {{
    major: {major} minor: {minor} {_ACCELERATED if major >= 9 else ""}
  }}
  device_interconnect_info {{ active_links: {model.nvlink_links} }}
}}
platform_name: "CUDA"
device_description_str: "{model.device_kind}"
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
runtime_version {{ major: 13 minor: 0 }}
"""


_ACCELERATED = "feature_extension: ACCELERATED_FEATURES"
