"""Kind, position and order of the devices that a compiled program depends on."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import is_compile_only, torus_wraps
from xlashard.lazily import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of a device that a compiled program depends on.

    Attributes:
        id: Its number.
        process: Its process.
        kind: Its kind, such as `"TPU v4"`.
        coords: Its coordinates in the torus; empty for other devices.
        core: Its core on the chip.
        slice: Its slice, for slices that are joined by a network.
    """

    id: int
    process: int
    kind: str
    coords: tuple[int, ...]
    core: int
    slice: int = 0

    @classmethod
    def of(cls, device: Device) -> "DeviceFacts":
        """Return the facts of a device."""
        return cls(
            id=device.id,
            process=device.process_index,
            kind=device.device_kind,
            # Only devices in a torus have coordinates.
            coords=tuple(getattr(device, "coords", None) or ()),
            core=getattr(device, "core_on_chip", None) or 0,
            slice=getattr(device, "slice_index", None) or 0,
        )

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "DeviceFacts":
        """Parse the facts of a device."""
        return cls(
            kind=str(record["kind"]),
            coords=tuple(map(int, record["coords"])),
            **{name: int(record[name]) for name in ("id", "process", "core", "slice")},
        )

    @property
    def position(self) -> tuple[int, ...]:
        """Return its position among all devices of its torus."""
        return self.slice, *self.coords, self.core

    def __str__(self) -> str:
        core = f", core {self.core}" if self.core else ""
        of_slice = f" of slice {self.slice}" if self.slice else ""
        return f"{self.coords}{core}{of_slice}"


@dataclass(frozen=True)
class TorusFacts:
    """Facts of the whole torus of a program's devices.

    Attributes:
        shape: Chips along each dimension, in each slice.
        slices: Number of slices.
        devices: Number of devices, in all slices.
        wraps: Whether the links of each dimension close to a ring; empty where the shape
            determines it.
    """

    shape: tuple[int, ...]
    slices: int
    devices: int
    wraps: tuple[bool, ...]

    @classmethod
    def of(cls, device: Device) -> "TorusFacts | None":
        """Return the facts of a device's torus; None for a device outside of a torus."""
        if not getattr(device, "coords", None):
            return None
        facts = [DeviceFacts.of(other) for other in device.client.devices()]
        return cls(
            shape=tuple(max(along) + 1 for along in zip(*(f.coords for f in facts), strict=True)),
            slices=len({f.slice for f in facts}),
            devices=len(facts),
            wraps=torus_wraps(device),
        )

    @classmethod
    def from_json(cls, record: Mapping[str, Any] | None) -> "TorusFacts | None":
        """Parse the facts of a torus."""
        if record is None:
            return None
        return cls(
            shape=tuple(map(int, record["shape"])),
            slices=int(record["slices"]),
            devices=int(record["devices"]),
            wraps=tuple(map(bool, record["wraps"])),
        )

    def __str__(self) -> str:
        slices = f"{self.slices} slices of " if self.slices > 1 else ""
        return f"{slices}{'x'.join(map(str, self.shape))} chips with {self.devices} devices"


def processes_of(device: Device) -> int:
    """Return the number of processes of a device's client."""
    if is_compile_only(device):
        return len({other.process_index for other in device.client.devices()})
    return jax.process_count()


def torus_differences(saved: TorusFacts | None, here: TorusFacts | None) -> list[str]:
    """Return the differences of two topologies, as texts."""
    if saved is None or here is None:
        return []
    found = []
    if (saved.shape, saved.slices, saved.devices) != (here.shape, here.slices, here.devices):
        found.append(f"it was made for a topology of {saved}, this is one of {here}")
    elif saved.wraps and here.wraps and saved.wraps != here.wraps:
        found.append(
            f"it was made for a topology that wraps {_dimensions(saved.wraps)}, this one wraps "
            f"{_dimensions(here.wraps)}"
        )
    return found


def _dimensions(wraps: Sequence[bool]) -> str:
    names = [name for name, wrap in zip("xyz", wraps, strict=False) if wrap]
    return f"along {' and '.join(names)}" if names else "nowhere"


def device_differences(saved: Sequence[DeviceFacts], here: Sequence[DeviceFacts]) -> list[str]:
    """Return the differences of two device lists, as texts; the first example of each kind.

    A program may move within the torus, if its devices keep their relative positions.
    """
    pairs = list(enumerate(zip(saved, here, strict=True)))
    for i, (old, new) in pairs:
        if old.kind != new.kind:
            return [f"its device {i} was made for a {old.kind}, this is a {new.kind}"]
    found = _order_difference(saved, here) or _place_difference(saved, here)
    for i, (old, new) in pairs:
        if old.process != new.process and not found:
            found.append(
                f"its device {i} belonged to process {old.process}, this one to process "
                f"{new.process}"
            )
    return found


def _order_difference(saved: Sequence[DeviceFacts], here: Sequence[DeviceFacts]) -> list[str]:
    """Return the first position at which equal devices are in another order."""
    if not saved[0].coords:
        return []
    old, new = [f.position for f in saved], [f.position for f in here]
    if old == new or sorted(old) != sorted(new):
        return []
    i = next(i for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
    return [
        f"its devices are here in another order: device {i} was the one at {saved[i]}, and is the "
        f"one at {here[i]}, which was device {old.index(new[i])}: pass devices=mesh, the mesh "
        "of its compilation"
    ]


def _place_difference(saved: Sequence[DeviceFacts], here: Sequence[DeviceFacts]) -> list[str]:
    for i, (old, new) in enumerate(zip(saved, here, strict=True)):
        if _offset(old, saved[0]) != _offset(new, here[0]):
            return [
                f"its device {i} was at {old} in the torus, its first one at {saved[0]}; here "
                f"they are at {new} and {here[0]}"
            ]
    return []


def _offset(device: DeviceFacts, first: DeviceFacts) -> tuple[int, ...]:
    """Return the position of a device relative to the first one."""
    if len(device.coords) != len(first.coords):
        return device.position
    moved = (a - b for a, b in zip(device.coords, first.coords, strict=True))
    return (device.slice - first.slice, *moved, device.core)
