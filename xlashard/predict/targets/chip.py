"""Public figures that every chip has, each with its source."""

from dataclasses import dataclass
from typing import Literal

type Links = Literal["ici", "nvlink", "pcie"]
"""Links between the chips of a slice of TPUs, or between the GPUs of a node."""

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A model of chip that programs can be compiled for.

    Attributes:
        name: Short name: `v5e`, `h100`.
        title: Name of the product: `TPU v5e`.
        device_kind: `device_kind` of its JAX devices.
        devices_per_chip: JAX devices per chip.
        hbm_bytes: HBM per chip.
        available_bytes: HBM that the compiler makes available to a program on one device.
        hbm_bandwidth: Bytes per second per chip.
        peak_flops: FLOP per second per chip, by dtype.
        host_bandwidth: Bytes per second per chip in one direction to or from the host's memory.
        sources: Source of each figure.
    """

    name: str
    title: str
    device_kind: str
    devices_per_chip: int = 1
    hbm_bytes: int
    available_bytes: int
    hbm_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]
    host_bandwidth: float
    sources: tuple[tuple[str, str], ...]

    @property
    def links(self) -> Links:
        """Links within a slice or node."""
        return "ici"

    @property
    def device_hbm_bytes(self) -> int:
        """HBM per device."""
        return self.hbm_bytes // self.devices_per_chip

    @property
    def device_hbm_bandwidth(self) -> float:
        """HBM bytes per second per device."""
        return self.hbm_bandwidth / self.devices_per_chip

    @property
    def device_peak_flops(self) -> tuple[tuple[str, float], ...]:
        """FLOP per second per device, by dtype."""
        return tuple((dtype, flops / self.devices_per_chip) for dtype, flops in self.peak_flops)
