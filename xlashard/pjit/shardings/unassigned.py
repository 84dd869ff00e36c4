"""Shardings without devices, which the devices of a program replace."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from xlashard._jax.lower.lowering import memory_kind_of
from xlashard._jax.runtime.shardings import Device
from xlashard._jax.trace.tracing import sharding_of_type
from xlashard.errors import DeviceMismatchError
from xlashard.geometry import Tiling
from xlashard.sharding import (
    AbstractMesh,
    GSPMDSharding,
    Mesh,
    NamedSharding,
    Sharding,
    XLACompatibleSharding,
)


class _Replicated(XLACompatibleSharding):
    """Replication over the devices of the program, before these are known."""

    def __repr__(self) -> str:
        return "REPLICATED"

    def __reduce__(self) -> str:
        return "REPLICATED"

    @property
    def devices(self) -> tuple[Any, ...]:
        return ()

    def rank_tiling(self, ndim: int) -> Tiling:
        return Tiling((1,) * ndim, 1, ((1, 0),))


REPLICATED = _Replicated()
"""`None` as a resource of `pjit`, before the devices of its program are known."""


def names_devices(sharding: Sharding) -> bool:
    """Return False for `REPLICATED` and for shardings on an abstract mesh."""
    if sharding is REPLICATED:
        return False
    return not (isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh))


def on_devices(sharding: XLACompatibleSharding, devices: Sequence[Device]) -> XLACompatibleSharding:
    """Return a sharding without devices as one over these devices.

    Raises:
        DeviceMismatchError: If it stands on an abstract mesh of another size.
    """
    if sharding is REPLICATED:
        return GSPMDSharding.get_replicated(devices)
    if not isinstance(sharding, NamedSharding) or names_devices(sharding):
        return sharding
    if sharding.mesh.size != len(devices):
        raise DeviceMismatchError(
            f"{sharding} stands on an abstract mesh of {sharding.mesh.size} devices, but the "
            f"program runs on {len(devices)}: write NamedSharding(mesh, {sharding.spec}) on a mesh "
            "of its devices"
        )
    mesh = mesh_over(tuple(devices), sharding.mesh)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def mesh_of(sharding: Sharding) -> Mesh | None:
    """Return the mesh of devices on which a sharding stands, or None."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


@lru_cache(maxsize=256)
def mesh_over(devices: tuple[Device, ...], mesh: AbstractMesh) -> Mesh:
    """Return the mesh over devices with the axes of an abstract one."""
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return Mesh(grid.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=mesh.axis_types)


def typed_sharding(aval: Any, devices: tuple[Device, ...]) -> XLACompatibleSharding | None:
    """Return the sharding that the type of a result prescribes; None where it has no such axes."""
    typed = sharding_of_type(aval)
    if typed is None or typed[0].size != len(devices):
        return None
    mesh, spec = typed
    return NamedSharding(mesh_over(devices, mesh), spec, memory_kind=memory_kind_of(aval))
