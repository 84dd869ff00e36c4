"""Conversion between shardings of this package, of JAX and of XLA."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from xlashard._jax.runtime.shardings import (
    Device,
    JaxGSPMDSharding,
    JaxNamedSharding,
    JaxSharding,
    JaxSingleDeviceSharding,
    Mesh,
    hlo_text,
    jax_hlo_sharding,
    listed_device_ids,
)
from xlashard.errors import GeometryError, ShardingError
from xlashard.geometry import TileAssignment, spec_from_tile_assignment, spec_from_tiling
from xlashard.sharding.base import Sharding, XLACompatibleSharding
from xlashard.sharding.gspmd import GSPMDSharding
from xlashard.sharding.named import NamedSharding, SingleDeviceSharding, grid_of, partition_spec


@lru_cache(maxsize=4096)
def from_jax_sharding(sharding: JaxSharding) -> Sharding:
    """Return the equivalent sharding of a sharding of JAX, cached.

    Raises:
        ShardingError: No equivalent exists.
    """
    if isinstance(sharding, JaxNamedSharding):
        if listed_device_ids(sharding) is not None:
            hlo = jax_hlo_sharding(sharding, len(sharding.spec))
            return GSPMDSharding(
                tuple(sharding._device_assignment), hlo, memory_kind=sharding.memory_kind
            )
        kind: Any = sharding.memory_kind
        # The devices of a mesh may be mocks, which answer with one of their own.
        kind = kind if isinstance(kind, str) else None
        return NamedSharding(sharding.mesh, sharding.spec, memory_kind=kind)
    if isinstance(sharding, JaxSingleDeviceSharding):
        (device,) = sharding.device_set
        return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    if isinstance(sharding, JaxGSPMDSharding):
        devices = tuple(sharding._device_assignment)
        own = GSPMDSharding(
            devices, jax_hlo_sharding(sharding, 0), memory_kind=sharding.memory_kind
        )
        if own.tile_assignment.kind == "maximal" and len(devices) > 1:
            # JAX compares both as equal, so that a cache cannot distinguish them.
            return GSPMDSharding.get_replicated(devices, memory_kind=sharding.memory_kind)
        return own
    # no-catalogue: JAX has no other public class
    raise ShardingError(f"{type(sharding).__name__} has no equivalent in this package")


def from_jax(sharding: JaxSharding | Sharding) -> Sharding:
    """Return the equivalent sharding of this package.

    Raises:
        ShardingError: No equivalent exists.
    """
    return sharding if isinstance(sharding, Sharding) else from_jax_sharding(sharding)


def to_jax(sharding: JaxSharding | Sharding, shape: Sequence[int]) -> JaxSharding:
    """Return JAX's own sharding for an array of a shape; JAX's own shardings pass unchanged."""
    return sharding.jax_sharding(shape) if isinstance(sharding, Sharding) else sharding


@lru_cache(maxsize=4096)
def _named_from_text(text: str, mesh: Mesh, memory_kind: str | None) -> NamedSharding | None:
    try:
        spec = spec_from_tile_assignment(grid_of(mesh), TileAssignment.parse_text(text))
        return NamedSharding(mesh, partition_spec(spec), memory_kind=memory_kind)
    except (GeometryError, ShardingError):
        return None


def from_hlo(
    hlo: object, devices: Sequence[Device], mesh: Mesh | None, memory_kind: str | None = None
) -> Sharding:
    """Return the sharding that a compiled program reports, by a spec on a mesh if there is one.

    Args:
        hlo: An `OpSharding`, an `HloSharding`, or its text.
        devices: The program's device assignment.
        mesh: The mesh to name axes of; its devices must stand in the same order to count.
        memory_kind: Memory of the value.
    """
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0], memory_kind=memory_kind)
    text = hlo if isinstance(hlo, str) else hlo_text(hlo)
    if mesh is not None and mesh._flat_devices_tuple == tuple(devices):
        named = _named_from_text(text, mesh, memory_kind)
        if named is not None:
            return named
    return GSPMDSharding(devices, text, memory_kind=memory_kind)


def on_mesh(sharding: XLACompatibleSharding, mesh: Mesh, ndim: int) -> XLACompatibleSharding:
    """Return the sharding as a spec on a mesh, or unchanged if it has no spec on this mesh.

    Args:
        sharding: The sharding.
        mesh: The mesh to name axes of; its devices must stand in the same order.
        ndim: The rank of the value.
    """
    named = isinstance(sharding, NamedSharding)
    if (named and sharding.mesh == mesh) or mesh._flat_devices_tuple != sharding.devices:
        return sharding
    try:
        spec = spec_from_tiling(grid_of(mesh), sharding.rank_tiling(ndim))
        return NamedSharding(mesh, partition_spec(spec), memory_kind=sharding.memory_kind)
    except (GeometryError, ShardingError):
        return sharding
