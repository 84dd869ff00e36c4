"""NVIDIA GPUs that programs are compiled for, on a machine without a GPU.

`gpu_models` holds public figures of GPUs, `gpu_names` the machines of clouds and the parser of
names; `topologies` makes devices.
"""

from typing import TYPE_CHECKING

from xlashard.lazily import on_demand

if TYPE_CHECKING:
    from xlashard.gpu.gpu_models import GPU_MODELS, GpuModel
    from xlashard.gpu.gpu_names import MACHINE_TYPES, MachineType
    from xlashard.gpu.topologies import GpuTopology, topology
    from xlashard.hardware.base_topology import AxisLinks, axis_links
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        globals(),
        {
            "xlashard.gpu.gpu_models": ("GPU_MODELS", "GpuModel"),
            "xlashard.gpu.gpu_names": ("MACHINE_TYPES", "MachineType"),
            "xlashard.gpu.topologies": ("GpuTopology", "topology"),
            "xlashard.hardware.base_topology": ("AxisLinks", "axis_links"),
        },
    )

__all__ = [
    "GPU_MODELS",
    "MACHINE_TYPES",
    "AxisLinks",
    "GpuModel",
    "GpuTopology",
    "MachineType",
    "axis_links",
    "topology",
]
