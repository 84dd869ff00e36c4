"""Devices in pickles: stored by platform and number, and looked up by the reading process."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from xlashard._jax.runtime.shardings import Device
from xlashard.errors import ShardingError

type DeviceNames = tuple[tuple[str, int], ...]


def names_of(devices: Sequence[Device]) -> DeviceNames:
    """Return names that identify devices in every process of a program."""
    return tuple((d.platform, d.id) for d in devices)


def devices_of(names: DeviceNames) -> tuple[Device, ...]:
    """Return the devices with these names.

    Raises:
        ShardingError: This process lacks one of them.
    """
    known = {
        (d.platform, d.id): d for platform in {p for p, _ in names} for d in _platform(platform)
    }
    missing = [
        f"{platform}:{number}" for platform, number in names if (platform, number) not in known
    ]
    if missing:
        raise ShardingError(
            f"the pickled sharding is for {len(names)} devices, and this process lacks "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}: make a sharding of "
            "its spec on a mesh of this process"
        )
    return tuple(known[name] for name in names)


def _platform(platform: str) -> list[Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def reduce_mesh(mesh: Any) -> tuple[Any, ...]:
    """Return a mesh as plain values; an abstract mesh is returned unchanged."""
    if not isinstance(mesh, Mesh):
        return (mesh,)
    names = names_of(tuple(mesh.devices.flat))
    return names, mesh.devices.shape, mesh.axis_names, mesh.axis_types


def restore_mesh(parts: tuple[Any, ...]) -> Any:
    """Return the mesh of the values of `reduce_mesh`."""
    if len(parts) == 1:
        return parts[0]
    names, shape, axis_names, axis_types = parts
    devices = np.empty(len(names), dtype=object)
    devices[:] = devices_of(names)
    return Mesh(devices.reshape(shape), axis_names, axis_types=axis_types)
