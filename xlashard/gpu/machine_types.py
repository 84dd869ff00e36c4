"""Machines of clouds with GPUs: their GPUs and their network."""

from dataclasses import dataclass

from xlashard.gpu.gpu_models import BY_NAME, GpuModel

_GBIT = 10**9 / 8


@dataclass(frozen=True)
class MachineType:
    """A machine type of a cloud.

    Attributes:
        name: Name in the cloud, in lower case: `p5.48xlarge`.
        model: Figures of its GPUs.
        gpus: GPUs of a machine.
        network_bandwidth: Bytes per second per GPU in one direction to other machines, or to other
            racks where NVLink joins machines.
        source: Source of the figures.
    """

    name: str
    model: GpuModel
    gpus: int
    network_bandwidth: float
    source: str


_GOOGLE = "https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth"
_AWS = "https://aws.amazon.com/ec2/instance-types"
_AZURE = "https://learn.microsoft.com/en-us/azure/virtual-machines/sizes/gpu-accelerated"
_ORACLE = "https://docs.oracle.com/en-us/iaas/Content/Compute/References/computeshapes.htm"

# Name, model, GPUs of a machine, Gbit/s of a machine to others for its GPUs, source.
_ROWS = (
    ("a2-highgpu-8g", "a100-40gb", 8, 100, _GOOGLE),
    ("a2-megagpu-16g", "a100-40gb", 16, 100, _GOOGLE),
    ("a2-ultragpu-8g", "a100-80gb", 8, 100, _GOOGLE),
    ("a3-highgpu-8g", "h100", 8, 4 * 200, _GOOGLE),
    ("a3-megagpu-8g", "h100", 8, 8 * 200, _GOOGLE),
    ("a3-ultragpu-8g", "h200", 8, 8 * 400, _GOOGLE),
    ("a4-highgpu-8g", "b200", 8, 8 * 400, _GOOGLE),
    ("a4x-highgpu-4g", "gb200", 4, 4 * 400, _GOOGLE),
    ("p4d.24xlarge", "a100-40gb", 8, 400, f"{_AWS}/p4"),
    ("p4de.24xlarge", "a100-80gb", 8, 400, f"{_AWS}/p4"),
    ("p5.48xlarge", "h100", 8, 3200, f"{_AWS}/p5"),
    ("p5e.48xlarge", "h200", 8, 3200, f"{_AWS}/p5"),
    ("p5en.48xlarge", "h200", 8, 3200, f"{_AWS}/p5"),
    ("p6-b200.48xlarge", "b200", 8, 3200, f"{_AWS}/p6"),
    ("p6e-gb200.36xlarge", "gb200", 4, 1600, f"{_AWS}/p6"),
    ("nd96asr_v4", "a100-40gb", 8, 8 * 200, f"{_AZURE}/ndasra100v4-series"),
    ("nd96amsr_a100_v4", "a100-80gb", 8, 8 * 200, f"{_AZURE}/ndma100v4-series"),
    ("nd96isr_h100_v5", "h100", 8, 8 * 400, f"{_AZURE}/ndh100v5-series"),
    ("nd96isr_h200_v5", "h200", 8, 8 * 400, f"{_AZURE}/nd-h200-v5-series"),
    ("nd128isr_ndr_gb200_v6", "gb200", 4, 4 * 400, f"{_AZURE}/nd-gb200-v6-series"),
    ("bm.gpu4.8", "a100-40gb", 8, 16 * 100, _ORACLE),
    ("bm.gpu.a100-v2.8", "a100-80gb", 8, 16 * 100, _ORACLE),
    ("bm.gpu.h100.8", "h100", 8, 8 * 400, _ORACLE),
    ("bm.gpu.h200.8", "h200", 8, 8 * 400, _ORACLE),
    ("bm.gpu.b200.8", "b200", 8, 8 * 400, _ORACLE),
    ("dgx-a100", "a100-80gb", 8, 8 * 200, "NVIDIA DGX A100 data sheet"),
    ("dgx-h100", "h100", 8, 8 * 400, "NVIDIA DGX H100 data sheet"),
    ("dgx-h200", "h200", 8, 8 * 400, "NVIDIA DGX H200 data sheet"),
    ("dgx-b200", "b200", 8, 8 * 400, "NVIDIA DGX B200 data sheet"),
)

MACHINE_TYPES: tuple[MachineType, ...] = tuple(
    MachineType(name, BY_NAME[model], gpus, gbits * _GBIT / gpus, source)
    for name, model, gpus, gbits, source in _ROWS
)
"""Machine types of Google Cloud, AWS, Azure and Oracle Cloud, and NVIDIA's own systems."""

MACHINES_BY_NAME = {
    **{machine.name: machine for machine in MACHINE_TYPES},
    **{f"standard_{m.name}": m for m in MACHINE_TYPES if m.source.startswith(_AZURE)},
    "nd_h100_v5": next(m for m in MACHINE_TYPES if m.name == "nd96isr_h100_v5"),
    "nd_h200_v5": next(m for m in MACHINE_TYPES if m.name == "nd96isr_h200_v5"),
}
"""Machine types by each of their names."""
