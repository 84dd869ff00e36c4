"""From JAX's own shardings to tilings and back, through the HLO text that both can read."""

from collections.abc import Sequence
from dataclasses import replace

from xlashard._jax.runtime.shardings import (
    Device,
    JaxGSPMDSharding,
    JaxNamedSharding,
    JaxSharding,
    hlo_from_text,
    hlo_text,
    jax_hlo_sharding,
    listed_sharding,
)
from xlashard.geometry import TileAssignment, Tiling
from xlashard.sharding.axes import axes_of


def gspmd_twin(
    devices: Sequence[Device], tiling: Tiling, memory_kind: str | None = None
) -> JaxSharding:
    """The sharding of JAX for bare tiles."""
    order = axes_of(tiling).device_ids
    if order:
        return listed_sharding(devices, tiling.counts, order, memory_kind)
    hlo = hlo_from_text(tiling.to_tile_assignment().to_text())
    return JaxGSPMDSharding(tuple(devices), hlo, memory_kind=memory_kind)


def assignment_of_jax(sharding: JaxSharding, ndim: int) -> TileAssignment:
    """The tile assignment of a sharding of JAX, read from its HLO text."""
    return TileAssignment.parse_text(hlo_text(jax_hlo_sharding(sharding, ndim)))


def tiling_of_jax(sharding: JaxSharding, ndim: int) -> Tiling:
    """The tiling of a sharding of JAX for arrays of a rank.

    Raises:
        GeometryError: If it has no tiles (`{manual}`, `{unknown}`), or the rank is too low.
    """
    num_devices = sharding.num_devices
    if num_devices == 1 and not isinstance(sharding, JaxNamedSharding):
        return Tiling.replicated(1, ndim)
    tiling = Tiling.from_tile_assignment(
        assignment_of_jax(sharding, ndim), ndim, num_devices=num_devices
    )
    kind = sharding.spec.unreduced_kind if isinstance(sharding, JaxNamedSharding) else None
    # HLO's text leaves out which reduction it is.
    return (
        tiling
        if kind is None
        else replace(tiling, reduction=kind.name if tiling.is_partial else "")
    )
