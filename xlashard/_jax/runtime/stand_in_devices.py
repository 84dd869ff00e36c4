"""Emulated CPU devices that stand in for those of a topology."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.experimental.mesh_utils as public_mesh_utils
import numpy as np

from xlashard._jax.private import mesh_utils, replace_name, xla_bridge
from xlashard._jax.runtime.shardings import Device


def emulate_devices(count: int) -> Sequence[Device]:
    """Return emulated CPU devices, as the only devices of this process.

    The backend is initialised, so that later changes of `XLA_FLAGS` have no effect on it.

    Args:
        count: Number of devices.
    """
    if not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()


_MESHES = ("create_device_mesh", "create_hybrid_device_mesh")
_QUERIES = ("devices", "local_devices", "device_count", "local_device_count")
_FORBIDDEN = ("jax_platforms", "jax_num_cpu_devices")


def stand_in(devices: Mapping[Device, Device]) -> Callable[[], None]:
    """Let the names by which programs read devices behave as on a topology.

    - `jax.make_mesh` and `mesh_utils` arrange the devices as they arrange those of the topology.
    - `jax.default_backend()` is the topology's platform, which `jax.devices(platform)` and its
      siblings accept, for GPUs also as `cuda`.
    - `jax.distributed.initialize` does nothing, and the number of emulated devices stays.

    Attributes of a device, such as `platform`, stay those of the CPU.

    Args:
        devices: The topology's device of each emulated one.

    Returns:
        A function that undoes it.
    """
    undo = ExitStack()
    platform = next(iter(devices.values())).platform
    names = {platform, "cuda"} if platform == "gpu" else {platform}

    def replace(owner: Any, name: str, value: Any) -> None:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    for name in _MESHES:
        create = getattr(mesh_utils, name)
        arranged = _arranged(create, devices)
        undo.callback(replace_name, mesh_utils, name, create)
        replace_name(mesh_utils, name, arranged)
        replace(public_mesh_utils, name, arranged)
    for name in _QUERIES:
        replace(jax, name, _accepting(getattr(jax, name), names))
    replace(jax, "default_backend", lambda: platform)
    replace(jax.distributed, "initialize", lambda *args, **kwargs: None)
    replace(jax.distributed, "is_initialized", lambda: False)
    update = jax.config.update
    replace(jax.config, "update", lambda name, v: None if name in _FORBIDDEN else update(name, v))
    return undo.close


def _arranged(create: Callable[..., Any], devices: Mapping[Device, Device]) -> Callable[..., Any]:
    """Return a function of `mesh_utils` that arranges emulated devices as the topology's."""
    emulated = {new: old for old, new in devices.items()}

    @functools.wraps(create)
    def arrange(*args: Any, **kwargs: Any) -> Any:
        names = ("mesh_shape", "dcn_mesh_shape") if "hybrid" in create.__name__ else ("mesh_shape",)
        named = {**dict(zip((*names, "devices"), args, strict=False)), **kwargs}
        requested = named.get("devices")
        requested = jax.devices() if requested is None else list(requested)
        if not devices.keys() >= set(requested):
            return create(*args, **kwargs)
        grid = create(**{**named, "devices": [devices[device] for device in requested]})
        return np.vectorize(emulated.get, otypes=[object])(grid)

    return arrange


def _accepting(query: Callable[..., Any], platforms: set[str]) -> Callable[..., Any]:
    """Return a query of devices for which names of platforms are those of the emulated devices."""

    @functools.wraps(query)
    def accepting(*args: Any, **kwargs: Any) -> Any:
        own = {name: None if v in platforms else v for name, v in kwargs.items()}
        return query(*[None if a in platforms else a for a in args], **own)

    return accepting
