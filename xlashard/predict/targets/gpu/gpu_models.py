"""Public figures of each GPU model: cores, memory, FLOP/s, NVLink, network.

Each figure names its source. FLOP/s are dense. Data sheets that print figures with sparsity are
halved. `test_gpu_models.py` compares all but the network, the size of a node and the link
to the host with the descriptions of these GPUs in JAX's CUDA plugin.
"""

from dataclasses import dataclass, replace

from xlashard.predict.targets.chip import GB, MIB, TERA, Chip, Links

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


_A100 = "NVIDIA A100 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/a100"
_A100_PAPER = "NVIDIA A100 Tensor Core GPU Architecture, white paper V1.0, table 4"
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture, white paper V1.04, table 3"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, https://www.nvidia.com/en-us/data-center/h200"
_HGX_B200 = "NVIDIA HGX B200 and DGX B200 data sheets, https://www.nvidia.com/en-us/data-center/hgx"
_GB200 = "NVIDIA GB200 NVL72 data sheet, https://www.nvidia.com/en-us/data-center/gb200-nvl72"
_GUIDE = "CUDA C++ Programming Guide, Compute Capabilities, table of technical specifications"
_SHOWN = "what CUDA shows of the device, as openxla/xla keeps it in xla/backends/gpu/target_config"
_BOOK = "jax-ml/scaling-book, gpus.md"
_ALLOCATOR = (
    "https://docs.jax.dev/en/latest/gpu_memory_allocation.html: JAX preallocates 75 % of the memory"
)
_NETWORKING = "stas00/ml-engineering, network/README.md: one x16 slot, one way"


def _sources(page: str, paper: str, **others: str) -> tuple[tuple[str, str], ...]:
    """Return `page` as the source of every figure except those of the device and `others`."""
    figures = {
        **dict.fromkeys(("hbm_bandwidth", "peak_flops", "nvlink_links", "nvlink_bandwidth"), page),
        **dict.fromkeys(("max_node", "gpus_per_host", "network_bandwidth"), page),
        **dict.fromkeys(("sms", "fp32_lanes"), paper),
        **dict.fromkeys(("shared_memory", "compute_capability"), _GUIDE),
        **dict.fromkeys(("device_kind", "hbm_bytes", "clock_hz", "l2_bytes"), _SHOWN),
        "devices_per_chip": "one JAX device per GPU, without MIG",
        "available_bytes": _ALLOCATOR,
        "host_bandwidth": _NETWORKING,
    }
    return tuple({**figures, **others}.items())


def _available(hbm_bytes: int) -> int:
    """Return the bytes that JAX's allocator takes of a GPU's memory."""
    return int(ALLOCATOR_FRACTION * hbm_bytes)


_A100_80GB = GpuModel(
    name="a100-80gb",
    title="NVIDIA A100 80GB SXM",
    device_kind="NVIDIA A100-SXM4-80GB",
    hbm_bytes=85_100_068_864,
    available_bytes=_available(85_100_068_864),
    hbm_bandwidth=2_039 * GB,
    peak_flops=(
        ("bfloat16", 312 * TERA),
        ("float16", 312 * TERA),
        ("int8", 624 * TERA),
        ("tensorfloat32", 156 * TERA),
        ("float32", 19.5 * TERA),
        ("float64", 19.5 * TERA),
    ),
    host_bandwidth=32 * GB,
    sms=108,
    clock_hz=1.41e9,
    fp32_lanes=64,
    shared_memory=164 * 1024,
    l2_bytes=40 * MIB,
    compute_capability=(8, 0),
    nvlink_links=12,
    nvlink_bandwidth=25 * GB,
    network_bandwidth=25 * GB,
    sources=_sources(
        _A100,
        _A100_PAPER,
        max_node="NVIDIA DGX A100 data sheet: 8 GPUs joined by 6 NVSwitches",
        gpus_per_host="NVIDIA DGX A100 data sheet: 8 GPUs",
        network_bandwidth="NVIDIA DGX A100 data sheet: 8 adapters of 200 Gbit/s",
    ),
)

_H100 = GpuModel(
    name="h100",
    title="NVIDIA H100 SXM",
    device_kind="NVIDIA H100 80GB HBM3",
    hbm_bytes=84_942_979_072,
    available_bytes=_available(84_942_979_072),
    hbm_bandwidth=3_352 * GB,
    peak_flops=(
        ("bfloat16", 989.4 * TERA),
        ("float16", 989.4 * TERA),
        ("float8", 1_978.9 * TERA),
        ("int8", 1_978.9 * TERA),
        ("tensorfloat32", 494.7 * TERA),
        ("float32", 66.9 * TERA),
        ("float64", 66.9 * TERA),
    ),
    host_bandwidth=63 * GB,
    sms=132,
    clock_hz=1.98e9,
    fp32_lanes=128,
    shared_memory=228 * 1024,
    l2_bytes=50 * MIB,
    compute_capability=(9, 0),
    nvlink_links=18,
    nvlink_bandwidth=25 * GB,
    network_bandwidth=50 * GB,
    sources=_sources(
        _H100_PAPER,
        _H100_PAPER,
        hbm_bandwidth="NVIDIA H100 data sheet: 3.35 TB/s",
        max_node="NVIDIA DGX H100 data sheet: 8 GPUs joined by 4 NVSwitches",
        gpus_per_host="NVIDIA DGX H100 data sheet: 8 GPUs",
        network_bandwidth="NVIDIA DGX H100 data sheet: 8 adapters of 400 Gbit/s",
    ),
)

