"""NVIDIA GPUs that programs are compiled for, on a machine without a GPU.

The room behind it is `xlashard.predict.targets.gpu`.
"""

from typing import TYPE_CHECKING

from xlashard.support.lazily import on_demand

if TYPE_CHECKING:
    from xlashard.predict.targets.base_topology import AxisLinks, axis_links
    from xlashard.predict.targets.gpu.gpu_models import GPU_MODELS, GpuModel
    from xlashard.predict.targets.gpu.gpu_names import MACHINE_TYPES, MachineType
    from xlashard.predict.targets.gpu.topologies import GpuTopology, topology
else:
    __getattr__, __dir__ = on_demand(
        __name__,
        globals(),
        {
            "xlashard.predict.targets.gpu.gpu_models": ("GPU_MODELS", "GpuModel"),
            "xlashard.predict.targets.gpu.gpu_names": ("MACHINE_TYPES", "MachineType"),
            "xlashard.predict.targets.gpu.topologies": ("GpuTopology", "topology"),
            "xlashard.predict.targets.base_topology": ("AxisLinks", "axis_links"),
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
