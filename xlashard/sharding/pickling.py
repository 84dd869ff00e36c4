"""Devices in pickles: by platform and number, looked up again where the pickle is read."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from xlashard._jax.runtime.shardings import Device
from xlashard.errors import ShardingError

type DeviceNames = tuple[tuple[str, int], ...]


def names_of(devices: Sequence[Device]) -> DeviceNames:
    """What identifies devices in every process of a program."""
    return tuple((d.platform, d.id) for d in devices)


def devices_of(names: DeviceNames) -> tuple[Device, ...]:
    """The devices of such names.

    Raises:
        ShardingError: If this process knows none of that name.
    """
    known = {
        (d.platform, d.id): d for platform in {p for p, _ in names} for d in _platform(platform)
    }
    missing = [
        f"{platform}:{number}" for platform, number in names if (platform, number) not in known
    ]
    if missing:
        raise ShardingError(
            f"the pickled sharding is for {len(names)} devices, of which this process does not "
            f"know {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}: make one on the "
            "mesh at hand from its spec"
        )
    return tuple(known[name] for name in names)


def _platform(platform: str) -> list[Device]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def reduce_mesh(mesh: Any) -> tuple[Any, ...]:
    """A mesh as plain values; an abstract one as it is."""
    if not isinstance(mesh, Mesh):
        return (mesh,)
    names = names_of(tuple(mesh.devices.flat))
    return names, mesh.devices.shape, mesh.axis_names, mesh.axis_types


def restore_mesh(parts: tuple[Any, ...]) -> Any:
    """The mesh of such values."""
    if len(parts) == 1:
        return parts[0]
    names, shape, axis_names, axis_types = parts
    devices = np.empty(len(names), dtype=object)
    devices[:] = devices_of(names)
    return Mesh(devices.reshape(shape), axis_names, axis_types=axis_types)
