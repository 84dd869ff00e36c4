"""Annotations for the GSPMD partitioner: `mhlo.sharding`, the HLO sharding's text.

Syntax: https://openxla.org/xla/sharding and XLA's `hlo_sharding.h`.
"""

from xlashard.sharding import XLACompatibleSharding

ATTRIBUTE = "mhlo.sharding"
UNCUT = "{replicated}"
"""Every device holds everything, whatever the rank."""


def sharding_text(sharding: XLACompatibleSharding, ndim: int) -> str:
    """The HLO sharding of a value of a rank; the iota form, however many devices there are.

    Args:
        sharding: The sharding; unconstrained dimensions count as uncut.
        ndim: The rank of the value's buffers.

    Raises:
        GeometryError: If it has no tiles, or not for this rank.
    """
    return sharding.rank_tiling(ndim).to_tile_assignment().to_text()