_B200 = GpuModel(
    name="b200",
    title="NVIDIA B200 SXM",
    device_kind="NVIDIA B200",
    hbm_bytes=191_514_411_008,
    available_bytes=_available(191_514_411_008),
    hbm_bandwidth=7_672 * GB,
    peak_flops=(
        ("bfloat16", 2_250 * TERA),
        ("float16", 2_250 * TERA),
        ("float8", 4_500 * TERA),
        ("int8", 4_500 * TERA),
        ("float4", 9_000 * TERA),
        ("tensorfloat32", 1_125 * TERA),
        ("float32", 75 * TERA),
        ("float64", 37 * TERA),
    ),
    host_bandwidth=63 * GB,
    sms=148,
    clock_hz=1.965e9,
    fp32_lanes=128,
    shared_memory=228 * 1024,
    l2_bytes=132_644_864,
    compute_capability=(10, 0),
    nvlink_links=18,
    nvlink_bandwidth=50 * GB,
    network_bandwidth=50 * GB,
    sources=_sources(
        _HGX_B200,
        _SHOWN,
        hbm_bandwidth=f"{_SHOWN}: 3,996 MHz of an 7,680-bit bus; the data sheet prints 8 TB/s",
        peak_flops=f"{_HGX_B200}: those of 8 GPUs, divided by 8 and, but for float32 and float64, "
        "by 2",
        max_node="NVIDIA DGX B200 data sheet: 8 GPUs joined by 2 NVSwitches",
        gpus_per_host="NVIDIA DGX B200 data sheet: 8 GPUs",
        network_bandwidth="NVIDIA DGX B200 data sheet: 8 ports of 400 Gbit/s",
        host_bandwidth=f"{_SHOWN}: 64 GiB/s, as one x16 slot of PCIe 5; taken as that of H100",
    ),
)

GPU_MODELS: tuple[GpuModel, ...] = (
    replace(
        _A100_80GB,
        name="a100-40gb",
        title="NVIDIA A100 40GB SXM",
        device_kind="NVIDIA A100-SXM4-40GB",
        hbm_bytes=42_331_013_120,
        available_bytes=_available(42_331_013_120),
        hbm_bandwidth=1_555 * GB,
    ),
    _A100_80GB,
    replace(
        _H100,
        name="h100-pcie",
        title="NVIDIA H100 PCIe",
        device_kind="NVIDIA H100 PCIe",
        hbm_bandwidth=2_039 * GB,
        peak_flops=(
            ("bfloat16", 756 * TERA),
            ("float16", 756 * TERA),
            ("float8", 1_513 * TERA),
            ("int8", 1_513 * TERA),
            ("tensorfloat32", 378 * TERA),
            ("float32", 51 * TERA),
            ("float64", 51 * TERA),
        ),
        sms=114,
        clock_hz=1.755e9,
        nvlink_links=0,
        nvlink_bandwidth=0,
        sources=_sources(
            _H100_PAPER,
            _H100_PAPER,
            hbm_bandwidth=f"{_SHOWN}; the data sheet prints 2 TB/s",
            nvlink_links="bridges between two cards are optional, and not modelled",
            nvlink_bandwidth="bridges between two cards are optional, and not modelled",
            max_node="servers of 8 double-width cards",
            gpus_per_host="servers of 8 double-width cards",
            network_bandwidth="no fixed system; taken as that of H100 SXM",
        ),
    ),
    _H100,
    replace(
        _H100,
        name="h200",
        title="NVIDIA H200 SXM",
        device_kind="NVIDIA H200 141GB HBM3e",
        hbm_bytes=151_397_597_184,
        available_bytes=_available(151_397_597_184),
        hbm_bandwidth=4_800 * GB,
        sources=_sources(
            _H200,
            _SHOWN,
            max_node="NVIDIA DGX H200 data sheet: 8 GPUs joined by 4 NVSwitches",
            gpus_per_host="NVIDIA DGX H200 data sheet: 8 GPUs",
            network_bandwidth="NVIDIA DGX H200 data sheet: 8 adapters of 400 Gbit/s",
        ),
    ),
    _B200,
    replace(
        _B200,
        name="gb200",
        title="NVIDIA GB200",
        device_kind="NVIDIA GB200",
        hbm_bytes=197_897_748_480,
        available_bytes=_available(197_897_748_480),
        hbm_bandwidth=7_928 * GB,
        peak_flops=(
            ("bfloat16", 2_500 * TERA),
            ("float16", 2_500 * TERA),
            ("float8", 5_000 * TERA),
            ("int8", 5_000 * TERA),
            ("float4", 10_000 * TERA),
            ("tensorfloat32", 1_250 * TERA),
            ("float32", 80 * TERA),
            ("float64", 40 * TERA),
        ),
        host_bandwidth=450 * GB,
        sms=152,
        clock_hz=2.062e9,
        l2_bytes=135_528_448,
        max_node=72,
        gpus_per_host=4,
        sources=_sources(
            _GB200,
            _SHOWN,
            hbm_bandwidth=f"{_SHOWN}; the data sheet prints 8 TB/s",
            peak_flops=f"{_GB200}: a rack of 72 GPUs, divided by 72 and, but for float32 and "
            "float64, by 2",
            host_bandwidth=f"{_GB200}: NVLink-C2C, 900 GB/s both ways",
            network_bandwidth=f"{_BOOK}: 50 GB/s per GPU",
        ),
    ),
)
"""Models of GPU that programs can be compiled for, oldest first."""

BY_NAME = {model.name: model for model in GPU_MODELS}
"""GPU models by name."""
