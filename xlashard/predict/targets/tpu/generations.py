"""Public figures of each TPU generation: cores, memory, FLOP/s, links, pods.

Each figure names its source. Derived figures name their derivation. Tests compare devices per chip,
chips per host and the available memory with libtpu.
"""

import math
from dataclasses import dataclass

from xlashard.predict.targets.chip import GB, GIB, MIB, TERA, Chip


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
    def is_megacore(self) -> bool:
        """True if both cores of a chip form one device."""
        return self.cores_per_chip > self.devices_per_chip

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


_DOCS = "https://cloud.google.com/tpu/docs"
_BOOK = "How to Scale Your Model, https://jax-ml.github.io/scaling-book/tpus"
_PAPER_V2_V3 = (
    "Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, "
    "Communications of the ACM 63(7), 2020"
)
_PAPER_V4 = "Jouppi et al., TPU v4, ISCA 2023, https://arxiv.org/abs/2304.01433"
_MEASURED = "the largest program that libtpu 0.0.48 and 0.0.50 compile"
_SHOWN = "the devices that libtpu 0.0.48 and 0.0.50 show"
_SEVENTH = f"{_DOCS}/tpu7x"


def _sources(page: str, **others: str) -> tuple[tuple[str, str], ...]:
    """Return `page` as the source of every figure except `others`."""
    figures = {
        **dict.fromkeys(("cores_per_chip", "pod_shape", "counts_cores"), page),
        **dict.fromkeys(("hbm_bytes", "hbm_bandwidth", "peak_flops"), page),
        "host_bandwidth": f"{_BOOK}: PCIe of a chip",
        "vmem_bandwidth": _NO_VMEM,
        **dict.fromkeys(("ici_links", "ici_bandwidth", "dcn_bandwidth"), page),
        "core_bandwidth": _ONE_DEVICE,
        **dict.fromkeys(("single_host_shapes", "ring_size"), page),
        "device_kind": _SHOWN,
        "devices_per_chip": _SHOWN,
        "host_bounds": f"{page}; {_SHOWN}",
        "available_bytes": _MEASURED,
    }
    return tuple({**figures, **others}.items())


_VMEM = f"{_BOOK}: VMEM bandwidth by HBM bandwidth"
_NO_VMEM = (
    "no public figure; 2.9 registers of 4 KiB per cycle and TensorCore, between the 2.93 of v5e's "
    "figure and the 2.87 of TPU7x's"
)
_HALF = "no public figure; at most what one core's half of the HBM gives"
_ONE_DEVICE = "one device: there is nothing between devices of a chip"
_NO_SLICES = f"{_DOCS}/multislice-introduction: not for this generation"
_WHOLE_POD = f"{_PAPER_V2_V3}: the ends are joined in the pod"
_CUBES = f"{_BOOK}: slices of whole 4x4x4 cubes close to rings, smaller ones do not"
_PLANE = f"{_BOOK}: a dimension of 16 closes to a ring; libtpu refuses rings of other sizes"

