"""Devices of a topology: programs compile for them, and there are none that could run one."""

from collections.abc import Sequence
from functools import lru_cache

from jax._src import tpu_info
from jax._src.lib import _jax

from xlashard._jax.shardings import Device
from xlashard.errors import CompileOnlyError
from xlashard.lazily import dataclass

_FLAT = ("v2", "v3", "v5e", "v6e")
"""Generations whose chips form a torus of two dimensions."""


def only_compiles(device: Device) -> bool:
    """Whether a device is one of a topology, and not there."""
    return isinstance(device.client, _jax.CompileOnlyPyClient)


def check_is_there(devices: Sequence[Device]) -> None:
    """Refuses devices that no array can be put on.

    Raises:
        CompileOnlyError: If they are those of a topology.
    """
    if devices and only_compiles(devices[0]):
        name = topology_name(devices[0])
        raise CompileOnlyError(
            f"no array can be put on {name}, a topology without chips: programs compile for it and "
            "don't run. Describe the array instead: "
            "jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)",
            topology=name,
        )


def never_runs(name: str, device: Device) -> CompileOnlyError:
    """The error of a call of a program that was compiled for a topology.

    Args:
        name: Of its function.
        device: One of those it was compiled for.
    """
    topology = topology_name(device)
    return CompileOnlyError(
        f"{name} is compiled for {topology}, a topology without chips, and runs nowhere here. What "
        "it would do tell compiled.memory_analysis(), .cost_analysis() and .as_text(), of "
        "compiled = pjit(f).lower(*shapes).compile(); to run it, save it, "
        "file.write_bytes(compiled.serialize()), and load it on such a slice, "
        "Compiled.deserialize(file.read_bytes())",
        topology=topology,
    )


def topology_name(device: Device) -> str:
    """The topology of a device as libtpu writes it: `v5p:2x2x4`; several slices as `2 of` it."""
    devices = device.client.devices()
    version = str(tpu_info.chip_version_from_device_kind(device.device_kind))
    name = version if version.startswith("v") else f"tpu{version}"
    rank = 2 if name in _FLAT else 3
    sizes = (max(d.coords[i] for d in devices) + 1 for i in range(rank))
    slices = len({getattr(d, "slice_index", None) for d in devices})
    text = f"{name}:{'x'.join(map(str, sizes))}"
    return text if slices == 1 else f"{slices} slices of {text}"


@dataclass(frozen=True)
class UnassignedDevice:
    """A position in the device assignment of a program that is lowered without devices."""

    id: int
    platform: str = "unassigned"
    device_kind: str = "unassigned"
    process_index: int = 0


@lru_cache(maxsize=16)
def unassigned_devices(count: int) -> tuple[Device, ...]:
    """Return stand-ins for devices, by which a program can be lowered and not compiled."""
    return tuple(map(UnassignedDevice, range(count)))
