"""Devices as a program depends on them: what they are, where they are, and in which order."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xlashard._jax.runtime.shardings import Device
from xlashard._jax.runtime.topologies import is_compile_only, torus_wraps
from xlashard.lazily import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """What a program depends on of one of its devices.

    Attributes:
        id: Its number.
        process: The process that it belongs to.
        kind: What it is, such as `"TPU v4"`.
        coords: Where in its torus it is; empty for devices without such places.
        core: Which core of its chip it is.
        slice: Which slice it is in, where slices are joined by a network.
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
            # Only devices in a torus have them.
            coords=tuple(getattr(device, "coords", None) or ()),
            core=getattr(device, "core_on_chip", None) or 0,
            slice=getattr(device, "slice_index", None) or 0,
        )

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "DeviceFacts":
        """Parse the facts of a device."""
        return cls(
            kind=str(said["kind"]),
            coords=tuple(map(int, said["coords"])),
            **{name: int(said[name]) for name in ("id", "process", "core", "slice")},
        )

    @property
    def place(self) -> tuple[int, ...]:
        """Return its position among all devices of its torus."""
        return self.slice, *self.coords, self.core

    def __str__(self) -> str:
        core = f", core {self.core}" if self.core else ""
        of_slice = f" of slice {self.slice}" if self.slice else ""
        return f"{self.coords}{core}{of_slice}"


@dataclass(frozen=True)
class TorusFacts:
    """What a program depends on of the whole torus that its devices are part of.

    Attributes:
        shape: Chips along each dimension, in each slice.
        slices: How many slices.
        devices: How many devices, in all slices.
        wraps: For each dimension, whether its links close to a ring; empty where that was not
            said, and follows from the shape.
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
    def from_json(cls, said: Mapping[str, Any] | None) -> "TorusFacts | None":
        """Parse the facts of a torus."""
        if said is None:
            return None
        return cls(
            shape=tuple(map(int, said["shape"])),
            slices=int(said["slices"]),
            devices=int(said["devices"]),
            wraps=tuple(map(bool, said["wraps"])),
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

    A program may move in the torus, and not be bent.
    """
    pairs = list(enumerate(zip(saved, here, strict=True)))
    for i, (theirs, ours) in pairs:
        if theirs.kind != ours.kind:
            return [f"its device {i} was made for a {theirs.kind}, this is a {ours.kind}"]
    found = _order_difference(saved, here) or _place_difference(saved, here)
    for i, (theirs, ours) in pairs:
        if theirs.process != ours.process and not found:
            found.append(
                f"its device {i} belonged to process {theirs.process}, this one to process "
                f"{ours.process}"
            )
    return found


def _order_difference(saved: Sequence[DeviceFacts], here: Sequence[DeviceFacts]) -> list[str]:
    """Return the first position at which equal devices are in another order."""
    if not saved[0].coords:
        return []
    theirs, ours = [f.place for f in saved], [f.place for f in here]
    if theirs == ours or sorted(theirs) != sorted(ours):
        return []
    i = next(i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1])
    return [
        f"its devices are here in another order: device {i} was the one at {saved[i]}, and is the "
        f"one at {here[i]}, which was device {theirs.index(ours[i])}: give devices=mesh, the mesh "
        "that it was compiled on"
    ]


def _place_difference(saved: Sequence[DeviceFacts], here: Sequence[DeviceFacts]) -> list[str]:
    for i, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
        if _offset(theirs, saved[0]) != _offset(ours, here[0]):
            return [
                f"its device {i} was at {theirs} in the torus, its first one at {saved[0]}; here "
                f"they are at {ours} and {here[0]}"
            ]
    return []


def _offset(device: DeviceFacts, first: DeviceFacts) -> tuple[int, ...]:
    """Return the position of a device relative to the first one."""
    if len(device.coords) != len(first.coords):
        return device.place
    moved = (a - b for a, b in zip(device.coords, first.coords, strict=True))
    return (device.slice - first.slice, *moved, device.core)