GENERATIONS: tuple[Generation, ...] = (
    Generation(
        name="v2",
        title="TPU v2",
        device_kind="TPU v2",
        cores_per_chip=2,
        devices_per_chip=2,
        counts_cores=True,
        pod_shape=(16, 16),
        ring_size=16,
        hbm_bytes=16 * GIB,
        available_bytes=8 * GIB - 530 * MIB,
        hbm_bandwidth=700 * GB,
        vmem_bandwidth=16_700 * GB,
        peak_flops=(("bfloat16", 46 * TERA),),
        ici_links=4,
        ici_bandwidth=62 * GB,
        core_bandwidth=350 * GB,
        dcn_bandwidth=0,
        host_bandwidth=16 * GB,
        sources=_sources(
            f"{_DOCS}/v2",
            ici_bandwidth=f"{_PAPER_V2_V3}: 496 Gbit/s",
            ici_links=_PAPER_V2_V3,
            core_bandwidth=_HALF,
            ring_size=_WHOLE_POD,
            dcn_bandwidth=_NO_SLICES,
            host_bandwidth="no public figure; taken as that of v4",
        ),
    ),
    Generation(
        name="v3",
        title="TPU v3",
        device_kind="TPU v3",
        cores_per_chip=2,
        devices_per_chip=2,
        counts_cores=True,
        pod_shape=(32, 32),
        ring_size=32,
        hbm_bytes=32 * GIB,
        available_bytes=16 * GIB - 530 * MIB,
        hbm_bandwidth=900 * GB,
        vmem_bandwidth=22_300 * GB,
        peak_flops=(("bfloat16", 123 * TERA),),
        ici_links=4,
        ici_bandwidth=82 * GB,
        core_bandwidth=450 * GB,
        dcn_bandwidth=0,
        host_bandwidth=16 * GB,
        sources=_sources(
            f"{_DOCS}/v3",
            ici_bandwidth=f"{_PAPER_V2_V3}: 656 Gbit/s",
            ici_links=_PAPER_V2_V3,
            core_bandwidth=_HALF,
            ring_size=_WHOLE_POD,
            dcn_bandwidth=_NO_SLICES,
            host_bandwidth="no public figure; taken as that of v4",
        ),
    ),
    Generation(
        name="v4",
        title="TPU v4",
        device_kind="TPU v4",
        cores_per_chip=2,
        counts_cores=True,
        pod_shape=(16, 16, 16),
        ring_size=4,
        hbm_bytes=32 * GIB,
        available_bytes=32 * GIB - 1283 * MIB,
        hbm_bandwidth=1_228 * GB,
        vmem_bandwidth=24_900 * GB,
        peak_flops=(("bfloat16", 275 * TERA), ("int8", 275 * TERA)),
        ici_links=6,
        ici_bandwidth=50 * GB,
        dcn_bandwidth=25 * GB,
        host_bandwidth=16 * GB,
        sources=_sources(
            f"{_DOCS}/v4",
            hbm_bandwidth=f"{_DOCS}/v4 (1200 GB/s) and, to the digit, {_PAPER_V4}",
            ici_bandwidth=f"{_PAPER_V4}: 50 GB/s for each of 6 links",
            ring_size=_CUBES,
            dcn_bandwidth="no public figure; taken as that of v5p",
        ),
    ),
    Generation(
        name="v5e",
        title="TPU v5e",
        device_kind="TPU v5 lite",
        cores_per_chip=1,
        single_host_shapes=((2, 4),),
        counts_cores=False,
        pod_shape=(16, 16),
        ring_size=16,
        hbm_bytes=16 * GIB,
        available_bytes=16 * GIB - 258 * MIB,
        hbm_bandwidth=819 * GB,
        vmem_bandwidth=22 * 819 * GB,
        peak_flops=(("bfloat16", 197 * TERA), ("int8", 393 * TERA)),
        ici_links=4,
        ici_bandwidth=50 * GB,
        dcn_bandwidth=12.5 * GB,
        host_bandwidth=16 * GB,
        sources=_sources(
            f"{_DOCS}/v5e",
            vmem_bandwidth=_VMEM,
            ici_bandwidth=f"{_DOCS}/v5e: 1,600 Gbit/s for a chip, by its 4 links",
            ring_size=_PLANE,
            dcn_bandwidth=f"{_DOCS}/v5e: 6.4 Tbit/s for 256 chips, times 4 chips",
        ),
    ),
    Generation(
        name="v5p",
        title="TPU v5p",
        device_kind="TPU v5",
        cores_per_chip=2,
        counts_cores=True,
        pod_shape=(16, 16, 24),
        ring_size=4,
        hbm_bytes=96 * GIB,
        available_bytes=96 * GIB - 279 * MIB,
        hbm_bandwidth=2_765 * GB,
        vmem_bandwidth=41_600 * GB,
        peak_flops=(("bfloat16", 459 * TERA), ("int8", 918 * TERA), ("float8", 459 * TERA)),
        ici_links=6,
        ici_bandwidth=100 * GB,
        dcn_bandwidth=25 * GB,
        host_bandwidth=16 * GB,
        sources=_sources(
            f"{_DOCS}/v5p",
            hbm_bytes=f"{_DOCS}/v5p prints 95 GB; libtpu lets a program use 95.73 GiB of it",
            ici_bandwidth=f"{_DOCS}/v5p: 4,800 Gbit/s for a chip, by its 6 links",
            pod_shape=f"{_DOCS}/v5p: 6,144 of a pod's 8,960 chips in the largest slice; the "
            "shape nearest a cube",
            ring_size=_CUBES,
            dcn_bandwidth=f"{_BOOK}: 6.25 GB/s for a chip, times 4 chips",
        ),
    ),
    Generation(
        name="v6e",
        title="TPU v6e (Trillium)",
        device_kind="TPU v6 lite",
        cores_per_chip=1,
        single_host_shapes=((2, 4),),
        counts_cores=False,
        pod_shape=(16, 16),
        ring_size=16,
        hbm_bytes=32 * GIB,
        available_bytes=32 * GIB - 776 * MIB,
        hbm_bandwidth=1_638 * GB,
        vmem_bandwidth=20_800 * GB,
        peak_flops=(("bfloat16", 918 * TERA), ("int8", 1_836 * TERA), ("float8", 918 * TERA)),
        ici_links=4,
        ici_bandwidth=100 * GB,
        dcn_bandwidth=50 * GB,
        host_bandwidth=32 * GB,
        sources=_sources(
            f"{_DOCS}/v6e",
            ici_bandwidth=f"{_DOCS}/v6e: 800 GB/s for a chip in both directions, by its 4 links",
            ring_size=_PLANE,
            dcn_bandwidth=f"{_DOCS}/v6e: 25.6 Tbit/s for 256 chips, times 4 chips",
        ),
    ),
    Generation(
        name="tpu7x",
        title="TPU7x (Ironwood)",
        device_kind="TPU7x",
        cores_per_chip=2,
        devices_per_chip=2,
        counts_cores=True,
        pod_shape=(16, 24, 24),
        ring_size=4,
        hbm_bytes=192 * GIB,
        available_bytes=96 * GIB - 1292 * MIB,
        hbm_bandwidth=7_380 * GB,
        vmem_bandwidth=7 * 7_380 * GB,
        peak_flops=(("bfloat16", 2_307 * TERA), ("float8", 4_614 * TERA)),
        ici_links=6,
        ici_bandwidth=100 * GB,
        core_bandwidth=600 * GB,
        dcn_bandwidth=50 * GB,
        host_bandwidth=32 * GB,
        sources=_sources(
            _SEVENTH,
            vmem_bandwidth=_VMEM,
            ici_bandwidth=f"{_SEVENTH}: 1,200 GB/s for a chip in both directions, by its 6 links",
            core_bandwidth=f"{_SEVENTH}: six times one link",
            pod_shape=f"{_SEVENTH}: 9,216 chips; the shape nearest a cube that has as many",
            ring_size=f"as v5p's: {_CUBES}",
            dcn_bandwidth=f"{_SEVENTH}: 100 Gbit/s for a chip, times 4 chips",
            host_bandwidth="no public figure; taken as that of v6e",
        ),
    ),
)
"""Every generation that libtpu compiles for, oldest first."""

BY_NAME = {generation.name: generation for generation in GENERATIONS}
"""Generations by name."""
