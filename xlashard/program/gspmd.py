"""Annotations for the GSPMD partitioner: `mhlo.sharding`, the HLO sharding's text.

Syntax: https://openxla.org/xla/sharding and XLA's `hlo_sharding.h`.
"""

from xlashard.sharding import NamedSharding, XLACompatibleSharding

ATTRIBUTE = "mhlo.sharding"


def sharding_text(sharding: XLACompatibleSharding, ndim: int) -> str:
    """The HLO sharding of a value of a rank; the iota form, however many devices there are.

    Args:
        sharding: The sharding; unconstrained dimensions count as uncut.
        ndim: The rank of the value's buffers.
    """
    return sharding.rank_tiling(ndim).to_tile_assignment().to_text()


def open_dims(sharding: XLACompatibleSharding, ndim: int) -> tuple[int, ...]:
    """The dimensions that a sharding leaves to the partitioner."""
    if not isinstance(sharding, NamedSharding):
        return ()
    return tuple(i for i, axes in enumerate(sharding.normal_spec.for_rank(ndim)) if axes is None)
