"""Annotations for the GSPMD partitioner: `mhlo.sharding`, the HLO sharding's text.

Syntax: https://openxla.org/xla/sharding and XLA's `hlo_sharding.h`.
"""

from xlashard.geometry import Tiling

ATTRIBUTE = "mhlo.sharding"
UNCUT = "{replicated}"
"""Every device holds everything, whatever the rank."""


def tiling_text(tiling: Tiling) -> str:
    """Return the HLO sharding of a tiling, in the iota form for any number of devices."""
    return tiling.to_tile_assignment().to_text()
