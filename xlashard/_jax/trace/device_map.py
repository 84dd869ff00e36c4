"""Replace devices in shardings, meshes and jaxprs: a program traced for some devices, on others."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax._src.mesh import AbstractMesh, Mesh
from jax._src.named_sharding import NamedSharding
from jax._src.sharding_impls import GSPMDSharding

from xlashard._jax.runtime.shardings import UNSPECIFIED, Device, JaxSharding
from xlashard._jax.trace.jaxprs import array_literals, hoist
from xlashard._jax.trace.rewriting import MeshMap
from xlashard._jax.trace.tracing import Jaxpr

# Memories of this kind exist on all platforms; other kinds are the default one of a platform.
_KEPT_MEMORY = "pinned_host"


class DeviceMap(MeshMap):
    """Replacement of the devices of programs.

    Args:
        devices: The new device of each old one.
    """

    def __init__(self, devices: Mapping[Device, Device]) -> None:
        super().__init__(self._replaced)
        self._devices = dict(devices)
        self._meshes: dict[Any, Any] = {}

    def mesh(self, mesh: Any) -> Any:
        """Return a mesh on the new devices; a mesh of other devices unchanged."""
        if mesh not in self._meshes:
            self._meshes[mesh] = self._mesh(mesh)
        return self._meshes[mesh]

    def _mesh(self, mesh: Any) -> Any:
        if isinstance(mesh, AbstractMesh):
            if mesh.abstract_device is None:
                return mesh
            some = next(iter(self._devices.values()))
            new = Mesh(np.array([some]), ("x",)).abstract_mesh.abstract_device
            return mesh.update(abstract_device=new)
        if mesh.empty or not self._devices.keys() >= set(mesh.devices.flat):
            return mesh
        new = np.empty(mesh.devices.shape, dtype=object)
        new.flat[:] = [self._devices[device] for device in mesh.devices.flat]
        return Mesh(new, mesh.axis_names, axis_types=mesh.axis_types)

    def sharding(self, sharding: Any) -> Any:
        """Return a sharding on the new devices; None and `UNSPECIFIED` unchanged."""
        if isinstance(sharding, NamedSharding):
            kind = sharding.memory_kind if sharding.memory_kind == _KEPT_MEMORY else None
            return type(sharding)(self.mesh(sharding.mesh), sharding.spec, memory_kind=kind)
        if isinstance(sharding, jax.sharding.SingleDeviceSharding):
            (device,) = sharding.device_set
            return type(sharding)(self._devices.get(device, device))
        if isinstance(sharding, GSPMDSharding):
            devices = [self._devices.get(d, d) for d in sharding._device_assignment]
            return GSPMDSharding(devices, sharding._hlo_sharding)
        return sharding

    def _replaced(self, value: Any, *, in_trace: bool) -> Any:
        return self.sharding(value) if isinstance(value, JaxSharding) else self.mesh(value)


def spread_arrays(jaxpr: Jaxpr) -> list[jax.Array]:
    """Return the arrays in a jaxpr that are on several devices."""
    values = [*jaxpr.consts, *[value for value, _ in array_literals(jaxpr)]]
    return list(filter(_is_spread, values))


def _is_spread(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.sharding.num_devices > 1


def with_arguments_for_arrays(jaxpr: Jaxpr) -> tuple[Jaxpr, list[jax.Array]]:
    """Turn the closed-over arrays on several devices into the first arguments of a jaxpr.

    Returns:
        The new jaxpr, and the arrays that are arguments now.
    """
    return hoist(jaxpr, list(map(_is_spread, jaxpr.consts)))


def with_leading_arguments(params: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the parameters of JAX's `jit` primitive for more arguments in front.

    Args:
        params: The parameters.
        count: Number of new arguments, without shardings and not donated.
    """
    new = {"in_shardings": UNSPECIFIED, "in_layouts": None, "donated_invars": False}
    return {**params, **{name: (*(v,) * count, *params[name]) for name, v in new.items()}}
